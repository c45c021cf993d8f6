"""Say what fits a training loop that is not measured by itself: placeholders, ``autotune.steps``, or a function."""

from __future__ import annotations

import argparse
import ast
import itertools
import os
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from autotune.core.training_source import TrainingSource
from autotune.worker.stack import module_of
from autotune.worker.user.script_options import watch_options
from autotune.worker.user.seen_settings import (
    OF_EVALUATION,
    ConfigLine,
    likely_settings,
    line_in_config,
    settings_of,
    sizes_at_hand,
    variables_read,
)

# Names of options of well-known training codes, without dashes and in lower case, by what they decide. A name may be
# the last part of a longer one, as in train.micro_batch_size.
_NAMES = {
    "batch": (
        "per_device_train_batch_size", "per_gpu_train_batch_size", "device_batch_size", "micro_batch_size",
        "device_train_microbatch_size", "microbatch_size", "micro_train_batch_size", "train_micro_batch_size",
        "train_micro_batch_size_per_gpu",
        "train_batch_size", "batch_size", "batchsize", "batch_size_per_gpu", "local_batch_size", "ims_per_batch",
        "samples_per_gpu", "minibatch_size", "mini_batch_size", "batch", "bsz", "bs", "b",
    ),
    "accumulation": (
        "gradient_accumulation_steps", "grad_accumulation_steps", "grad_accum_steps", "accumulation_steps",
        "gradient_accumulation", "grad_accumulation", "grad_accum", "accumulate_grad_batches", "accum_freq",
        "accum_iter", "accum_count", "accum_grad", "accum_steps", "update_freq", "accumulate",
        "accumulation", "accum",
    ),
    "effective_tokens": ("total_batch_size", "global_batch_tokens", "tokens_per_batch"),
    "effective_batch": ("global_batch_size", "effective_batch_size", "global_train_batch_size"),
    "checkpointing": (
        "grad_checkpointing", "gradient_checkpointing", "activation_checkpointing", "use_checkpoint",
        "enable_gradient_checkpointing", "checkpoint_activations",
    ),
    "precision": ("amp_dtype", "mixed_precision", "precision", "dtype", "amp", "bf16"),
}  # fmt: skip
# What codes call the two precisions that nearly all of them have.
_PRECISIONS = (
    ("float32", "bfloat16"), ("32-true", "bf16-mixed"), ("32-true", "bf16-true"), ("fp32", "bf16"),
    ("no", "bf16"), ("none", "bf16"), ("32", "bf16"),
)  # fmt: skip
_MOST_NAMED = 8
# What such an option, or its help, says in other words, unless it is of an evaluation.
_HELP = re.compile(r"(?<![a-z])batch[ _-]?sizes?(?![a-z])", re.IGNORECASE)
_ACCUMULATES = re.compile(r"grad[a-z]*_?accum|accum[a-z]*_?(grad|step|iter|count|freq)")
_SIZES = {what: _NAMES[what] for what in ("batch", "accumulation")}
# What a configuration file calls the samples of a step, where it names those of a micro-step as well.
_TOTALS = (*_NAMES["effective_batch"], "train_batch_size")
# What codes call the most tokens of a batch, which then has as many samples as that leaves room for.
_TOKEN_BUDGETS = ("max_tokens", "max_tokens_per_batch", "max_batch_tokens", "batch_tokens")
_LOOP_PAGE = "docs/how-to/own-loop.md"
_PLACEHOLDERS_PAGE = "docs/how-to/own-script.md"


