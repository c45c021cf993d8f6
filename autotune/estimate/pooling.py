"""Combine the measurements of a candidate: how fast it is, how certain that is, and what its next run will reach.

Two runs of one configuration differ by more than the steps within each: threads land on other cores, memory lies
elsewhere. So the speed of a candidate is estimated from the means of its processes, and the interval of the next run
contains the deviation between processes. While few processes were measured, what is usual for such a step stands in
for it: little where the GPU limits the step, much where the host does.

Step times are compared as logarithms, so that all deviations are relative.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from autotune.core.candidate import Candidate
from autotune.core.outcome import Completed, Measurement, Outcome, distinct_processes, process_of
from autotune.core.statistics import Estimate, Variance, difference, expected_excess, next_value, squares_about_mean
from autotune.core.step_time import mean_step
from autotune.estimate.bottleneck import HOST_BOUND, what_limits

# Relative deviation between the means of processes, with the degrees of freedom that it is worth. Measured on H200
# machines on 22 November 2026: 0.7 % with the GPU busy. Where it waits, the deviation over the share by which the GPU
# is idle was 0.09 to 0.25 in six cases of 4 or 5 processes (bert-base at 128 tokens, Qwen2.5-0.5B), root mean square
# 0.18, and with all threads on one core 0.05 to 0.39 in five, root mean square 0.28: most processes are then faster
# and alike, and one of four was as slow as without.
_GPU_BOUND = Variance(0.007, 5.0)
_HOST_DEVIATION_PER_IDLE_SHARE = 0.18
_PINNED_DEVIATION_PER_IDLE_SHARE = 0.28
_HOST_DEGREES = 3.0
# Where the share is not known (a CPU, code that cannot be profiled): between the two kinds, and soon outweighed.
_UNKNOWN = Variance(0.015, 4.0)
# Of a single measured step: between the 0.5 % of a step on a quiet GPU and the 5 % of one that waits for the host.
_ONE_STEP_ERROR = 0.02


@dataclass(frozen=True)
class Tried:
    """A candidate with what came of it."""

    trial_id: str
    candidate: Candidate
    outcome: Outcome
    in_full: bool = True
    """Whether every micro-step of a step was run rather than some added up."""

    @property
    def measurement(self) -> Measurement | None:
        """The measurement, where the trial completed."""
        return self.outcome.measurement if isinstance(self.outcome, Completed) else None


def usual_variance(busy_share: float | None, *, pinned: bool) -> Variance:
    """Return the relative variance between processes that is usual for a step of this kind.

    ``busy_share`` is the share of a step in which the GPU computes; ``None`` where that was not measured.
    """
    if busy_share is None:
        return _UNKNOWN
    idle = max(0.0, HOST_BOUND - busy_share)
    slope = _PINNED_DEVIATION_PER_IDLE_SHARE if pinned else _HOST_DEVIATION_PER_IDLE_SHARE
    degrees = _HOST_DEGREES if idle else _GPU_BOUND.degrees
    return Variance(math.hypot(_GPU_BOUND.deviation, slope * idle), degrees)


@dataclass(frozen=True)
class Speed:
    """How fast a candidate is, over all of its processes."""

    samples_per_second: float
    processes: int
    log_sample_seconds: Estimate
    """Logarithm of the seconds that a sample takes: the mean over processes."""
    next_run: Estimate
    """The same logarithm in one more process."""

    @property
    def relative_half_width(self) -> float:
        """Half the 95 % interval of the next run's speed, relative to the speed."""
        return self.next_run.half_width()

    def interval(self) -> tuple[float, float]:
        """Return the samples a second between which the next run lies in 95 of 100 cases."""
        width = self.relative_half_width
        return self.samples_per_second * math.exp(-width), self.samples_per_second * math.exp(width)


