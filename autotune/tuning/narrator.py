"""Write the progress of a search as text: a line for each trial, and a status. For a terminal or a service."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from autotune.core.candidate import Candidate, Document
from autotune.core.messages import Progress
from autotune.core.outcome import Completed, Failed, OutOfMemory
from autotune.core.units import format_bytes, format_count, format_groups, format_rate, format_seconds
from autotune.results.cells import batch_cell, peak_cell, speed_cell, took_cell, verdict_cell

if TYPE_CHECKING:
    from autotune.estimate.history import History, Tried
    from autotune.store.records import Stage, StudyRecord, TrialRecord
    from autotune.tuning.prepare import Prepared

_PREPARING = "preparing the search"
# Eighty columns hold a line of the widest default arm.
_ROW = "{number:>2} {batch:>9}  {arm:<{arm_width}}  {speed:>13} {peak:>10}  {took:>6}  {verdict}"


class Narrator:
    """An observer that writes a search as lines of text in a style (``bold``, ``dim`` or none), and as a status."""

    def __init__(self, say: Callable[[str, str | None], None]) -> None:
        """``say`` prints a line with its style."""
        self._say = say
        self._prepared: Prepared | None = None
        self._is_table_begun = False
        self._idle = _PREPARING
        """What the search does while no trial runs, in words."""
        self._waits_for: str | None = None
        # Of the running trials, by number: the candidate in words, the last report, and when it came.
        self._running: dict[int, tuple[str, Progress, float]] = {}
        self._best = ""

    def note(self, text: str) -> None:
        """Print a note between the lines."""
        if self._prepared is None:
            self._idle = text
        self._say(text, "dim")

    def waits(self, text: str | None) -> None:
        """Print and show the reason for a wait before the search; ``None`` ends the wait."""
        if text is not None:
            self.note(text)
        self._waits_for, self._idle = text, text or _PREPARING

    def begins(self, prepared: Prepared, study: StudyRecord) -> None:
        """Print model, data, device and search space."""
        self._prepared = prepared
        for line in _head_lines(prepared, study):
            self._say(line, None)

    def trial_begins(self, number: int, candidate: Candidate, stage: Stage) -> None:
        """Show the running trial; before the first trial, print the table's header."""
        self._begin_table()
        self._running[number] = candidate.describe(), Progress("start"), time.monotonic()

    def progress(self, number: int, progress: Progress) -> None:
        """Show the phase or the step of a running trial."""
        description, *_ = self._running.get(number, ("",))
        self._running[number] = description, progress, time.monotonic()

    def trial_ends(self, trial: TrialRecord, history: History) -> None:
        """Print the ended trial's line, and show the best trial so far."""
        assert self._prepared is not None, "begins comes first"
        # For a reused trial, ``trial_begins`` was not called.
        self._begin_table()
        # As the search would recommend now: only candidates of the space count.
        in_space = {tried.candidate for tried in history.tried if self._prepared.space.contains(tried.candidate)}
        best = history.answer(self._prepared.request.objective, in_space)
        self._say(self._row(trial, history, self._prepared, best), None)
        self._running.pop(trial.number, None)
        self._idle = "choosing the next trial"
        if best is not None and (speed := history.speed(best.candidate)) is not None:
            rate = format_rate(speed.samples_per_second)
            self._best = f"best so far {rate} {_rate_unit(self._prepared)} ({best.candidate.describe()})"

    def _row(self, trial: TrialRecord, history: History, prepared: Prepared, best: Tried | None) -> str:
        """Format a trial's line: candidate, speed ± spread, peak memory, verdict."""
        return _ROW.format(
            number=trial.number,
            batch=batch_cell(trial.candidate),
            arm=trial.candidate.arm.describe(),
            arm_width=self._arm_width(prepared),
            speed=speed_cell(trial.outcome),
            peak=peak_cell(trial.outcome),
            took=took_cell(trial),
            verdict=_verdict(trial, history, prepared, best),
        ).rstrip()

    def status(self) -> Document:
        """Return the running trials, or the reason for a wait, and the best trial so far, in words."""
        now = time.monotonic()
        trials = [
            f"trial {number}: {description} ({progress.describe(now - reported_at)})"
            for number, (description, progress, reported_at) in self._running.copy().items()
        ]
        words = {"running": ", ".join(trials) or self._idle, "best": self._best}
        return words if self._waits_for is None else {**words, "waits_for": self._waits_for}

    def _begin_table(self) -> None:
        """Print the table's header once."""
        if self._prepared is None or self._is_table_begun:
            return
        self._is_table_begun = True
        head = _ROW.format(
            number="#", batch="batch×acc", arm="configuration", arm_width=self._arm_width(self._prepared),
            speed=_rate_unit(self._prepared), peak="peak", took="took",
            verdict="× baseline" if self._prepared.request.wants_baseline else "",
        )  # fmt: skip
        self._say(head.rstrip(), "bold")

    @staticmethod
    def _arm_width(prepared: Prepared) -> int:
        return max(len(arm.describe()) for arm in (*prepared.space.arms, prepared.baseline.arm))