def next_step(source: TrainingSource, frames: Sequence[FrameType]) -> str:
    """Return what to do for a script with a loop of its own, as lines to paste, and the page of the docs."""
    steps = _function_with_steps(source)
    if steps is not None:
        return f"name the function that goes over autotune.steps: --loop {_file(source)}:{steps} (see {_LOOP_PAGE})"
    options = dict(_found_options(frames, source.argv))
    if {"batch", "effective_batch"} & options.keys():
        named = ", ".join(option.name for option in options.values())
        return f"it has {named}: put placeholders there, -- {_command(source, options)} (see {_PLACEHOLDERS_PAGE})"
    spellings = [name for action in _actions(frames) for name in action.option_strings]
    if (why := why_no_budget(spellings)) is not None:
        return why
    # What names all three checks that they agree.
    if lines := _lines(source.template.config_files(source.cwd), {**_SIZES, "effective_batch": _TOTALS}):
        return (
            f"{_changed(lines, {what: f'{{{what}}}' for what in lines})} there, of which each trial gets a copy, and "
            f"give the same command again (see {_PLACEHOLDERS_PAGE})"
        )
    if (words := _words_that_say_it(source.argv)) is not None:
        return f"its batch is on its command line: -- {_command(source, {}, words)} (see {_PLACEHOLDERS_PAGE})"
    if variables := _variables(variables_read(source.file)):
        said = " ".join(f"{name}={{{what}}}" for what, name in variables.items())
        return (
            f"it reads {' and '.join(variables.values())} from its environment: put placeholders there, "
            f"-- {said} {_command(source, {})} (see {_PLACEHOLDERS_PAGE})"
        )
    function = (
        "; else make a function train(config) of its loop that goes over autotune.steps(loader), and give "
        f"--loop {_file(source)}:train (see {_LOOP_PAGE})"
    )
    if not source.file.endswith(".py") or "site-packages" in source.file:
        # It is nobody's to change.
        function = ""
    likely, others = _likely_options(source, frames)
    if numbers := _numbers(frames) or others:
        command = _command(source, {"batch": numbers[0]})
        names = ", ".join(each.name for each in numbers)
        return (
            f"where it takes its batch on its command line (one of {names}?), or from a file that this names, put "
            f"{{batch}} there, such as -- {command} (see {_PLACEHOLDERS_PAGE}){function}"
        )
    if "batch" in likely:
        named = ", ".join(option.name for option in likely.values())
        return (
            f"it seems to take {named}: put placeholders where its command line sets that, such as "
            f"-- {_command(source, likely)} (see {_PLACEHOLDERS_PAGE}){function}"
        )
    if function and (constants := _lines([source.file], _SIZES)):
        said = " ".join(f"{what.upper()}={{{what}}}" for what in constants)
        read = {what: f'int(os.environ.get("{what.upper()}", {line.number}))' for what, line in constants.items()}
        return (
            f"{_changed(constants, read)} there, after import os, and give -- {said} {_command(source, {})} "
            f"(see {_PLACEHOLDERS_PAGE}){function}"
        )
    made = next(iter(watch_options().loaders.items()), None)
    where = f" at {made[0]}, where it is {made[1]}" if made else ""
    return (
        f"have it take its batch{where}, from its command line or from a file that this names, and put {{batch}} "
        f"there (see {_PLACEHOLDERS_PAGE}){function}"
    )


def _lines(files: Sequence[str], names: Mapping[str, Sequence[str]]) -> dict[str, ConfigLine]:
    """Return the lines of files that say settings, by what they decide; none where none says the batch."""
    lines: dict[str, ConfigLine] = {}
    for what, known in names.items():
        line = line_in_config(files, known)
        if line is not None and line not in lines.values() and (lines or what == "batch"):
            lines[what] = line
    return lines


def _changed(lines: Mapping[str, ConfigLine], values: Mapping[str, str]) -> str:
    said = " and ".join(f"{line.place} says {line.said}" for line in lines.values())
    written = (line.said.removesuffix(line.number) + values[what] for what, line in lines.items())
    return f"{said}: write {' and '.join(written)}"


