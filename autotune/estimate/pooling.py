"""Pool the measurements of a candidate: its speed, the interval of that, and what its next run will reach.

Two runs of one configuration differ by more than the steps within each: threads run on other cores, memory lies at
other addresses. So a candidate's speed is estimated from the means of its processes, and the interval of the next run
includes the deviation between processes. That deviation is estimated from all candidates of the kind of which several
processes were measured on this machine, in this study and before it, together with a prior: it is small where the step
is GPU-bound and large where it is host-bound.

Step times are compared as logarithms, so that all deviations are relative.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from autotune.core.candidate import Arm, Candidate
from autotune.core.measured_steps import mean_step
from autotune.core.outcome import Completed, Measurement, Outcome, source_of
from autotune.core.statistics import Estimate, Variance, difference, expected_excess, next_value, squares_about_mean
from autotune.estimate.bottleneck import HOST_BOUND, what_limits

# Prior of the relative deviation between the mean step times of processes, with its degrees of freedom. Measured on
# H200 machines on 22 November 2026. GPU-bound steps: 0.7 % with five degrees. Half the degrees, at a deviation that
# gives the same interval where nothing else is known, let what a machine shows count sooner; after two deviations of
# the machine's own next to nothing is left of it (``_YIELDS``). Host-bound steps: the deviation over the share of the
# step in which the GPU is idle was 0.09 to 0.25 in six cases of 4 or 5 processes (bert-base at 128 tokens,
# Qwen2.5-0.5B), root mean square 0.18. With all threads pinned to one core it was 0.05 to 0.39 in five cases, root mean
# square 0.28: most processes are then faster and alike, and one of four was as slow as without pinning. Where CUDA
# graphs are replayed, the host launches few kernels: 3.4 % over all of four deviations of bert-base at 128 tokens
# (2,132, 2,225, 2,068 and 2,122 samples/s; 1,456 and 1,546), 2.9 % without what their steps explain, and the GPU was
# idle in 0.32 of a step beyond what counts as GPU-bound (23 November 2026).
_GPU_BOUND = Variance(0.005, 2.5)
_HOST_DEVIATION_PER_IDLE_SHARE = 0.18
_PINNED_DEVIATION_PER_IDLE_SHARE = 0.28
_GRAPHS_DEVIATION_PER_IDLE_SHARE = 0.09
_HOST_DEGREES = 3.0
_GRAPHS_DEGREES = 4.0
# Where the busy share is not known (a CPU, code that cannot be profiled): an assumption between the two, 1.5 % with
# four degrees, likewise.
_UNKNOWN = Variance(0.0117, 2.5)
# The prior's degrees are divided by this power of one more than the deviations that the machine has shown. Machines
# differ from each other by more than any prior with a fixed weight allows for: with it, promises hold in 93 to 98 % of
# simulated cases from the third process on, without it in 88 % where processes deviate by 5 %
# (``studies/promised_coverage.py``). Not for host-bound steps, whose prior is wide as it is.
_YIELDS = 3
# Deviation of the logarithm of a later run's speed, beyond what processes of one search differ: meanwhile the machine
# became faster or slower. Of 63 promises on H200s that were run minutes later (22 to 29 November 2026), 78 % held
# without it. With it 94 % hold: 95 % of 41 for GPU-bound steps, 91 % of 22 for host-bound ones. Speeds of one search
# are compared without it, since it is the same for all of them.
_LATER, _LATER_HOST_BOUND = 0.035, 0.05
# Relative standard error of a single measured step: between 0.5 % (GPU-bound) and 5 % (host-bound).
_ONE_STEP_ERROR = 0.02


@dataclass(frozen=True)
class Tried:
    """A candidate that was tried, with its outcome."""

    trial_id: str
    candidate: Candidate
    outcome: Outcome
    in_full: bool = True
    """Whether every micro-step of a step was run, rather than some of them being extrapolated."""

    @property
    def measurement(self) -> Measurement | None:
        """The measurement; ``None`` where the trial did not complete."""
        return self.outcome.measurement if isinstance(self.outcome, Completed) else None

    @property
    def process(self) -> str:
        """The id of the trial whose process measured it, however often that was reused; maybe of an earlier study."""
        source = source_of(self.outcome)
        return self.trial_id if source is None else source.trial_id


def usual_variance(arm: Arm, busy_share: float | None) -> Variance:
    """Return the prior of the relative variance between processes, for a step of this kind.

    ``busy_share`` is the share of a step in which the GPU computes; ``None`` where it was not measured.
    """
    if busy_share is None:
        return _UNKNOWN
    idle = max(0.0, HOST_BOUND - busy_share)
    if not idle:
        return _GPU_BOUND
    slope, degrees = _HOST_DEVIATION_PER_IDLE_SHARE, _HOST_DEGREES
    if replays_graphs(arm):
        slope, degrees = _GRAPHS_DEVIATION_PER_IDLE_SHARE, _GRAPHS_DEGREES
    elif arm.cpu_affinity:
        slope = _PINNED_DEVIATION_PER_IDLE_SHARE
    return Variance(math.hypot(_GPU_BOUND.deviation, slope * idle), degrees)


def replays_graphs(arm: Arm) -> bool:
    """Return whether an arm's kernels are replayed as CUDA graphs, rather than launched one by one by the host."""
    return arm.cuda_graphs or arm.torch_compile_mode == "reduce-overhead"


