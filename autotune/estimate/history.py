"""Keep the trials of a search, and derive what they show: what fits, what is ruled out, what is fastest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from autotune.core.candidate import Arm, Candidate
from autotune.core.ceiling import Ceiling
from autotune.core.options import Objective
from autotune.core.outcome import Completed, Failed, Outcome, OutOfMemory
from autotune.estimate.memory import MemoryModel
from autotune.estimate.pooling import Deviations, Kind, Pool, Speed
from autotune.estimate.pooling import Tried as Tried
from autotune.estimate.step_time import StepForecast
from autotune.space.arms import inconvenience, memory_class, needs_at_least


def cap_of(arm: Arm, ceiling: Ceiling) -> int:
    """Return the bytes that a trial of this arm may reserve.

    That is the ceiling's cap. With expandable segments it is the lower line: peak reserved memory then does not tell
    whether the candidate fits, so the trial runs under the line itself.
    """
    return ceiling.line_bytes if arm.expandable_segments else ceiling.cap_bytes


def failed_without_verdict(tried: Tried) -> bool:
    """Return whether a trial failed in a way that says nothing about device memory: by an error, or on the host."""
    outcome = tried.outcome
    return isinstance(outcome, Failed) or (isinstance(outcome, OutOfMemory) and outcome.where == "host")


def ran_in_full(candidate: Candidate, outcome: Outcome) -> bool:
    """Return whether a trial ran every micro-step of its candidate's step; true where it did not complete."""
    if not isinstance(outcome, Completed):
        return True
    if outcome.source is not None and outcome.source.derived:
        return False
    return outcome.measurement.micro_steps_run == candidate.gradient_accumulation_steps


DEFAULT_TOLERANCE = 0.01
MATERIAL = 0.1
"""Relative difference between speeds that matters to whoever trains. A choice."""


@dataclass(frozen=True)
class _Summary:
    """What was derived from the trials of a history, kept until a trial or the ceiling changes."""

    key: tuple[int, Ceiling]
    """Number of trials and ceiling when it was derived."""
    over: list[Tried]
    believed: list[Tried]
    pool: Pool