def _words_that_say_it(argv: Sequence[str]) -> list[str] | None:
    """Return a command line with placeholders where it says numbers by names that are known; ``None`` without."""
    words = list(argv)
    is_said = False
    for what, known in _SIZES.items():
        for at, (word, after) in enumerate(itertools.pairwise((*argv, ""))):
            name, equals, value = word.rpartition("=")
            if not equals and word.startswith("-"):
                name, value = word, after
            if value.isdecimal() and _plain(name.rpartition("=")[2]) in known:
                words[at + (not equals)] = f"{name}={{{what}}}" if equals else f"{{{what}}}"
                is_said = is_said or what == "batch"
                break
    return words if is_said else None


def _variables(names: Sequence[str]) -> dict[str, str]:
    """Return the variables that a script reads its batch and accumulation from; none without a batch."""
    of_training = [name for name in names if not OF_EVALUATION.search(name)]
    batch = next((name for name in of_training if re.search("batch(?!es)", name.lower())), None)
    accumulation = next((name for name in names if "accum" in name.lower()), None)
    found = {"batch": batch, "accumulation": accumulation} if batch is not None else {}
    return {what: name for what, name in found.items() if name is not None}


def _command(source: TrainingSource, options: Mapping[str, _Option], argv: Sequence[str] | None = None) -> str:
    """Return the script's command line, as it is to be pasted, with placeholders in place of what it says."""
    start = "torchrun" if source.is_ranked else "python"
    words = list(source.argv if argv is None else argv)
    chosen = dict(options)
    if "accumulation" in chosen:
        chosen.pop("effective_batch", None)
        chosen.pop("effective_tokens", None)
    for option in chosen.values():
        at = next((at for at, word in enumerate(words) if word.partition("=")[0] == option.name), None)
        if at is None:
            words += option.words
            continue
        takes_next = "=" not in words[at] and len(option.words) == 2
        words[at : at + 1 + takes_next] = option.words
    name = ("-m", source.module) if source.module else (_file(source),)
    return shlex.join([start, *name, *words])


def why_no_budget(options: Sequence[str]) -> str | None:
    """Return why no placeholder fits an option that limits the tokens of a batch, and what would; ``None`` without."""
    budget = next((option for option in options if _plain(option) in _TOKEN_BUDGETS), None)
    if budget is None:
        return None
    return (
        f"{budget} seems to limit the tokens of a batch, whose samples then vary, and a search compares steps of "
        "equally many samples: give the script an option for the samples of a batch, put {batch} there, and set "
        f"{budget} so high that it never cuts a batch (see {_PLACEHOLDERS_PAGE})"
    )


def framework_of(frames: Sequence[FrameType]) -> str:
    """Return `` with …``: what library the loop is written for; empty for plain PyTorch."""
    known = {"lightning.fabric": "Lightning Fabric", "lightning_fabric": "Lightning Fabric", "deepspeed": "DeepSpeed"}
    for frame in frames:
        for package, name in known.items():
            if f"{module_of(frame)}.".startswith(f"{package}."):
                return f" with {name}"
    return ""


def _file(source: TrainingSource) -> str:
    """Return the script's file as it may be named in its folder."""
    within = os.path.relpath(source.file, source.cwd)
    return source.file if within.startswith(os.pardir) else within


@dataclass(frozen=True)
class _Option:
    """An option of the script, and what to write for it."""

    name: str
    value: str
    """A placeholder; with the option in it where that takes no value."""
    joined: bool = False
    """Whether it is written as ``name=value``."""

    @property
    def words(self) -> list[str]:
        """Return the words of the command line."""
        if f"={self.name}" in self.value:
            return [self.value]
        return [f"{self.name}={self.value}"] if self.joined else [self.name, self.value]


def batch_words(frames: Sequence[FrameType], argv: Sequence[str]) -> tuple[str, ...]:
    """Return the words that tell a script its batch, with a placeholder in them; none where no option is known."""
    options = dict(_found_options(frames, argv))
    return tuple(options["batch"].words) if "batch" in options else ()