@dataclass(frozen=True)
class Speed:
    """The speed of a candidate, pooled over all of its processes."""

    samples_per_second: float
    processes: int
    log_sample_seconds: Estimate
    """Logarithm of the seconds a sample: mean over processes."""
    next_process: Estimate
    """The same logarithm, predicted for one more process of the same search."""
    later_deviation: float
    """Deviation of this logarithm between a search and a later run on the machine."""

    @property
    def relative_half_width(self) -> float:
        """Half the 95 % interval of the next run's speed, relative to the speed."""
        later = Estimate(0.0, self.later_deviation, math.inf)
        return math.hypot(self.next_process.half_width(), later.half_width())

    def interval(self) -> tuple[float, float]:
        """Return the 95 % interval of the next run's speed, in samples a second."""
        width = self.relative_half_width
        return self.samples_per_second * math.exp(-width), self.samples_per_second * math.exp(width)


class Kind(NamedTuple):
    """A kind of candidates, whose processes are expected to differ in speed by as much."""

    pinned: bool
    host_bound: bool | None
    graphs: bool = False
    """Whether they are host-bound although they replay CUDA graphs."""


class Deviations(NamedTuple):
    """How much processes differ from the mean of their candidate, beyond the noise of the steps within each process."""

    sum_of_squares: float = 0.0
    degrees: float = 0.0


def deviations(repeated: Iterable[Sequence[Tried]]) -> dict[Kind, Deviations]:
    """Return the deviations between processes by kind. Each sequence has the completed trials of one candidate."""
    by_kind: dict[Kind, list[tuple[float, float, int]]] = {}
    for trials in repeated:
        processes = list({tried.process: tried for tried in trials}.values())
        degrees = len(processes) - 1
        if degrees > 0:
            squares = squares_about_mean([_log_sample_seconds(tried) for tried in processes])[1]
            # The means of a few steps differ even where processes do not.
            within = math.fsum(_variance_of_steps(tried) for tried in processes) * degrees / len(processes)
            kind = _kind(trials[0].candidate, _last_busy_share(trials))
            by_kind.setdefault(kind, []).append((squares, within, degrees))
    found: dict[Kind, Deviations] = {}
    for kind, parts in by_kind.items():
        all_squares, all_within, all_degrees = map(math.fsum, zip(*parts, strict=True))
        # The noise of steps is taken to explain half of the squares at most.
        found[kind] = Deviations(max(all_squares - all_within, all_squares / 2), all_degrees)
    return found


