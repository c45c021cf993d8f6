"""The search as a function, for notebooks and scripts: ``import autotune; autotune.search(model=…)``.

The same engine as the command, the same options under the same names. Importing this imports neither torch nor
transformers, and neither does a search: what trains is a process of its own, so no ``__main__`` guard is needed.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from autotune.device import Headroom, parse_headroom
from autotune.errors import InvalidRequestError, NoResultError
from autotune.export import make_export
from autotune.history import DEFAULT_TOLERANCE, History
from autotune.levers import LeverChoice
from autotune.loop import Observer
from autotune.options import build_request
from autotune.plot import plot_trials
from autotune.policy import Objective
from autotune.preparation import Prepared
from autotune.report import Report, load_report, measurement, verdict
from autotune.request import DEFAULT_SEED, DEFAULT_TRIAL_TIMEOUT_SECONDS
from autotune.sampler import SamplerName
from autotune.session import log_folder, run_search
from autotune.space import CheckpointingChoice
from autotune.store import Stage, StudyRecord, TrialRecord, open_store
from autotune.subject import device_of, subject_of
from autotune.summary import report_document, summary_lines, trial_document
from autotune.trial import Candidate, Completed, Document, Measurement
from autotune.units import format_rate, parse_bytes, parse_seconds, parse_share
from autotune.verification import DEFAULT_STEPS, Verification, verify
from autotune.workload import DTypeName, PeftName, QuantizeName, Task

DEFAULT_STORAGE = "studies/autotune.db"


@dataclass(frozen=True)
class Trial:
    """One trial of a result."""

    number: int
    candidate: Candidate
    measurement: Measurement | None
    """What was measured; ``None`` where the trial did not complete."""
    feasible: bool
    verdict: str
    """How it compares with the baseline, or why it has no measurement."""


@dataclass(frozen=True)
class Result:
    """A study, as a search left it or as ``load`` found it."""

    report: Report
    storage: str

    @property
    def study(self) -> str:
        """The study's name, under which ``autotune show`` and the others know it."""
        return self.report.study.name

    @property
    def best(self) -> Trial:
        """The winner; ``NoResultError`` where there is none."""
        if self.report.best is None:
            raise NoResultError(f"the study {self.study!r} has no feasible trial", "continue it, or search with more")
        return self._trial(self.report.best)

    @property
    def baseline(self) -> Trial | None:
        """What the ``TrainingArguments`` defaults do, where they were measured and completed."""
        return self._trial(self.report.baseline) if self.report.baseline else None

    @property
    def speedup(self) -> float | None:
        """The winner's samples a second over the baseline's."""
        return self.report.speedup()

    def _trial(self, record: TrialRecord) -> Trial:
        report = self.report
        return Trial(
            record.number, record.candidate, measurement(record), report.feasible(record), verdict(report, record)
        )

    @property
    def arguments(self) -> dict[str, Any]:
        """The winner's ``TrainingArguments`` fields, as ``autotune export`` writes them."""
        return dict(make_export(self.report).arguments)

    @property
    def model_arguments(self) -> dict[str, str]:
        """What belongs into ``from_pretrained``: attention implementation and weight dtype."""
        return dict(make_export(self.report).model_arguments)

    def training_arguments(self, **extra: Any) -> Any:
        """``transformers.TrainingArguments`` of the winner with ``extra`` beside or over its fields.

        This alone imports transformers, and with it torch, into the calling process.
        """
        return importlib.import_module("transformers").TrainingArguments(**{**self.arguments, **extra})

    @property
    def records(self) -> list[Document]:
        """Every trial under the names of ``--json``, in order."""
        return [trial_document(self.report, trial) for trial in self.report.trials]

    @property
    def trials(self) -> Any:
        """Every trial, a row each: a ``pandas.DataFrame`` where pandas is installed, else ``records``."""
        if importlib.util.find_spec("pandas") is None:
            return self.records
        return importlib.import_module("pandas").DataFrame(self.records)

    def plot(self) -> Any:
        """Samples a second over the batch, a line an arm, as matplotlib ``Axes``.

        ``InvalidRequestError`` where matplotlib is not installed.
        """
        return plot_trials(self.report)

    def verify(self, steps: int = DEFAULT_STEPS) -> Verification:
        """Train with a stock ``Trainer`` in a process of its own; ``misses()`` tells what was not kept."""
        subject = subject_of(self.report, device_of(self.report))
        return verify(subject, steps, log_folder(self.storage, self.study) / "verify.log")

    def document(self) -> Document:
        """The whole study as ``autotune show --json`` prints it."""
        return report_document(self.report)

    def __str__(self) -> str:
        return "\n".join(summary_lines(self.report))