def _found_options(frames: Sequence[FrameType], argv: Sequence[str]) -> Iterator[tuple[str, _Option]]:
    """Yield the options of the script that decide what is searched, spelled as ``argv`` or its parser has them."""
    actions = _actions(frames)
    given = {word.partition("=")[0] for word in argv}
    # Hydra's own parser takes any number of words.
    takes_rest = any(each.nargs in (argparse.REMAINDER, "*") and not each.option_strings for each in actions)
    settings, joined = ({}, True) if actions and not takes_rest else settings_of(frames)
    if takes_rest and not settings:
        pairs = itertools.pairwise(argv)
        settings = {key: int(value) for key, value in pairs if value.isdecimal() and not key.startswith("-")}
        joined = False
    settings = {key: value for key, value in settings.items() if not OF_EVALUATION.search(key)}
    has_batch = False
    for what, names in _NAMES.items():
        # The only one that there is, whatever it is called.
        what = "batch" if what.startswith("effective_") and not has_batch else what
        for name in names:
            action = next((action for action in actions if _is_named(action.option_strings, name)), None)
            if action is not None:
                option = _of_action(what, action, given)
            elif (key := next((key for key in settings if _plain(key) == name), None)) is not None:
                option = _of_setting(what, key, settings[key], joined=joined)
            else:
                continue
            if option is not None:
                has_batch = has_batch or what == "batch"
                yield what, option
                break
        else:
            described = next((action for action in actions if _is_described(what, action)), None)
            if described is not None and (option := _of_action(what, described, given)) is not None:
                has_batch = has_batch or what == "batch"
                yield what, option


def _likely_options(source: TrainingSource, frames: Sequence[FrameType]) -> tuple[dict[str, _Option], list[_Option]]:
    """Return options for batch and accumulation by the names that they have in what the script reads, spelled alike.

    Where none is named like a batch, all of them that are numbers, if a word of the command line shows how they are
    spelled.
    """
    settings = {
        key: value for key, value in likely_settings(frames, source.file).items() if not OF_EVALUATION.search(key)
    }
    pairs = (re.match(r"(-*)([A-Za-z_][\w.-]*)(=?)", word) for word in source.argv)
    known = next((pair for pair in pairs if pair and (pair[3] or (pair[1] and pair[2] in settings))), None)
    before, joined = (known[1], bool(known[3])) if known else ("--", True)

    def option(key: str, what: str = "batch") -> _Option:
        return _Option(key if key.startswith("-") else before + key, f"{{{what}}}", joined=joined)

    named = {
        what: option(key, what)
        for what, names in _SIZES.items()
        for key in [key for name in names for key in settings if _plain(key) == name][:1]
    }
    if "batch" in named or known is None:
        return named, []
    sizes = sizes_at_hand(frames)
    return named, [option(key) for key in sorted(settings, key=lambda key: settings[key] not in sizes)][:_MOST_NAMED]


def _numbers(frames: Sequence[FrameType]) -> list[_Option]:
    """Return options that take whole numbers, those first that speak of a batch, or have the size of a tensor."""
    values, sizes = watch_options().values, sizes_at_hand(frames)

    def rank(action: argparse.Action) -> tuple[bool, bool]:
        name = max(action.option_strings, key=len)
        value = values.get(action.dest, action.default)
        return "batch" not in name or bool(OF_EVALUATION.search(name)), value not in sizes

    actions = sorted((each for each in _actions(frames) if each.type is int and each.option_strings), key=rank)
    return [_Option(max(each.option_strings, key=len), "{batch}") for each in actions[:_MOST_NAMED]]


def _is_described(what: str, action: argparse.Action) -> bool:
    """Return whether an option is the samples of a training batch, or the accumulation, as its words or help say."""
    if what == "accumulation":
        return action.type is int and any(_ACCUMULATES.search(_plain(name)) for name in action.option_strings)
    if what != "batch":
        return False
    text = f"{' '.join(action.option_strings)} {action.help}"
    totals = (*_NAMES["effective_tokens"], *_NAMES["effective_batch"])
    is_total = any(_is_named(action.option_strings, name) for name in totals)
    return action.type is int and bool(_HELP.search(text)) and not OF_EVALUATION.search(text) and not is_total