class Pool:
    """Pools the completed trials of each candidate."""

    def __init__(self, trials: Iterable[Tried], before: Mapping[Kind, Deviations] | None = None) -> None:
        """Pool the trials. ``before`` has the deviations that this machine has shown earlier."""
        self._before = before or {}
        self._trials: dict[Candidate, list[Tried]] = {}
        for tried in trials:
            if tried.measurement is not None:
                self._trials.setdefault(tried.candidate, []).append(tried)
        self._speeds: dict[Candidate, Speed] = {}
        self._deviations: dict[Kind, Deviations] | None = None

    def candidates(self) -> tuple[Candidate, ...]:
        """Return every candidate of which a trial completed."""
        return tuple(self._trials)

    def processes(self, candidate: Candidate) -> int:
        """Return how many distinct processes were measured; a reused trial counts once."""
        return _count_processes(self._trials.get(candidate, ()))

    def busy_share(self, candidate: Candidate) -> float | None:
        """Return the last measured share of a step in which the GPU computes; ``None`` without a measurement."""
        return _last_busy_share(self._trials.get(candidate, ()))

    def is_host_bound(self, candidate: Candidate) -> bool:
        """Return whether the step was measured to be host-bound, rather than waiting for data."""
        measured = [t.measurement for t in self._trials.get(candidate, ()) if t.measurement]
        profiled = [measurement for measurement in measured if measurement.gpu_busy_share is not None]
        return bool(profiled) and what_limits(profiled[-1]).kind == "host"

    def speed(self, candidate: Candidate) -> Speed | None:
        """Return the candidate's speed; ``None`` where no trial of it completed."""
        if candidate not in self._trials:
            return None
        if candidate not in self._speeds:
            self._speeds[candidate] = self._pooled_speed(candidate)
        return self._speeds[candidate]

    def counting(self, candidate: Candidate) -> list[Tried]:
        """Return the trials that count for a candidate's speed: one for each process, in full if any ran in full."""
        trials = self._trials.get(candidate, [])
        whole = [tried for tried in trials if tried.in_full] or trials
        return list({tried.process: tried for tried in whole}.values())

    def deviation_seen(self, candidate: Candidate) -> float:
        """Return the deviation between processes of candidates of this kind, in these trials; 0 without repetitions."""
        if self._deviations is None:
            self._deviations = deviations(self._trials.values())
        squares, degrees = self._deviations.get(_kind(candidate, self.busy_share(candidate)), Deviations())
        return math.sqrt(squares / degrees) if degrees else 0.0

    def degrees(self, candidate: Candidate) -> float:
        """Return from how many degrees of freedom the deviation between processes of this kind was measured."""
        return self._deviations_of(_kind(candidate, self.busy_share(candidate))).degrees

    def pooled(self, candidate: Candidate) -> Tried:
        """Return the candidate's last trial with time, speed and peaks pooled over all its processes."""
        counting = self.counting(candidate)
        speed = self.speed(candidate)
        last = counting[-1]
        if speed is None or last.measurement is None or len(counting) == 1:
            return last
        measured = replace(
            last.measurement.at_speed(speed.samples_per_second),
            peak_allocated_bytes=max(t.measurement.peak_allocated_bytes for t in counting if t.measurement),
            peak_reserved_bytes=max(t.measurement.peak_reserved_bytes for t in counting if t.measurement),
            gpu_busy_share=self.busy_share(candidate),
        )
        return replace(last, outcome=Completed(measured, source=getattr(last.outcome, "source", None)))

    def is_faster(self, candidate: Candidate, other: Candidate) -> bool:
        """Return whether a candidate is significantly faster than another, at 95 %, or if it alone was measured."""
        one, two = self.speed(candidate), self.speed(other)
        if one is None or two is None:
            return one is not None
        gain = difference(two.log_sample_seconds, one.log_sample_seconds)
        return gain.mean > gain.half_width()

    def expected_gain(self, candidate: Candidate, over: Candidate) -> float:
        """Return the expected relative speed-up over another candidate, a slow-down counted as 0; 0 without a speed."""
        one, other = self.speed(candidate), self.speed(over)
        if one is None or other is None:
            return 0.0
        return expected_excess(difference(other.log_sample_seconds, one.log_sample_seconds))

    def _pooled_speed(self, candidate: Candidate) -> Speed:
        """Return the pooled speed of a candidate, with the interval of its next run."""
        counting = self.counting(candidate)
        logs = [_log_sample_seconds(tried) for tried in counting]
        variance = self._variance(candidate)
        # The errors of the processes' own means, and with them the deviation between processes.
        within = math.sqrt(math.fsum(within_error(tried) ** 2 for tried in counting)) / len(logs)
        next_process = next_value(logs, variance, within)
        error = math.hypot(variance.deviation / math.sqrt(len(logs)), within)
        mean = Estimate(next_process.mean, error, variance.degrees)
        later = _LATER_HOST_BOUND if _kind(candidate, self.busy_share(candidate)).host_bound else _LATER
        return Speed(1 / math.exp(mean.mean), _count_processes(counting), mean, next_process, later)

    def _variance(self, candidate: Candidate) -> Variance:
        """Return the variance between processes: the prior, updated with repeated candidates of the same kind.

        The more of these there are, the less the prior counts, except for host-bound steps.
        """
        usual = usual_variance(candidate.arm, self.busy_share(candidate))
        kind = _kind(candidate, self.busy_share(candidate))
        shown = self._deviations_of(kind)
        if not kind.host_bound:
            usual = replace(usual, degrees=usual.degrees / (1 + shown.degrees) ** _YIELDS)
        return usual.updated(shown.sum_of_squares, shown.degrees)

    def _deviations_of(self, kind: Kind) -> Deviations:
        """Return the deviations of a kind, from these trials and from earlier ones."""
        if self._deviations is None:
            self._deviations = deviations(self._trials.values())
        now, before = (of.get(kind, Deviations()) for of in (self._deviations, self._before))
        return Deviations(now.sum_of_squares + before.sum_of_squares, now.degrees + before.degrees)