class Pool:
    """Completed trials by candidate, combined."""

    def __init__(self, trials: Iterable[Tried]) -> None:
        self._trials: dict[Candidate, list[Tried]] = {}
        for tried in trials:
            if tried.measurement is not None:
                self._trials.setdefault(tried.candidate, []).append(tried)
        self._speeds: dict[Candidate, Speed] = {}
        self._between: dict[tuple[bool, bool | None], tuple[float, float]] | None = None

    def processes(self, candidate: Candidate) -> int:
        """Return how many processes were measured; a trial that was reused twice counts once."""
        return distinct_processes((tried.trial_id, tried.outcome) for tried in self._trials.get(candidate, ()))

    def busy_share(self, candidate: Candidate) -> float | None:
        """Return the share of a step in which the GPU computes, as measured last; ``None`` where it never was."""
        return _busy_share(self._trials.get(candidate, ()))

    def is_host_bound(self, candidate: Candidate) -> bool:
        """Return whether the GPU was measured to wait for the host, and not for data."""
        measured = [t.measurement for t in self._trials.get(candidate, ()) if t.measurement]
        profiled = [measurement for measurement in measured if measurement.gpu_busy_share is not None]
        return bool(profiled) and what_limits(profiled[-1]).kind == "host"

    def speed(self, candidate: Candidate) -> Speed | None:
        """Return the candidate's speed; ``None`` where no trial of it completed."""
        if candidate not in self._trials:
            return None
        if candidate not in self._speeds:
            self._speeds[candidate] = self._combine(candidate)
        return self._speeds[candidate]

    def pooled(self, candidate: Candidate) -> Tried:
        """Return the candidate's last counting trial with the step time and speed of all of them together."""
        counting = _counting(self._trials[candidate])
        speed = self.speed(candidate)
        last = counting[-1]
        if speed is None or last.measurement is None or len(counting) == 1:
            return last
        measured = replace(
            last.measurement,
            samples_per_second=speed.samples_per_second,
            step_seconds=candidate.samples_per_step / speed.samples_per_second,
            peak_allocated_bytes=max(t.measurement.peak_allocated_bytes for t in counting if t.measurement),
            peak_reserved_bytes=max(t.measurement.peak_reserved_bytes for t in counting if t.measurement),
            gpu_busy_share=self.busy_share(candidate),
        )
        return replace(last, outcome=Completed(measured, source=getattr(last.outcome, "source", None)))

    def expected_gain(self, candidate: Candidate, over: Candidate) -> float:
        """Return by which share a candidate is faster than another on average, counting 0 where it is slower."""
        one, other = self.speed(candidate), self.speed(over)
        if one is None or other is None:
            return 0.0
        return expected_excess(difference(other.log_sample_seconds, one.log_sample_seconds))

    def _combine(self, candidate: Candidate) -> Speed:
        counting = _counting(self._trials[candidate])
        logs = [_log_sample_seconds(tried) for tried in counting]
        count = len(logs)
        variance = self._variance(candidate)
        own_error = math.sqrt(math.fsum(_within_error(tried) ** 2 for tried in counting)) / count
        following = next_value(logs, variance, own_error)
        error = math.hypot(variance.deviation / math.sqrt(count), own_error)
        mean = Estimate(following.mean, error, variance.degrees)
        return Speed(1 / math.exp(mean.mean), self.processes(candidate), mean, following)

    def _variance(self, candidate: Candidate) -> Variance:
        """What is usual for such a candidate, and what all repeated candidates of its kind showed."""
        usual = usual_variance(self.busy_share(candidate), pinned=candidate.arm.cpu_affinity)
        if self._between is None:
            self._between = self._sum_up()
        squares, degrees = self._between.get(self._kind(candidate), (0.0, 0.0))
        return usual.updated(squares, degrees)

    def _kind(self, candidate: Candidate) -> tuple[bool, bool | None]:
        share = self.busy_share(candidate)
        return candidate.arm.cpu_affinity, None if share is None else share < HOST_BOUND

    def _sum_up(self) -> dict[tuple[bool, bool | None], tuple[float, float]]:
        found: dict[tuple[bool, bool | None], tuple[float, float]] = {}
        for candidate, trials in self._trials.items():
            logs = list({process_of(t.trial_id, t.outcome): _log_sample_seconds(t) for t in trials}.values())
            if len(logs) > 1:
                squares, degrees = found.get(self._kind(candidate), (0.0, 0.0))
                found[self._kind(candidate)] = squares + squares_about_mean(logs)[1], degrees + len(logs) - 1
        return found


def _counting(trials: Sequence[Tried]) -> list[Tried]:
    """Those that speak for a candidate: run in full where there are such, each process once."""
    whole = [tried for tried in trials if tried.in_full] or list(trials)
    return list({process_of(tried.trial_id, tried.outcome): tried for tried in whole}.values())


def _busy_share(trials: Iterable[Tried]) -> float | None:
    shares = [t.measurement.gpu_busy_share for t in trials if t.measurement and t.measurement.gpu_busy_share]
    return shares[-1] if shares else None


def _log_sample_seconds(tried: Tried) -> float:
    assert tried.measurement is not None
    return math.log(tried.measurement.step_seconds / tried.candidate.samples_per_step)


def _within_error(tried: Tried) -> float:
    """Return the standard error of a process's own mean, relative to it."""
    measured = tried.measurement
    assert measured is not None
    if len(measured.step_seconds_each) < 2:
        # A single step has no spread of its own: what is usual for steps stands in for it.
        return _ONE_STEP_ERROR
    if measured.epoch_lengths is not None:
        # Steps whose batches differ: the trial worked out what is left of that. Two errors are half its interval.
        return measured.relative_spread / 2
    own = mean_step(measured.step_seconds_each)
    return own.error / own.mean
