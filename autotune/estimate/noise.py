"""Judge whether measurements are too noisy to tell which candidate is the fastest.

Only noise that was seen counts: steps of a process that differ, processes of a candidate that differ, and other
processes that had the CPU or the GPU. What is usual for a kind of step (the prior of ``pooling``) is no noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from autotune.core.candidate import Candidate
from autotune.core.outcome import Completed
from autotune.estimate.history import MATERIAL, History
from autotune.estimate.pooling import Tried, within_error

# A normal value is above its mean by more standard errors than this with a probability of 5 %.
_ERRORS = 1.645
# A trial of threads that wait for one another loses more than the time for which one of them waits. A choice.
_THREADS_WAIT_TIMES = 2.0
# Share of the machine that other processes are taken to use during a disturbed trial, where it is not known. A choice.
_UNKNOWN_SHARE = 0.3
_MOST_SHARE = 0.95
# The only candidate that was measured is told with an interval of up to this half-width, as a logarithm. A choice.
_WIDEST = 0.25


@dataclass(frozen=True)
class _Seen:
    """The noise that was seen in the trials of one candidate."""

    candidate: Candidate
    log_sample_seconds: float
    error: float
    """Standard error of that logarithm."""
    lost: float
    """By how much that logarithm may be too large because of other processes."""
    others_share: float
    """The largest share of the time of a trial for which other processes had the device."""
    step_error: float
    """The part of ``error`` that follows from how steps of a process differ."""
    process_deviation: float
    """Deviation between processes of candidates of this kind; 0 where none was repeated."""


def too_noisy(history: History, answer: Candidate, among: Iterable[Candidate]) -> str | None:
    """Return why noise hides whether the answer is the fastest candidate; ``None`` where it does not.

    Noise hides it where another candidate may be faster by more than 10 %, at a probability of 5 %. Where only the
    answer was measured, its interval must not be wider than a fixed limit.
    """
    rivals = {each: seen for each in {answer, *among} if (seen := _noise_of(history, each)) is not None}
    chosen = rivals.pop(answer, None)
    if chosen is None:
        return None
    if not rivals:
        is_wide = _ERRORS * chosen.error + chosen.lost > _WIDEST
        return f"only {answer.describe()} was measured, and {_largest_noise(chosen)}" if is_wide else None
    # By how much each rival is faster at most, as a logarithm.
    most_gains = {
        rival: chosen.log_sample_seconds
        - seen.log_sample_seconds
        + _ERRORS * math.hypot(chosen.error, seen.error)
        + seen.lost
        for rival, seen in rivals.items()
    }
    nearest = max(most_gains, key=lambda rival: most_gains[rival])
    if most_gains[nearest] <= math.log1p(MATERIAL):
        return None
    noise = _largest_noise(rivals[nearest], chosen)
    return f"{nearest.describe()} may be faster than {answer.describe()}, since {noise}"


def _noise_of(history: History, candidate: Candidate) -> _Seen | None:
    """Return speed and noise of a candidate's trials; ``None`` where no trial completed."""
    speed, trials = history.speed(candidate), history.pool.counting(candidate)
    if speed is None or not trials:
        return None
    step_error = math.sqrt(math.fsum(_step_error(tried) ** 2 for tried in trials)) / len(trials)
    process_deviation = history.pool.deviation_seen(candidate)
    shares = [_others_share(tried) for tried in trials]
    return _Seen(
        candidate,
        speed.log_sample_seconds.mean,
        math.hypot(step_error, process_deviation / math.sqrt(len(trials))),
        math.fsum(-_THREADS_WAIT_TIMES * math.log1p(-share) for share in shares) / len(trials),
        max(shares),
        step_error,
        process_deviation,
    )


def _step_error(tried: Tried) -> float:
    """Return the relative standard error of a trial's mean step, as far as it is noise; 0 for a single step.

    Steps that differ because batches have other lengths, or shapes that are new to the process, are no noise.
    """
    measured = tried.measurement
    if measured is None or len(measured.step_seconds_each) < 2:
        return 0.0
    return (measured.steady_error or 0.0) if measured.batches_vary else within_error(tried)


def _others_share(tried: Tried) -> float:
    """Return the share of a trial's time for which other processes had the device; 0 for an undisturbed trial."""
    if not isinstance(tried.outcome, Completed) or not tried.outcome.disturbed:
        return 0.0
    return min(_MOST_SHARE, tried.outcome.others_share or _UNKNOWN_SHARE)


def _largest_noise(*seen: _Seen) -> str:
    """Return the largest source of noise of some candidates in words, which end the sentence of ``too_noisy``."""
    busiest = max(seen, key=lambda each: each.lost)
    unsteady = max(seen, key=lambda each: each.step_error)
    between = max(each.process_deviation for each in seen)
    size = max(busiest.lost, unsteady.step_error, between)
    if busiest.lost == size:
        share = f"{busiest.others_share:.0%} of the time of {busiest.candidate.describe()}"
        return f"other processes used the device for {share}"
    if between == size:
        return f"processes of one candidate differ by {between:.0%}"
    return f"steps of {unsteady.candidate.describe()} differ, and their mean is known to {unsteady.step_error:.0%} only"