@dataclass
class History:
    """Trials in the order in which they ended, judged under one memory ceiling."""

    ceiling: Ceiling
    tried: list[Tried] = field(default_factory=list)
    memory: MemoryModel | None = None
    """Predicted peak memory; ``None`` where nothing is predicted."""
    steps: StepForecast | None = None
    """Predicted step times; ``None`` where nothing is predicted, or the GPU's rates are not known."""
    pending: list[Candidate] = field(default_factory=list)
    """Candidates whose trials are under way. They count as tried, though nothing is known of them yet."""
    tolerance: float = DEFAULT_TOLERANCE
    """Relative gain in speed below which a candidate is not worth a trial."""
    elsewhere: dict[Candidate, float] = field(default_factory=dict)
    """Samples a second of candidates measured on other machines of this kind, whose peaks fit under this ceiling. They
    decide what is tried first, and nothing else."""
    own: Candidate | None = None
    """The settings of the user's own code, unmodified; ``None`` where it has none, or a model is searched by name."""
    layers: int = 1
    """How many layers may recompute their activations."""
    compiled_recomputes: bool = True
    """Whether a compiled model with gradient checkpointing recomputes all activations that it should."""
    before: Mapping[Kind, Deviations] = field(default_factory=dict)
    """How processes deviated on this machine before these trials."""
    _summed_up: _Summary | None = field(default=None, repr=False, compare=False)

    def add(self, tried: Tried) -> None:
        """Add a trial that ended."""
        self.tried.append(tried)
        if self.memory is not None:
            self.memory.learn(tried.candidate, tried.outcome)

    def replace(self, tried: Tried, outcome: Outcome) -> None:
        """Replace the outcome of a trial by a later, better known one."""
        self.tried[self.tried.index(tried)] = replace(tried, outcome=outcome)
        self._summed_up = None

    def clear(self) -> None:
        """Forget every trial that ended, but keep the memory model."""
        self.tried.clear()
        self._summed_up = None

    def attempts(self, candidate: Candidate) -> int:
        """Return the number of trials of exactly this candidate, whether ended or running."""
        return len(self.outcomes_of(candidate)) + self.pending.count(candidate)

    def speed(self, candidate: Candidate) -> Speed | None:
        """Return the pooled speed of all processes of a candidate; ``None`` where none completed."""
        return self._summary().pool.speed(candidate)

    @property
    def pool(self) -> Pool:
        """The feasible trials, pooled by candidate, without candidates that were over the line in another trial."""
        return self._summary().pool

    def outcomes_of(self, candidate: Candidate) -> list[Tried]:
        """Return every trial of exactly this candidate."""
        return [t for t in self.tried if t.candidate == candidate]

    def is_feasible(self, tried: Tried) -> bool:
        """Return whether a trial completed with its peak memory at or under the ceiling's line."""
        measured = tried.measurement
        return measured is not None and measured.fits(tried.candidate.arm, self.ceiling)

    def is_over(self, tried: Tried) -> bool:
        """Return whether a trial shows that its candidate needs more memory than the line allows.

        Running out of host memory shows nothing about the device's, nor does a disturbed trial that ran out of memory.
        """
        if isinstance(tried.outcome, OutOfMemory):
            return tried.outcome.where == "device" and not tried.outcome.disturbed
        return tried.measurement is not None and not self.is_feasible(tried)

    def ruled_out_by(self, candidate: Candidate) -> Tried | None:
        """Return a trial over the line that needs no more memory than this candidate; ``None`` without such a trial.

        Within an arm, memory grows with the per-device batch. At the same batch, accumulation needs more, since
        gradients outlive the micro-step, and keeping activations needs more than recomputing them. Nothing is concluded
        the other way round: a batch of 8 with accumulation can peak above a batch of 16 without.
        """
        for tried in self.over_with_no_more(candidate.arm, accumulates=candidate.accumulates):
            if tried.candidate.per_device_train_batch_size <= candidate.per_device_train_batch_size:
                return tried
        return None

    def smallest_over(self, arm: Arm, *, accumulates: bool) -> int | None:
        """Return the smallest batch of an arm that ``ruled_out_by`` rules out; ``None`` where there is none."""
        over = self.over_with_no_more(arm, accumulates=accumulates)
        return min((tried.candidate.per_device_train_batch_size for tried in over), default=None)

    def over_with_no_more(self, arm: Arm, *, accumulates: bool) -> list[Tried]:
        """Return the trials over the line whose arm needs no more memory than this one at the same batch.

        Trials with accumulation are among them only where ``accumulates`` is true.
        """
        own = memory_class(arm)
        return [
            tried
            for tried in self._summary().over
            if tried.candidate.accumulates <= accumulates and needs_at_least(own, memory_class(tried.candidate.arm))
        ]

    def feasible(self) -> list[Tried]:
        """Return the feasible trials."""
        return [tried for tried in self.tried if self.is_feasible(tried)]

    def believed(self, among: Iterable[Candidate] | None = None) -> list[Tried]:
        """Return one feasible trial for each candidate, with the pooled speed of its processes.

        Where trials of a candidate ran every micro-step, only these count. A candidate that was over the line in one of
        its trials is left out: it may run out of memory in training, too.
        """
        if among is None:
            return list(self._summary().believed)
        wanted = among if isinstance(among, set) else set(among)
        return [tried for tried in self._summary().believed if tried.candidate in wanted]

    def _summary(self) -> _Summary:
        """Return the quantities derived from all trials. They are computed once after each trial."""
        key = len(self.tried), self.ceiling
        if self._summed_up is None or self._summed_up.key != key:
            over = [tried for tried in self.tried if self.is_over(tried)]
            candidates_over = {tried.candidate for tried in over}
            feasible = [tried for tried in self.feasible() if tried.candidate not in candidates_over]
            pool = Pool(feasible, self.before)
            believed = [pool.pooled(candidate) for candidate in dict.fromkeys(t.candidate for t in feasible)]
            self._summed_up = _Summary(key, over, believed, pool)
        return self._summed_up

    def fastest(self, among: Iterable[Candidate] | None = None) -> Tried | None:
        """Return the fastest feasible candidate, by samples a second."""
        return max(self.believed(among), key=speed_of, default=None)

    def winner(self, among: Iterable[Candidate] | None = None) -> Tried | None:
        """Return the candidate to recommend for speed.

        The user's own settings win where the fastest candidate is not distinguishably faster, and by no more than 10 %.
        Else the least intrusive candidate wins among those within the tolerance of the fastest. Among equally
        convenient candidates the one with the lowest peak wins, if its expected loss against the fastest is within the
        tolerance.
        """
        believed = self.believed(among)
        fastest = max(believed, key=speed_of, default=None)
        if fastest is None:
            return None
        own = next((tried for tried in believed if tried.candidate == self.own), None)
        is_near_own = own is not None and speed_of(fastest) <= speed_of(own) * (1 + MATERIAL)
        if own is not None and is_near_own and not self.pool.is_faster(fastest.candidate, own.candidate):
            return own
        near = [tried for tried in believed if speed_of(tried) >= speed_of(fastest) * (1 - self.tolerance)]
        least = min(inconvenience(tried.candidate.arm) for tried in near)
        alike = [tried for tried in near if inconvenience(tried.candidate.arm) == least]
        fastest = max(alike, key=speed_of)
        surely = [t for t in alike if self.pool.expected_gain(fastest.candidate, t.candidate) <= self.tolerance]
        return min(
            surely,
            key=lambda t: t.measurement.judged_bytes(t.candidate.arm) if t.measurement else 0,
            default=fastest,
        )

    def answer(self, objective: Objective, among: Iterable[Candidate] | None = None) -> Tried | None:
        """Return the candidate to recommend for an objective."""
        return self.largest(among) if objective == "max-batch" else self.winner(among)

    def largest(self, among: Iterable[Candidate] | None = None) -> Tried | None:
        """Return the feasible trial with the largest per-device batch; the fastest of several."""
        return max(
            self.believed(among), key=lambda t: (t.candidate.per_device_train_batch_size, speed_of(t)), default=None
        )


def speed_of(tried: Tried) -> float:
    """Return the samples a second of a trial; 0 where it did not complete."""
    return tried.measurement.samples_per_second if tried.measurement else 0.0


def batch_of(tried: Tried) -> int:
    """Return the per-device batch of a trial."""
    return tried.candidate.per_device_train_batch_size