class _Lines:
    """Tells of each trial in a line on stderr; as plain as a notebook needs it."""

    def note(self, text: str) -> None:
        print(text, file=sys.stderr)

    def begins(self, prepared: Prepared, study: StudyRecord) -> None:
        print(f"study {study.name} on {prepared.request.device.label}", file=sys.stderr)

    def trial_begins(self, number: int, candidate: Candidate, stage: Stage) -> None:
        pass

    def progress(self, record: Document) -> None:
        pass

    def trial_ends(self, trial: TrialRecord, history: History) -> None:
        outcome = trial.outcome
        if isinstance(outcome, Completed):
            what = f"{format_rate(outcome.measurement.samples_per_second)} samples/s"
        else:
            what = getattr(outcome, "message", "")
        print(f"{trial.number:>2} {trial.candidate.describe()}: {' '.join(what.split())[:100]}", file=sys.stderr)


class _Silence(_Lines):
    """Tells nothing."""

    def note(self, text: str) -> None:
        pass

    def begins(self, prepared: Prepared, study: StudyRecord) -> None:
        pass

    def trial_ends(self, trial: TrialRecord, history: History) -> None:
        pass


def search(
    model: str | None = None,
    effective_batch: int | None = None,
    *,
    trainer: str | None = None,
    script: Sequence[str] = (),
    task: Task | None = None,
    seq_len: int | None = None,
    padding: float = 0.0,
    dtype: DTypeName = "float32",
    pretrained: bool = False,
    dataset: str | None = None,
    split: str | None = None,
    text_column: str | Sequence[str] | None = None,
    label_column: str | None = None,
    image_column: str | None = None,
    tokenizer: str | None = None,
    pad_to_max_length: bool = False,
    pad_to_multiple_of: int | None = None,
    group_by_length: bool = False,
    device: str | None = None,
    memory_limit: int | str | None = None,
    headroom: Headroom | str | None = None,
    world_size: int = 1,
    precision: str | Sequence[str] | None = None,
    gradient_checkpointing: CheckpointingChoice = "auto",
    attn: str | Sequence[str] | None = None,
    optim: str | Sequence[str] | None = None,
    expandable_segments: LeverChoice | None = None,
    torch_compile: LeverChoice = "off",
    liger: LeverChoice = "off",
    peft: PeftName | None = None,
    lora_rank: int | None = None,
    quantize: QuantizeName | None = None,
    batch_multiple: int | None = None,
    objective: Objective = "throughput",
    trials: int | None = None,
    time_budget: float | str | None = None,
    trial_timeout: float | str = DEFAULT_TRIAL_TIMEOUT_SECONDS,
    baseline: bool = True,
    fresh: bool = False,
    tolerance: float | str = DEFAULT_TOLERANCE,
    sampler: SamplerName = "autotune",
    seed: int = DEFAULT_SEED,
    study: str | None = None,
    storage: str = DEFAULT_STORAGE,
    wait: bool = False,
    progress: bool | Observer = True,
) -> Result:
    """Search for the fastest configuration by running real training steps; as the command ``autotune search``.

    Options bear the command's names and meanings; sizes are bytes or text (``"24GiB"``), durations seconds or text
    (``"5m"``), lists sequences or text with commas; ``baseline=False`` is ``--no-baseline``. ``progress`` is whether a
    line a trial goes to stderr, or an observer of one's own. In the main thread Ctrl-C ends the search after the
    running trial, a second one at once. Raises the errors of ``autotune.errors``.
    """
    named = {name: value for name, value in locals().items() if name not in ("storage", "wait", "progress")}
    options = _as_the_command_has_them(named)
    _check(options)
    request = build_request(options, _given(options))
    request.check()
    observer: Any = progress
    if isinstance(progress, bool):
        observer = _Lines() if progress else _Silence()
    _, report = run_search(request, storage, observer, wait=wait)
    return Result(report, storage)