def _kind(candidate: Candidate, busy_share: float | None) -> Kind:
    """Return the kind of a candidate: the properties that decide how much its processes deviate from each other."""
    host_bound = None if busy_share is None else busy_share < HOST_BOUND
    return Kind(candidate.arm.cpu_affinity, host_bound, host_bound is True and replays_graphs(candidate.arm))


def _count_processes(trials: Iterable[Tried]) -> int:
    """Return how many processes measured some trials, without those whose outcome was derived from another trial."""
    measured = [tried for tried in trials if (source := source_of(tried.outcome)) is None or not source.derived]
    return len({tried.process for tried in measured})


def _last_busy_share(trials: Iterable[Tried]) -> float | None:
    """Return the last measured share of a step in which the GPU computes; ``None`` without a measurement."""
    shares = [t.measurement.gpu_busy_share for t in trials if t.measurement and t.measurement.gpu_busy_share]
    return shares[-1] if shares else None


def _log_sample_seconds(tried: Tried) -> float:
    """Return the logarithm of the seconds that a completed trial took for a sample."""
    assert tried.measurement is not None
    return math.log(tried.measurement.step_seconds / tried.candidate.samples_per_step)


def _variance_of_steps(tried: Tried) -> float:
    """Return the relative variance of a process's mean step, from its steps alone; 0 with a single step.

    Of batches that differ in length it is what their lengths do not explain.
    """
    measured = tried.measurement
    if measured is None or len(measured.step_seconds_each) < 2:
        return 0.0
    if measured.batches_vary:
        return (measured.steady_error or 0.0) ** 2
    steps = measured.step_seconds_each
    mean, squares = squares_about_mean(steps)
    return squares / (len(steps) - 1) / len(steps) / mean**2


def within_error(tried: Tried) -> float:
    """Return the standard error of the mean step of one process, relative to that mean."""
    measured = tried.measurement
    assert measured is not None
    if len(measured.step_seconds_each) < 2:
        # A single step has no spread of its own.
        return _ONE_STEP_ERROR
    if measured.batches_vary:
        # With batches of different lengths, the trial's own interval accounts for them. Half of it is about two errors.
        return measured.relative_spread / 2
    own = mean_step(measured.step_seconds_each)
    return own.error / own.mean
