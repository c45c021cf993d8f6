"""Format what a table of trials shows of each: batch, speed, peak memory, time taken."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune.core.candidate import Candidate
from autotune.core.outcome import Completed, Failed, Outcome, OutOfMemory
from autotune.core.units import format_bytes, format_rate, format_seconds, format_spread

if TYPE_CHECKING:
    from autotune.store import TrialRecord


def batch_cell(candidate: Candidate) -> str:
    """``32 × 2``."""
    return f"{candidate.per_device_train_batch_size} × {candidate.gradient_accumulation_steps}"


def speed_cell(outcome: Outcome | None) -> str:
    """Samples a second with their spread, or why there are none."""
    match outcome:
        case Completed(measurement=measured):
            return f"{format_rate(measured.samples_per_second)}{format_spread(measured.known_spread)}"
        case OutOfMemory(where=where):
            return "out of memory" if where == "device" else "out of host memory"
        case Failed(reason=reason):
            return "failed" if reason == "error" else reason
    return "running"


def peak_cell(outcome: Outcome | None) -> str:
    """Peak reserved memory; a lower bound where the trial wanted more."""
    match outcome:
        case Completed(measurement=measured):
            return format_bytes(measured.peak_reserved_bytes)
        case OutOfMemory(peak_reserved_bytes=int(reserved)):
            return f"> {format_bytes(reserved)}"
    return ""


def took_cell(trial: TrialRecord) -> str:
    """How long the trial took; that it was not run, where an earlier one told."""
    if trial.stage == "reused":
        return "reused"
    return format_seconds(trial.seconds) if trial.seconds is not None else ""
