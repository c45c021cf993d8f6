"""Write the reference pages that follow from the code: ``python tests/reference.py`` (``make docs-reference``).

The command line comes from click, exit codes from the errors, the Python page from signatures and docstrings. A test
compares the files with what this program would write.
"""

import dataclasses
import functools
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, get_args, get_type_hints

import click
from checkout import ROOT

import autotune
from autotune import api
from autotune.cli.main import cli, exit_codes
from autotune.core import errors
from autotune.core.ceiling import Ceiling
from autotune.core.inspection import Inspection
from autotune.core.messages import Answer, JobLine, JobMessage, Progress, ServerLine
from autotune.core.options import BY_NAME, OPTIONS, USUAL
from autotune.core.outcome import Completed, Failed, OutOfMemory
from autotune.core.prediction import PredictionAnswer
from autotune.core.schema import VERSION, json_schemas
from autotune.core.workload import Workload
from autotune.devices.health import Diagnosis
from autotune.devices.listing import devices_type
from autotune.results.json_document import StudyDocument, candidate_type, trial_type
from autotune.results.own_arguments import OwnArguments
from autotune.results.predicted import (
    AdviceDocument,
    BatchDocument,
    FittingOfferDocument,
    OfferDocument,
    PredictionDocument,
    RanksPredictionDocument,
    TimedBatchDocument,
    arm_prediction_type,
    best_prediction_type,
)
from autotune.space.training_arguments import TunedArguments
from autotune.tuning.request import recorded_fields, recorded_type
from autotune.verify.loss import LossComparisonDocument
from autotune.verify.throughput import VerificationDocument

FOLDER = ROOT / "docs" / "reference"
_MADE = "<!-- Written by make docs-reference from the code. Do not edit. -->\n\n"


def main() -> None:
    """Write every generated page."""
    for name, write in PAGES.items():
        (FOLDER / name).parent.mkdir(parents=True, exist_ok=True)
        (FOLDER / name).write_text(write(), encoding="utf-8")


SCHEMAS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "study": ("What `search`, `resume` and `show` print with `--json`, and `Result.document()`.", (StudyDocument,)),
    "trial": ("One of a study's `trials`, `best`, `baseline`, and of `Result.records`.", (trial_type(),)),
    "request": ("A recorded request: the options of a search.", (recorded_type(),)),
    "workload": ("What is trained: sent to trial processes and recorded.", (Workload,)),
    "candidate": ("A candidate: an arm with its batch.", (candidate_type(),)),
    "verification": ("What `verify` prints with `--json`.", (VerificationDocument,)),
    "loss-comparison": ("What `verify --same-loss` prints with `--json`.", (LossComparisonDocument,)),
    "predictions": ("What `predict` prints with `--json`.", (PredictionDocument, RanksPredictionDocument)),
    "arm-prediction": ("One of the `arms` that `predict` prints.", (arm_prediction_type(),)),
    "batch-prediction": ("One of the `batches` of an arm.", (TimedBatchDocument, BatchDocument)),
    "best-prediction": ("What is `best` for a GPU, as `predict` prints it.", (best_prediction_type(),)),
    "training-arguments": ("What `export` prints, but for code that trains without a `Trainer`.", (TunedArguments,)),
    "own-arguments": ("What `export` prints for a loop of one's own, Accelerate or Lightning.", (OwnArguments,)),
    "advice": ("What `advise` prints with `--json`.", (AdviceDocument,)),
    "offer": ("One of the `gpus` that `advise` compares.", (FittingOfferDocument, OfferDocument)),
    "devices": ("What `devices` prints with `--json`.", (devices_type(),)),
    "doctor": ("What `doctor` prints with `--json`.", (Diagnosis,)),
    "ceiling": ("The memory that trials of a study may reserve.", (Ceiling,)),
    "job": ("What a trial server is given to run: a trial, an inspection, data to read, a prediction.", (JobMessage,)),
    "inspection": ("The result of an inspection, which is also stored.", (Inspection,)),
    "prediction": ("The result of a prediction, which is also stored.", (PredictionAnswer,)),
    "progress": ("What a job under way sends.", (Progress,)),
    "job-line": ("What the process of a job tells the trial server.", (JobLine,)),
    "server-line": ("What a trial server says of itself and of its jobs.", get_args(ServerLine)),
    "answer": ("How a job ended, with its result; a trial's result is an outcome.", (Answer,)),
    "outcome": ("How a trial ended: sent by its process and recorded.", (Completed, OutOfMemory, Failed)),
}
"""Every type of document that is printed, stored or sent, by the name of its schema's file."""