_LISTS = ("text_column", "precision", "attn", "optim")
_PARSERS: dict[str, Callable[[str], Any]] = {
    "memory_limit": parse_bytes,
    "headroom": parse_headroom,
    "time_budget": parse_seconds,
    "trial_timeout": parse_seconds,
    "tolerance": parse_share,
}


def _as_the_command_has_them(named: dict[str, Any]) -> dict[str, Any]:
    """The arguments of ``search`` as the command line hands its options on."""
    options = {name: value for name, value in named.items() if name != "baseline"}
    for name in _LISTS:
        options[name] = _words(options[name])
    for name, parse in _PARSERS.items():
        options[name] = _parsed(options[name], parse, name)
    return {**options, "script": tuple(named["script"]), "no_baseline": not named["baseline"]}


def _given(options: dict[str, Any]) -> set[str]:
    """The names of those that are not at their defaults."""
    defaults = {name: parameter.default for name, parameter in inspect.signature(search).parameters.items()}
    return {name for name, value in options.items() if name in defaults and value != defaults[name]}


def load(study: str, *, storage: str = DEFAULT_STORAGE) -> Result:
    """A study that was searched before; ``UnknownStudyError`` where there is none of this name."""
    with open_store(storage, create=False) as store:
        return Result(load_report(store, study), storage)


_CHOICES: dict[str, tuple[Any, ...]] = {
    "task": (None, *get_args(Task)),
    "dtype": get_args(DTypeName),
    "gradient_checkpointing": get_args(CheckpointingChoice),
    "objective": get_args(Objective),
    "expandable_segments": (None, *get_args(LeverChoice)),
    "torch_compile": get_args(LeverChoice),
    "liger": get_args(LeverChoice),
    "peft": (None, *get_args(PeftName)),
    "quantize": (None, *get_args(QuantizeName)),
    "sampler": get_args(SamplerName),
}
_COUNTS = ("effective_batch", "seq_len", "world_size", "batch_multiple", "trials", "lora_rank", "pad_to_multiple_of")


def _check(options: dict[str, Any]) -> None:
    """Raise ``InvalidRequestError`` for values that the command line would not let through either."""
    for name, choices in _CHOICES.items():
        if options[name] not in choices:
            known = ", ".join(repr(choice) for choice in choices)
            raise InvalidRequestError(f"{name}={options[name]!r} is not one of {known}", "choose one of them")
    for name in _COUNTS:
        value = options[name]
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise InvalidRequestError(f"{name}={value!r} is not a whole number from 1", "give one")
    if not 0 <= options["padding"] < 1:
        raise InvalidRequestError(f"padding={options['padding']!r} is not a share", "use a number from 0 to below 1")


def _parsed(value: Any, parse: Any, name: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return parse(value)
    except ValueError as error:
        raise InvalidRequestError(f"{name}={value!r}: {error}", "see autotune search --help") from error


def _words(value: str | Sequence[str] | None) -> tuple[str, ...] | None:
    if value is None:
        return None
    words = value.split(",") if isinstance(value, str) else value
    return tuple(dict.fromkeys(word.strip() for word in words if word.strip()))
