"""The best trial in the forms that training scripts take: JSON, YAML, command-line flags, Python."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import Any, Literal

from autotune.arguments import training_arguments
from autotune.errors import NoResultError
from autotune.report import Report, describe_data
from autotune.trial import Candidate

Format = Literal["json", "yaml", "cli", "python"]
FORMATS: tuple[Format, ...] = ("json", "yaml", "cli", "python")

_AUTO_CLASS_OF_TASK = {
    "sequence-classification": "AutoModelForSequenceClassification",
    "masked-lm": "AutoModelForMaskedLM",
    "causal-lm": "AutoModelForCausalLM",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "image-classification": "AutoModelForImageClassification",
    "speech-seq2seq": "AutoModelForSpeechSeq2Seq",
}


@dataclass(frozen=True)
class Export:
    """The winner's ``TrainingArguments`` fields, and what has to be said elsewhere."""

    arguments: dict[str, Any]
    """Every tuned field and nothing else; ``TrainingArguments(**arguments)`` loads it."""
    candidate: Candidate
    model_arguments: dict[str, str]
    """What belongs into ``from_pretrained``: attention implementation, weights' dtype. Empty for a user's own code."""
    model: str
    task: str
    measured: str
    """Device, versions and data of the measurement, in words."""


def make_export(report: Report) -> Export:
    """The export of a study's best trial; ``NoResultError`` where it has none."""
    best = report.best
    if best is None:
        raise NoResultError(
            f"the study {report.study.name!r} has no feasible trial to export", "continue it with autotune search"
        )
    environment = report.environment
    packages = environment["packages"]
    return Export(
        arguments=training_arguments(
            best.candidate, environment["training_arguments_fields"], environment["device_kind"]
        ),
        candidate=best.candidate,
        model_arguments={}
        if report.workload["task"] == "own"
        else {
            "attn_implementation": best.candidate.arm.attn_implementation,
            "dtype": report.workload["dtype"],
        },
        model=report.workload["model"],
        task=report.workload["task"],
        measured=f"{environment['device_name']}, torch {packages['torch']}, "
        f"transformers {packages['transformers']}; "
        + ("" if report.workload["task"] == "own" else f"{report.workload['task']}, ")
        + f"{describe_data(report.workload)}",
    )


def beside_lines(export: Export) -> list[str]:
    """What the export cannot hold because it is no field of ``TrainingArguments``."""
    if export.task == "own":
        over = (
            f"hand them to {export.model} as its overrides"
            if ":" in export.model
            else f"give them to {export.model} after its other options (--format cli), where the last one counts"
        )
        return [over, f"measured on {export.measured}"]
    options = ", ".join(f"{name}={value!r}" for name, value in export.model_arguments.items())
    return [
        f"load the model with from_pretrained(…, {options})",
        f"measured on {export.measured}",
    ]


def render(export: Export, form: Format) -> str:
    """The export as text, ending in a newline."""
    match form:
        case "json":
            return json.dumps(export.arguments, indent=2) + "\n"
        case "yaml":
            comments = "".join(f"# {line}\n" for line in beside_lines(export))
            # JSON values are YAML values, and quoting is then nobody's problem.
            return comments + "".join(f"{name}: {json.dumps(value)}\n" for name, value in export.arguments.items())
        case "cli":
            return " ".join(_flag(name, value) for name, value in export.arguments.items()) + "\n"
        case "python":
            return _python(export)


def _flag(name: str, value: Any) -> str:
    text = json.dumps(value) if isinstance(value, dict | bool) else str(value)
    return f"--{name} {shlex.quote(text)}"


def _python(export: Export) -> str:
    fields = "".join(f"    {name}={value!r},\n" for name, value in export.arguments.items())
    if export.task == "own":
        return f"# measured on {export.measured}\noverrides = dict(\n{fields})\n"
    auto_class = _AUTO_CLASS_OF_TASK[export.task]
    attention, dtype = export.model_arguments["attn_implementation"], export.model_arguments["dtype"]
    return (
        f"# measured on {export.measured}\n"
        f"import torch\nfrom transformers import {auto_class}, TrainingArguments\n\n"
        f"model = {auto_class}.from_pretrained(\n"
        f"    {export.model!r}, attn_implementation={attention!r}, dtype=torch.{dtype}\n)\n"
        f"arguments = TrainingArguments(\n{fields})\n"
    )