_REQUEST = recorded_type().__name__
_HELP = {each.metadata["recorded_as"]: BY_NAME[each.metadata["option"]].help for each in recorded_fields()}


def _schemas_page() -> str:
    rows = ((f"[{name}](schemas/{name}.json)", about) for name, (about, _) in SCHEMAS.items())
    return (
        f"{_MADE}# JSON schemas\n\n"
        "The types of documents as [JSON Schema](https://json-schema.org). A document that is stored or printed says "
        "the version of its schema in `schema_version`. It grows when a field changes its meaning. Fields may be "
        "added without that. Documents without it are from before there were versions, and have the meaning of version "
        f"1; the version now is {VERSION}.\n\n"
        f"{_table(('document', 'what it is'), rows)}"
    )


def _schema(*kinds: Any) -> str:
    found, components = json_schemas(kinds, "#/$defs/{name}")
    whole = found[0] if len(found) == 1 else {"anyOf": list(found)}
    schema: dict[str, Any] = {"$schema": "https://json-schema.org/draft/2020-12/schema", **whole, "$defs": components}
    for name, definition in schema["$defs"].items():
        kind = _documented(kinds).get(name)
        for field, property_ in definition.get("properties", {}).items():
            told = _docstring_of(kind, field) if kind is not None else _HELP.get(field, "") if name == _REQUEST else ""
            if told:
                property_["description"] = told
            if kind in (VerificationDocument, LossComparisonDocument) and field in ("candidate", "reference"):
                property_["$ref"] = "candidate.json"
            if name == "FittingOfferDocument" and field == "candidate":
                property_["$ref"] = "candidate.json"
            if kind is AdviceDocument and field == "gpus":
                property_["items"] = {"$ref": "offer.json"}
            if name.endswith("PredictionDocument") and field == "arms":
                property_["items"] = {"$ref": "arm-prediction.json"}
            if name == "GpuPredictionDocument" and field == "best":
                property_["anyOf"] = [{"$ref": "best-prediction.json"}, {"type": "null"}]
            if name == "ArmPrediction" and field == "batches":
                property_["items"] = {"$ref": "batch-prediction.json"}
            # Their type is made of an arm's and a measurement's fields; it has a schema of its own.
            if kind is StudyDocument and field in ("best", "baseline", "trials"):
                trial = {"$ref": "trial.json"}
                property_ |= {"items": trial} if field == "trials" else {"anyOf": [trial, {"type": "null"}]}
    return json.dumps(schema, indent=2, ensure_ascii=False, default=list) + "\n"


def _documented(kinds: Iterable[Any]) -> dict[str, type]:
    """Return the dataclasses that types are made of, by name."""
    found: dict[str, type] = {}
    for kind in kinds:
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            found[kind.__name__] = kind
            found |= _documented(get_type_hints(kind).values())
        else:
            found |= _documented(get_args(kind))
    return found


def _command_line() -> str:
    parts = [
        f"{_MADE}# Command line\n",
        "Results go to stdout, everything else to stderr. `autotune COMMAND --help` shows the same in a terminal.\n",
        _table(
            ("command", "what it does"),
            ((f"[`autotune {name}`](#autotune-{name})", _first_line(command)) for name, command in _commands()),
        ),
    ]
    for name, command in _commands():
        parts += _command(f"autotune {name}", command, level=2)
    return "\n".join(parts)


def _commands() -> Iterator[tuple[str, click.Command]]:
    context = click.Context(cli)
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        yield name, command


def _first_line(command: click.Command) -> str:
    return _prose(command.help or "").split("\n\n")[0]


