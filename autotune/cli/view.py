"""What a person sees while a search runs, on stderr: a line a trial, and on a terminal what is happening now."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from autotune.history import History
from autotune.preparation import Prepared
from autotune.report import describe_data
from autotune.store import Stage, StudyRecord, TrialRecord
from autotune.trial import Candidate, Completed, Document, Failed, OutOfMemory
from autotune.units import GIB, format_bytes, format_count, format_seconds

_ROW = "{number:>3}  {batch:>11}  {arm:<26}  {speed:>21}  {memory:>13}  {seconds:>7}  {verdict}"


class View:
    """An observer that prints. Without a terminal it prints the lines alone."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = None
        self._ceiling_bytes = 0
        self._started = time.monotonic()
        self._best = ""
        self._running = ""

    def note(self, text: str) -> None:
        """A sentence between the lines."""
        self._print(text, style="dim")

    def begins(self, prepared: Prepared, study: StudyRecord) -> None:
        """What is searched, on what, and the head of the table."""
        workload, ceiling, request = prepared.request.workload, prepared.ceiling, prepared.request
        self._ceiling_bytes = ceiling.cap_bytes
        batch = f"effective batch {request.effective_batch}" if request.effective_batch else "any batch"
        self._print(
            f"{workload.model} ({prepared.model['class']}, {format_count(prepared.model['parameters'])} parameters, "
            f"{workload.dtype}), {describe_data(workload.document())}, {batch}"
        )
        device = prepared.request.device
        self._print(
            f"{device.label} ({device.name}): trials may reserve {format_bytes(ceiling.cap_bytes)}, "
            f"of which {format_bytes(ceiling.headroom_bytes)} is kept as headroom; study {study.name}"
        )
        head = _ROW.format(
            number="", batch="batch × acc", arm="configuration", speed="samples/s", memory="GiB of "
            + f"{ceiling.cap_bytes / GIB:.1f}", seconds="took", verdict="",
        )  # fmt: skip
        self._print(head, style="bold")

    def trial_begins(self, number: int, candidate: Candidate, stage: Stage) -> None:
        """Show what runs."""
        self._running = f"trial {number}: {candidate.describe()}"
        self._show("starting")

    def progress(self, record: Document) -> None:
        """Show the phase or the step."""
        self._show(record.get("phase") or f"step {record.get('step', '?')}")

    def trial_ends(self, trial: TrialRecord, history: History) -> None:
        """One line, for good."""
        self._running = ""
        self._print(self.row(trial, history))
        fastest = history.fastest()
        if fastest is not None and fastest.measurement is not None:
            self._best = (
                f"best so far {fastest.measurement.samples_per_second:.1f} samples/s ({fastest.candidate.describe()})"
            )
        self._show("next")

    def row(self, trial: TrialRecord, history: History) -> str:
        """A trial's line: what was tried, speed ± spread, peak memory, what to make of it."""
        candidate, outcome = trial.candidate, trial.outcome
        speed = memory = ""
        if isinstance(outcome, Completed):
            measured = outcome.measurement
            speed = f"{measured.samples_per_second:.1f} ± {measured.relative_spread:.1%}"
            memory = f"{measured.peak_reserved_bytes / GIB:.2f}"
        elif isinstance(outcome, OutOfMemory) and outcome.peak_reserved_bytes:
            memory = f"> {outcome.peak_reserved_bytes / GIB:.2f}"
        return _ROW.format(
            number=trial.number,
            batch=f"{candidate.per_device_train_batch_size} × {candidate.gradient_accumulation_steps}",
            arm=candidate.arm.describe(),
            speed=speed,
            memory=memory,
            seconds=format_seconds(trial.seconds or 0.0),
            verdict=_verdict(trial, history),
        ).rstrip()

    def _show(self, doing: str) -> None:
        if self._status is not None:
            parts = [self._running and f"{self._running} ({doing})", self._best]
            elapsed = format_seconds(time.monotonic() - self._started)
            self._status.update(escape("; ".join([elapsed, *filter(None, parts)])))

    def _print(self, text: str, style: str | None = None) -> None:
        self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def live(self) -> Iterator[None]:
        """A status line below the others, where there is a terminal to move the cursor on."""
        if not self._console.is_terminal:
            yield
            return
        with self._console.status("starting") as status:
            self._status = status
            try:
                yield
            finally:
                self._status = None


def _verdict(trial: TrialRecord, history: History) -> str:
    outcome = trial.outcome
    if isinstance(outcome, OutOfMemory):
        return "out of memory" if outcome.where == "device" else "out of host memory"
    if isinstance(outcome, Failed):
        return f"failed ({outcome.reason}): {outcome.message[:80]}"
    if isinstance(outcome, Completed) and not history.ceiling.fits(outcome.measurement.peak_reserved_bytes):
        return "over the line"
    fastest = history.fastest()
    words = {"baseline": "baseline", "final": "measured in full"}.get(trial.stage, "")
    if fastest is not None and fastest.trial_id == trial.id and words != "baseline":
        return "fastest so far"
    return words


@contextmanager
def open_view() -> Iterator[View]:
    """The view of this process's stderr."""
    view = View(Console(stderr=True))
    with view.live():
        yield view