def _actions(frames: Sequence[FrameType]) -> list[argparse.Action]:
    """Return the options of the script's parsers, and of the command of click or typer that is at work."""
    for frame in frames:
        command: Any = getattr(frame.f_locals.get("self"), "command", None)
        if frame.f_code.co_name == "invoke" and hasattr(command, "params"):
            options = (each for each in command.params if each.param_type_name == "option")
            return [*watch_options().actions, *map(_of_click, options)]
    return watch_options().actions


def _of_click(parameter: Any) -> argparse.Action:
    return argparse.Action(
        parameter.opts,
        parameter.name,
        nargs=0 if getattr(parameter, "is_flag", False) else None,
        help=getattr(parameter, "help", None),
        default=parameter.default,
        type=int if type(parameter.default) is int else None,
        choices=getattr(getattr(parameter, "type", None), "choices", None),
    )


def _plain(option: str) -> str:
    return option.lstrip("-").replace("-", "_").lower().rpartition(".")[2]


def _is_named(options: Sequence[str], name: str) -> bool:
    return any(
        _plain(option) == name and (len(name) > 2 or len(option) <= 4) and not OF_EVALUATION.search(option)
        for option in options
    )


def _of_action(what: str, action: argparse.Action, given: Collection[str]) -> _Option | None:
    option = max((name for name in action.option_strings if name in given), key=len, default=None) or max(
        action.option_strings, key=len
    )
    takes_value = action.nargs != 0
    match what:
        case "precision":
            if not takes_value:
                return _Option(option, f"{{precision:bf16={option}{_dtype_of_autocast()}}}")
            pair = _precisions([*map(str, action.choices or ()), str(action.default)])
            return _Option(option, f"{{precision:fp32={pair[0]},bf16={pair[1]}}}") if pair else None
        case "checkpointing":
            value = "{checkpointing}" if takes_value else f"{{checkpointing:on={option}}}"
            return _Option(option, value)
        case _:
            return _Option(option, f"{{{what}}}") if takes_value else None


def _dtype_of_autocast() -> str:
    """Return the option that says the dtype of an autocast which another one turns on, as in timm."""
    named = next((each for each in watch_options().actions if _is_named(each.option_strings, "amp_dtype")), None)
    return f" {max(named.option_strings, key=len)} bfloat16" if named is not None and named.nargs != 0 else ""


def _of_setting(what: str, key: str, value: Any, *, joined: bool) -> _Option | None:
    """Return the option of a script that reads it into a global, or into a config."""
    if what == "precision":
        pair = _precisions([str(value)])
        return _Option(key, f"{{precision:fp32={pair[0]},bf16={pair[1]}}}", joined=joined) if pair else None
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return _Option(key, f"{{{what}}}", joined=joined) if is_number else None


def _precisions(known: Sequence[str]) -> tuple[str, str] | None:
    # In open_clip, bf16 is another training than an autocast to it.
    autocast = ("fp32", "amp_bf16")
    both = next((pair for pair in (autocast, *_PRECISIONS) if set(pair) <= set(known)), None)
    return both or next((pair for pair in (*_PRECISIONS, autocast) if set(pair) & set(known)), None)


def _function_with_steps(source: TrainingSource) -> str | None:
    """Return the function of the script that goes over ``autotune.steps`` already."""
    try:
        tree = ast.parse(Path(source.file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    return next((each.name for each in functions if any(map(_is_steps, ast.walk(each)))), None)


def _is_steps(node: ast.AST) -> bool:
    """Return whether a part of a program is ``autotune.steps`` or ``autotune.step``."""
    is_named = isinstance(node, ast.Attribute) and node.attr in ("steps", "step")
    return is_named and isinstance(node.value, ast.Name) and node.value.id == "autotune"  # type: ignore[attr-defined]