def status_line(status: Document, seconds: float, columns: int | None = None) -> str:
    """Return ``12 s; trial 3: 32 × 2 bf16 (step 4); best so far …``; a narrow terminal leaves out the best."""
    now = f"{format_seconds(seconds)}; {status['running']}"
    whole = "; ".join(filter(None, (now, str(status.get("best") or ""))))
    return now if columns is not None and len(whole) > columns else whole


def _rate_unit(prepared: Prepared) -> str:
    from autotune.results.wording import rate_unit

    return rate_unit(prepared.request.workload.document())


def _head_lines(prepared: Prepared, study: StudyRecord) -> list[str]:
    """Return the lines printed before the first trial."""
    from autotune.results.prediction_text import experts_line
    from autotune.results.wording import describe_data

    request, ceiling, model = prepared.request, prepared.ceiling, prepared.model
    workload, trained = request.workload, model.trainable_parameters
    data = describe_data(workload.document(), padding_free=request.padding_free == "on")
    batch = f"effective batch {request.effective_batch}" if request.effective_batch else "any batch"
    if request.world_size > 1:
        batch += f" on {format_groups(request.world_size, request.context_parallel)}"
        batch += ", one of them measured" if request.ranks == 1 else ""
    together = ", a trial on each at the same time" if request.beside else ""
    lines = [
        f"model   {workload.model} ({model.class_name}), {format_count(model.parameters)} parameters"
        + (f", {format_count(trained)} of them trained" if 0 < trained < model.parameters else ""),
        f"data    {data}; {batch}; {workload.describe_numerics()}",
        f"device  {', '.join(slot.label for slot in request.slots)}, {request.device.name}{together}",
        f"memory  a trial may reserve {format_bytes(ceiling.cap_bytes)}; "
        f"{format_bytes(ceiling.headroom_bytes)} of it should stay free",
        f"study   {study.name}",
    ]
    if prepared.unquantized_bytes:
        lines.append(f"note    {experts_line(prepared.unquantized_bytes, workload.dtype)}")
    neighbours = request.device.neighbours
    if neighbours and request.device.memory_used_bytes:
        who = ", ".join(f"{neighbour.name or 'a process'} ({neighbour.pid})" for neighbour in neighbours[:3])
        lines.append(
            f"note    {format_bytes(request.device.memory_used_bytes)} of {request.device.label} are held by "
            f"{who}{' and others' if len(neighbours) > 3 else ''}; trials have what is left"
        )
    if ceiling.limit_bytes is not None and ceiling.limit_bytes > ceiling.free_bytes:
        lines.append(
            f"note    --memory-limit is {format_bytes(ceiling.limit_bytes)}, but only "
            f"{format_bytes(ceiling.free_bytes)} are free"
        )
    return lines


def _verdict(trial: TrialRecord, history: History, prepared: Prepared, best: Tried | None) -> str:
    """Return the last cell of a trial's line: its speed relative to the baseline, or why it does not count."""
    from autotune.results.wording import times, why_not_feasible

    outcome = trial.outcome
    if isinstance(outcome, Failed):
        return " ".join(outcome.message.split())[:80]
    if isinstance(outcome, Completed | OutOfMemory) and outcome.disturbed:
        return f"disturbed: {'; '.join(outcome.disturbed)}"[:80]
    if not isinstance(outcome, Completed):
        return ""
    if not outcome.measurement.fits(trial.candidate.arm, history.ceiling):
        return why_not_feasible(outcome.measurement, trial.candidate.arm, history.ceiling)
    is_derived = outcome.source is not None and outcome.source.derived
    if trial.stage == "baseline" or (outcome.source is not None and trial.candidate == prepared.baseline):
        return "baseline, derived" if is_derived else "baseline"
    words = ["derived"] if is_derived else []
    baseline, speed = history.speed(prepared.baseline), history.speed(trial.candidate)
    if baseline is not None and speed is not None:
        words.append(times(speed.samples_per_second / baseline.samples_per_second))
    if best is not None and best.candidate == trial.candidate:
        words.append("best")
    return verdict_cell(" ".join(words), outcome, speed)