def _command(name: str, command: click.Command, level: int) -> list[str]:
    context = click.Context(command, info_name=name, **cli.context_settings)
    usage = command.get_usage(context).removeprefix("Usage: ")
    found = [f"\n{'#' * level} {name}\n", f"    {' '.join(usage.split())}\n", _help(command.help or "")]
    sections: dict[str, tuple[str, ...]] = getattr(command, "sections", {})
    records = {str(p.name): p.get_help_record(context) for p in command.get_params(context)}
    for heading, names in sections.items():
        found.append(f"**{heading}**\n\n{_options([records.pop(each) for each in names])}")
    left = [record for each, record in records.items() if each != "help"]
    if any(left):
        found.append(_options(left))
    if isinstance(command, click.Group):
        for each in command.list_commands(context):
            inner = command.get_command(context, each)
            found += _command(f"{name} {each}", inner, level + 1)
    return found


def _options(records: list[tuple[str, str] | None]) -> str:
    rows = ((f"`{names}`", " ".join(told.split())) for names, told in filter(None, records))
    return _table(("option", "meaning"), rows)


def _help(text: str) -> str:
    """Return a command's help as Markdown: paragraphs that click does not wrap are code."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    found = []
    for paragraph in paragraphs:
        if paragraph.startswith("\b\n"):
            found.append("\n".join(f"    {line.strip()}" for line in paragraph.splitlines()[1:]))
        else:
            found.append(" ".join(paragraph.split()))
    return "\n\n".join(found) + "\n"


def _prose(text: str) -> str:
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in inspect.cleandoc(text).split("\n\n"))


def _table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    escaped = (tuple(cell.replace("|", "\\|") for cell in row) for row in rows)
    lines = [head, ("---",) * len(head), *escaped]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _exit_codes() -> str:
    raised = {
        kind.exit_code: f"`{name}`"
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.AutotuneError)
    }
    rows = ((str(code), meaning, raised.get(code, "")) for code, meaning in exit_codes().items())
    return (
        f"{_MADE}# Exit codes\n\n"
        "Every error is two lines on stderr: which value was wrong, and what to do next. From Python, the same error "
        "is an exception of `autotune.errors`; all are `AutotuneError`.\n\n"
        f"{_table(('code', 'meaning', 'exception'), rows)}"
    )


def _python() -> str:
    parts = [
        f"{_MADE}# Python\n",
        "How to use it is told in [Use it from Python or a notebook](../how-to/python.md). The options of `search` are "
        "those of the [command line](cli.md#autotune-search).\n",
    ]
    for name in ("search", "load"):
        parts += [f"## autotune.{name}\n", _signature(name, getattr(autotune, name)), _doc(getattr(autotune, name))]
    for kind in (api.Result, api.Trial):
        parts += [f"## {kind.__name__}\n", _doc(kind), _table(("name", "meaning"), _members(kind))]
    return "\n".join(parts)


def _signature(name: str, function: Any) -> str:
    lines = [f"def {name}("]
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "    *," not in lines:
            lines.append("    *,")
        lines.append(f"    {_parameter(parameter)},")
    returned = inspect.signature(function).return_annotation
    return "\n".join(["```py", *lines, f") -> {returned}", "```\n"])


def _parameter(parameter: inspect.Parameter) -> str:
    default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
    return f"{parameter.name}: {parameter.annotation}{default}"


def _doc(documented: Any) -> str:
    return _code_spans(_prose(documented.__doc__ or "")) + "\n"


def _code_spans(text: str) -> str:
    return re.sub(r"``(.+?)``", r"`\1`", text)


def _members(kind: type) -> Iterator[tuple[str, str]]:
    for name in inspect.get_annotations(kind):
        yield f"`{name}`", _field_doc(kind, name)
    for name, member in vars(kind).items():
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            yield f"`{name}`", _cell(member.__doc__)
        elif inspect.isfunction(member):
            _, *parameters = inspect.signature(member).parameters.values()
            shown = ", ".join(f"**{p.name}" if p.kind is p.VAR_KEYWORD else _parameter(p) for p in parameters)
            yield f"`{name}({shown})`", _cell(member.__doc__)


def _cell(text: str | None) -> str:
    """Return a docstring on one line."""
    return " ".join(_code_spans(text or "").split())


def _field_doc(kind: type, name: str) -> str:
    """Return the text under a field of a dataclass, or its type where there is none."""
    return _docstring_of(kind, name) or f"`{inspect.get_annotations(kind)[name]}`"


def _docstring_of(kind: type, name: str) -> str:
    """Return the text under a field of a dataclass; empty where there is none."""
    found = re.search(rf'^    {name}: [^\n]*\n    """(.+?)"""', _source(kind), re.MULTILINE | re.DOTALL)
    return _cell(found[1]) if found else ""


# Python parses the whole file to find a class in it.
_source = functools.cache(inspect.getsource)


def _api() -> str:
    from autotune.service.app import make_app
    from autotune.service.searches import Searches

    # Of the searches only what lies within the process is touched: no request is answered.
    app = make_app(Searches(None, "", None))  # type: ignore[arg-type]
    return json.dumps(app.openapi(), indent=1) + "\n"


_ABOUT = (
    "autotune finds the fastest settings to train a transformer on the GPU at hand, at a fixed effective batch size, "
    "by running real training steps in isolated processes. The distribution is traintune."
)
# What an agent has to know that follows from no declaration.
_RULES = (
    "Begin with `autotune doctor --json`: it says what is wrong with the machine and the cure.",
    "`predict --gpu NAME --json` needs no GPU and takes seconds; `search` trains, and takes minutes: give it "
    "`--time-budget 5m`, and `--json`.",
    "Own code is searched as it is: `autotune search --effective-batch N -- python train.py …`; its files stay as they "
    "are. Then `autotune run STUDY` trains with the winner.",
    "Results go to stdout, all else to stderr. An error is two lines: what was wrong, and what to do next.",
    "Only one search measures on a GPU at a time; `--wait` waits.",
)


def _commands_in_lines() -> str:
    return "".join(f"- `autotune {name}`: {_first_line(command)}\n" for name, command in _commands())


def _codes_in_lines() -> str:
    return "".join(f"- {code}: {meaning}\n" for code, meaning in exit_codes().items())


def _usual_options() -> str:
    """The options that the help of a search shows."""
    found = (option for option in OPTIONS if "search" in option.commands and option.name in USUAL)
    return "".join(f"- `{option.parameter}`: {' '.join(option.help.split())}\n" for option in found)


def _llms() -> str:
    """The index for language models, as llmstxt.org has it."""
    pages = re.findall(r"^ +- (?:([^:\n]+): )?([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    links = "".join(f"- [{title or path.removesuffix('.md')}]({path})\n" for title, path in pages)
    rules = "".join(f"- {rule}\n" for rule in _RULES)
    return f"# autotune\n\n> {_ABOUT}\n\n{rules}\n## Commands\n\n{_commands_in_lines()}\n## Pages\n\n{links}"


def _skill() -> str:
    """The skill file of coding agents: when to use autotune, and how."""
    rules = "".join(f"{number}. {rule}\n" for number, rule in enumerate(_RULES, 1))
    return (
        "---\nname: autotune\n"
        "description: Find the fastest batch size, accumulation, checkpointing, precision and other settings to train "
        "a transformer on a GPU, or predict what fits on one. Use when a training runs out of memory or is slow, or "
        "when a GPU or batch size has to be chosen.\n---\n\n"
        f"# autotune\n\n{_ABOUT}\n\nInstall from a clone of the repository: `pip install .`.\n\n{rules}\n"
        f"## Commands\n\n{_commands_in_lines()}\n"
        f"## Usual options of a search\n\n{_usual_options()}\n"
        f"## Exit codes\n\n{_codes_in_lines()}"
    )


PAGES: dict[str, Callable[[], str]] = {
    "openapi.json": _api,
    "cli.md": _command_line,
    "exit-codes.md": _exit_codes,
    "python.md": _python,
    "schemas.md": _schemas_page,
    "../llms.txt": _llms,
    "../../skills/autotune/SKILL.md": _skill,
    **{f"schemas/{name}.json": functools.partial(_schema, *kinds) for name, (_, kinds) in SCHEMAS.items()},
}
"""What returns the text of each generated page, by the name of its file."""


if __name__ == "__main__":
    main()
