"""Trials as values, and what a search concludes from them."""

from dataclasses import replace
from typing import Any

from recorded import measurement, out_of_memory
from searching import ceiling_of

from autotune.core.candidate import Arm, Candidate
from autotune.core.outcome import Completed, Outcome
from autotune.core.units import GIB
from autotune.estimate.history import History, Tried, ran_in_full

CAP_BYTES = 20 * GIB


def history_of(*trials: Tried) -> History:
    return History(ceiling_of(CAP_BYTES), list(trials))


def completed(
    arm: Arm, batch: int, accumulation: int = 1, *, speed: float = 100.0, peak_bytes: int = GIB, run: int | None = None
) -> Tried:
    """A completed trial with so many samples a second."""
    candidate = Candidate(arm, batch, accumulation)
    measured = measurement(candidate, candidate.samples_per_step / speed, peak_bytes, peak_bytes, run)
    return tried_with(candidate, Completed(measured))


def measured_at(candidate: Candidate, step_seconds: float, peak_bytes: int = GIB, **changes: Any) -> Tried:
    """A completed trial with steps of so many seconds, and other values of its measurement."""
    measured = replace(measurement(candidate, step_seconds, peak_bytes, peak_bytes), **changes)
    return tried_with(candidate, Completed(measured))


def tried_with(candidate: Candidate, outcome: Outcome) -> Tried:
    return Tried(f"{candidate.describe()} {outcome.state}", candidate, outcome, ran_in_full(candidate, outcome))


def ran_out(arm: Arm, batch: int, accumulation: int = 1) -> Tried:
    return tried_with(Candidate(arm, batch, accumulation), out_of_memory(CAP_BYTES))
