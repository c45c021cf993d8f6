"""Search from Python, in notebooks and scripts: ``import autotune; autotune.search(model=…)``.

The same engine as the command, the same options under the same names. Importing this imports neither torch nor
transformers, and neither does a search: what trains is a process of its own, so no ``__main__`` guard is needed.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Unpack

from autotune.core.arguments import check_arguments
from autotune.core.candidate import Candidate, Document
from autotune.core.errors import InvalidRequestError, NoResultError, PromiseMissedError
from autotune.core.option_kinds import refuse
from autotune.core.options import BY_NAME, SearchOptions
from autotune.core.outcome import Measurement
from autotune.core.training_source import WITHIN_VARIABLE
from autotune.core.units import format_bytes, format_rate
from autotune.results.chart_data import plot_trials
from autotune.results.export import make_export
from autotune.results.json_document import report_document, trial_document
from autotune.results.report import Report, load_report
from autotune.results.study_view import trial_view
from autotune.results.text import summary_lines
from autotune.store.location import resolve_location, shown_location
from autotune.store.opening import open_store
from autotune.store.records import TrialRecord
from autotune.tuning.exclusive import waits_with
from autotune.tuning.loop import Observer
from autotune.tuning.narrator import Narrator
from autotune.tuning.options import open_search
from autotune.tuning.run import log_folder, run_search
from autotune.verify.target import check_can_be_verified, placement_of, target_of
from autotune.verify.throughput import Verification, verify

if TYPE_CHECKING:
    from autotune.engine.work import Message

DEFAULT_STORAGE = "studies/autotune.db"


@dataclass(frozen=True, repr=False)
class Trial:
    """One trial of a result."""

    number: int
    candidate: Candidate
    measurement: Measurement | None
    """The measurement; ``None`` where the trial did not complete."""
    feasible: bool
    verdict: str
    """The trial's speed relative to the baseline, in words, or why it has no measurement."""

    def __repr__(self) -> str:
        """Return the trial in one line, for notebooks."""
        words = self.candidate.describe()
        if (measured := self.measurement) is not None:
            words += f", {format_rate(measured.samples_per_second)} samples/s"
            words += f", peak {format_bytes(measured.peak_reserved_bytes)}"
        return f"trial {self.number}: {words}; {self.verdict}"


@dataclass(frozen=True, repr=False)
class Result:
    """A study, from ``search`` or from ``load``."""

    report: Report
    storage: str
    """The database's URL or absolute path, so that the working folder may change."""

    @property
    def study(self) -> str:
        """The study's name, for ``autotune show`` and the other commands."""
        return self.report.study.name

    @property
    def best(self) -> Trial:
        """The winner; raises ``NoResultError`` where there is none."""
        if self.report.best is None:
            raise NoResultError(f"the study {self.study!r} has no feasible trial", "continue it, or search with more")
        return self._trial(self.report.best)

    @property
    def baseline(self) -> Trial | None:
        """The trial of the ``TrainingArguments`` defaults; ``None`` where it was not run or did not complete."""
        return self._trial(self.report.baseline) if self.report.baseline else None

    @property
    def too_noisy(self) -> str | None:
        """Why measurements are too noisy to tell whether the winner is the fastest; ``None`` where they are not."""
        return self.report.too_noisy

    @property
    def speedup(self) -> float | None:
        """The winner's samples a second over the baseline's."""
        return self.report.speedup

    def _trial(self, record: TrialRecord) -> Trial:
        """Return a recorded trial as users of Python see it."""
        shown = trial_view(self.report, record)
        return Trial(record.number, record.candidate, shown.measured, shown.is_feasible, shown.verdict)

    @property
    def arguments(self) -> dict[str, Any]:
        """The winner's ``TrainingArguments`` fields, as ``autotune export`` writes them.

        Raises ``TooNoisyError`` where measurements are too noisy to tell the fastest.
        """
        self.report.check_is_told()
        return dict(make_export(self.report).arguments)

    @property
    def model_arguments(self) -> dict[str, str]:
        """The winner's arguments for ``from_pretrained``: attention implementation and weight dtype."""
        return dict(make_export(self.report).model_arguments)

    def training_arguments(self, **extra: Any) -> Any:
        """Return ``transformers.TrainingArguments`` of the winner, with ``extra`` fields added or replaced.

        Only this imports transformers, and with it torch, into the calling process.
        """
        return importlib.import_module("transformers").TrainingArguments(**{**self.arguments, **extra})

    @property
    def records(self) -> list[Document]:
        """Every trial in order, with the field names of ``--json``."""
        return [trial_document(trial_view(self.report, trial)) for trial in self.report.trials]

    @property
    def trials(self) -> Any:
        """Every trial as a row of a ``pandas.DataFrame`` where pandas is installed, else ``records``."""
        if importlib.util.find_spec("pandas") is None:
            return self.records
        return importlib.import_module("pandas").DataFrame(self.records)

    def plot(self) -> Any:
        """Draw samples a second against peak memory, with the ceiling, and return matplotlib ``Axes``.

        Raises ``InvalidRequestError`` where matplotlib is not installed.
        """
        return plot_trials(self.report)

    def verify(self, steps: int | None = None) -> Verification:
        """Train as the result says with a stock ``Trainer`` in a fresh process, and compare speed and memory.

        ``misses()`` of the returned value names the promises that were not kept. The run has ``steps`` optimizer steps,
        by default 100; fewer where these take more than two minutes, and 10 at least.
        """
        given = check_arguments({"steps": steps})
        target = target_of(self.report, placement_of(self.report))
        log_path = log_folder(self.storage, self.study) / "verify.log"
        return verify(target, given["steps"], log_path)

    def document(self) -> Document:
        """Return the whole study as ``autotune show --json`` prints it."""
        return report_document(self.report)

    def __str__(self) -> str:
        return "\n".join(summary_lines(self.report))

    # A notebook shows this for the last line of a cell.
    __repr__ = __str__


def search(
    model: str | os.PathLike[str] | None = None,
    effective_batch: int | None = None,
    *,
    progress: bool | Observer = True,
    **options: Unpack[SearchOptions],
) -> Result:
    """Search for the fastest configuration by running real training steps, as the command ``autotune search`` does.

    Options have the names and meanings of the command's. Sizes are bytes or text (``"24GiB"``), durations seconds or
    text (``"5m"``), lists are sequences or text with commas, paths text or ``os.PathLike``; ``baseline=False`` is
    ``--no-baseline``. ``levers={"torch_compile": "layers"}`` is ``--lever`` for each. ``trainer`` and ``loop`` may be
    functions that are defined in a file, which trials import: if the same file calls ``search``, put the call under
    ``if __name__ == "__main__":``. ``script`` is a list of words, not one text. ``verify=True`` runs a stock
    ``Trainer`` at the end, and raises ``PromiseMissedError`` if it is not as fast as promised; the study stays.
    ``progress`` is whether to print a line for each trial on stderr, or an observer of your own. In the main thread
    Ctrl-C ends the search after the running trial, a second one at once. Raises the errors of ``autotune.errors``.
    """
    if unknown := options.keys() - SearchOptions.__annotations__.keys():
        raise TypeError(f"search() got an unexpected keyword argument {min(unknown)!r}")
    observer = _as_observer(progress)
    given = _given({"model": model, "effective_batch": effective_batch, **options})
    if (source := os.environ.get(WITHIN_VARIABLE)) is not None:
        raise InvalidRequestError(
            f"a search began while trials ran {source}",
            'move the call of search to another file or, beside a trainer function, under if __name__ == "__main__":',
        )
    storage, address = given.pop("storage", DEFAULT_STORAGE), given.pop("executor", None)
    waits, verifies = given.pop("wait", False), given.pop("verify", False)
    # Now, since code of the user may change the working folder later.
    absolute_storage = _absolute(storage)
    if address is not None:
        from autotune.engine.elsewhere import Asked, search_elsewhere

        if verifies:
            raise InvalidRequestError("verify=True trains on this machine, and executor searches on another",
                                      "leave verify out")  # fmt: skip

        def show(message: Message) -> None:
            if message.kind == "line":
                observer.note(str(message.document["text"]))

        record, report = search_elsewhere(address, Asked(given, given.get("study")), storage, show, wait=waits)
    else:
        request = open_search(given)
        if verifies:
            check_can_be_verified(request.workload.document(), any_order=request.any_order)
        record, report = run_search(request, storage, observer, wait=waits_with(observer.note) if waits else None)
    result = Result(report, absolute_storage)
    if verifies and record.state != "interrupted":
        _verify(result, observer)
    return result


def _signature() -> inspect.Signature:
    """Return the signature of ``search`` with its options and their defaults, for ``help``; levers are left out."""
    written = inspect.signature(search)
    model, effective_batch, progress, _ = written.parameters.values()
    named = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=BY_NAME[name].default,
            # Text of this form: ``Annotated[int | None, Option(…)]``.
            annotation=annotated.__forward_arg__.removeprefix("Annotated[").partition(", Option(")[0],
        )
        for name, annotated in SearchOptions.__annotations__.items()
        if not BY_NAME[name].is_lever
    ]
    return written.replace(parameters=[model, effective_batch, *named, progress])


search.__signature__ = _signature()  # type: ignore[attr-defined]


def _given(named: Mapping[str, Any]) -> dict[str, Any]:
    """Check the options of ``search``, and return those that are not ``None`` or another default."""
    values = check_arguments(named)
    return {
        name: value
        for name, value in values.items()
        if value not in (None, ()) and not (isinstance(value, bool) and value == BY_NAME[name].default)
    }


def _absolute(storage: str) -> str:
    """Return where the database is, whatever the working folder: its URL unchanged, or its file's absolute path."""
    path = resolve_location(storage).path
    return storage if path is None else str(path)


def _as_observer(progress: Any) -> Observer:
    """Return the observer for ``search``'s argument ``progress``; raises ``InvalidRequestError`` for a wrong value."""
    if isinstance(progress, bool):
        return Narrator(lambda text, style: print(text, file=sys.stderr) if progress else None)
    if not isinstance(progress, Observer):
        raise refuse("progress", progress, "True, False or an observer", "give True or False")
    return progress


def _verify(result: Result, observer: Observer) -> None:
    """Verify a result with a stock ``Trainer`` and report it. Raises ``PromiseMissedError`` for a missed promise."""
    observer.note("training with a stock Trainer …")
    verification = result.verify()
    observer.note(str(verification))
    try:
        verification.check()
    except PromiseMissedError as error:
        error.hint += f"; the result is autotune.load({result.study!r}, storage={shown_location(result.storage)!r})"
        raise


def load(study: str, *, storage: str | os.PathLike[str] = DEFAULT_STORAGE) -> Result:
    """Load a recorded study; raises ``UnknownStudyError`` where there is none with this name."""
    named = check_arguments({"study": study, "storage": storage}, "study")
    with open_store(named["storage"], create=False) as store:
        return Result(load_report(store, named["study"]), _absolute(named["storage"]))
