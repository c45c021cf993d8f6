"""What a search knows so far: every trial it ran, which candidates that rules out, which one is best."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field

from autotune.core.candidate import Arm, Candidate
from autotune.core.outcome import Completed, Outcome, OutOfMemory
from autotune.devices import Ceiling
from autotune.estimate.memory import MemoryModel, memory_class
from autotune.estimate.pooling import Pool, Speed
from autotune.estimate.pooling import Tried as Tried
from autotune.space.space import PRECISION_PREFERENCE


def cap_of(arm: Arm, ceiling: Ceiling) -> int:
    """What a trial of this arm may reserve: the cap; the line where only running under it proves anything."""
    return ceiling.line_bytes if arm.expandable_segments else ceiling.cap_bytes


def ran_in_full(candidate: Candidate, outcome: Outcome) -> bool:
    """Whether a completed trial's steps were the candidate's own, micro-step for micro-step."""
    if not isinstance(outcome, Completed):
        return True
    if outcome.source is not None and outcome.source.derived:
        return False
    return outcome.measurement.micro_steps_run == candidate.gradient_accumulation_steps


DEFAULT_TOLERANCE = 0.01


@dataclass(frozen=True)
class _Summary:
    """What follows from the trials of a history."""

    key: tuple[int, Ceiling]
    over: list[Tried]
    believed: list[Tried]
    pool: Pool


@dataclass
class History:
    """Trials in the order in which they ended, and what follows from them under one ceiling."""

    ceiling: Ceiling
    tried: list[Tried] = field(default_factory=list)
    memory: MemoryModel | None = None
    """What is predicted, where anything is."""
    tolerance: float = DEFAULT_TOLERANCE
    """What could be faster by no more than this, as a fraction, is not worth a trial."""
    _summed_up: _Summary | None = field(default=None, repr=False, compare=False)

    def add(self, tried: Tried) -> None:
        """Take down one more."""
        self.tried.append(tried)
        if self.memory is not None:
            self.memory.learn(tried.candidate, tried.outcome)

    def processes(self, candidate: Candidate) -> int:
        """Return how many processes measured exactly this candidate; a trial that was reused twice counts once."""
        return self._summary().pool.processes(candidate)

    def speed(self, candidate: Candidate) -> Speed | None:
        """Return how fast a candidate is over all of its processes; ``None`` where none completed."""
        return self._summary().pool.speed(candidate)

    def busy_share(self, candidate: Candidate) -> float | None:
        """Return the share of the candidate's step in which the GPU computes; ``None`` where it was not measured."""
        return self._summary().pool.busy_share(candidate)

    def is_host_bound(self, candidate: Candidate) -> bool:
        """Return whether the GPU was measured to wait for the host in a step of this candidate."""
        return self._summary().pool.is_host_bound(candidate)

    def expected_gain(self, candidate: Candidate, over: Candidate) -> float:
        """Return by which share a candidate is faster than another on average, counting 0 where it is slower."""
        return self._summary().pool.expected_gain(candidate, over)

    def outcomes_of(self, candidate: Candidate) -> list[Tried]:
        """Every trial of exactly this candidate."""
        return [t for t in self.tried if t.candidate == candidate]

    def is_feasible(self, tried: Tried) -> bool:
        """Completed, and its peak reserved memory is at or under the ceiling's line."""
        measured = tried.measurement
        return measured is not None and measured.fits(tried.candidate.arm, self.ceiling)

    def is_over(self, tried: Tried) -> bool:
        """Return whether a trial shows that its candidate needs more than the line.

        Out of host memory shows nothing of the device's.
        """
        if isinstance(tried.outcome, OutOfMemory):
            return tried.outcome.where == "device" and not tried.outcome.disturbed
        return tried.measurement is not None and not self.is_feasible(tried)

    def ruled_out_by(self, candidate: Candidate) -> Tried | None:
        """A trial that ran over with no more than this candidate needs, if there is one.

        Memory grows with the batch within an arm; accumulating at the same batch needs more
        (gradients outlive the micro-step), never less; so does keeping activations that another
        arm recomputes. 8 × 8 can peak above 16 × 1, so nothing is said the other way round.
        """
        for tried in self._over_with_no_more(candidate.arm, accumulates=candidate.accumulates):
            if tried.candidate.per_device_train_batch_size <= candidate.per_device_train_batch_size:
                return tried
        return None

    def is_ruled_out(self, candidate: Candidate) -> bool:
        """Whether a trial shows, or a prediction leaves no doubt, that the candidate does not fit."""
        if self.ruled_out_by(candidate) is not None:
            return True
        return self.memory is not None and self.memory.surely_over(candidate)

    def smallest_over(self, arm: Arm, *, accumulates: bool) -> int | None:
        """The smallest per-device batch that ``ruled_out_by`` refuses to this arm."""
        over = self._over_with_no_more(arm, accumulates=accumulates)
        return min((tried.candidate.per_device_train_batch_size for tried in over), default=None)

    def _over_with_no_more(self, arm: Arm, *, accumulates: bool) -> list[Tried]:
        """Trials that ran over although this arm needs as much at the same batch."""
        return [
            tried
            for tried in self._summary().over
            if tried.candidate.accumulates <= accumulates and _needs_at_least(arm, tried.candidate.arm)
        ]

    def feasible(self, arm: Arm | None = None) -> list[Tried]:
        """Feasible trials, of one arm or of all."""
        return [t for t in self.tried if (arm is None or t.candidate.arm == arm) and self.is_feasible(t)]

    def believed(self, among: Iterable[Candidate] | None = None) -> list[Tried]:
        """Return one feasible trial for each candidate, with the speed of all its trials that count taken together.

        Those that were run in full count where there are such. A candidate that ran over in any of its trials is left
        out: it would in training, too.
        """
        if among is None:
            return list(self._summary().believed)
        wanted = among if isinstance(among, set) else set(among)
        return [tried for tried in self._summary().believed if tried.candidate in wanted]

    def _summary(self) -> _Summary:
        """What follows from all trials, worked out once a trial: a long study is asked often."""
        key = len(self.tried), self.ceiling
        if self._summed_up is None or self._summed_up.key != key:
            over = [tried for tried in self.tried if self.is_over(tried)]
            candidates_over = {tried.candidate for tried in over}
            feasible = [tried for tried in self.feasible() if tried.candidate not in candidates_over]
            pool = Pool(feasible)
            believed = [pool.pooled(candidate) for candidate in dict.fromkeys(t.candidate for t in feasible)]
            self._summed_up = _Summary(key, over, believed, pool)
        return self._summed_up

    def fastest(self, among: Iterable[Candidate] | None = None) -> Tried | None:
        """Return the feasible candidate with the most samples a second."""
        return max(self.believed(among), key=_speed, default=None)

    def winner(self, among: Iterable[Candidate] | None = None) -> Tried | None:
        """Return the candidate to recommend: within the tolerance of the fastest, the most comfortable one.

        Comfort is bf16 before fp16 before tf32, then nothing compiled, no checkpointing, no other kernels, torch's
        default allocator, fewer loading processes, no pinning, then more headroom.
        """
        believed = self.believed(among)
        fastest = max(map(_speed, believed), default=0.0)
        near = [tried for tried in believed if _speed(tried) >= fastest * (1 - self.tolerance)]
        return min(near, key=_comfort, default=None)

    def largest(self, among: Iterable[Candidate] | None = None) -> Tried | None:
        """The feasible trial with the largest per-device batch, the fastest of several."""
        return max(
            self.believed(among), key=lambda t: (t.candidate.per_device_train_batch_size, _speed(t)), default=None
        )


def _needs_at_least(arm: Arm, other: Arm) -> bool:
    """Whether ``arm`` surely needs as much memory as ``other``: the same bytes, or without its recomputation."""
    arm, other = memory_class(arm), memory_class(other)
    if other.expandable_segments:
        # Segments that expand need no more than those that do not, never the other way round.
        arm = dataclasses.replace(arm, expandable_segments=True)
    return arm == other or (
        other.gradient_checkpointing and dataclasses.replace(other, gradient_checkpointing=False) == arm
    )


def _speed(tried: Tried) -> float:
    return tried.measurement.samples_per_second if tried.measurement else 0.0


def _comfort(tried: Tried) -> tuple[int, int, int, bool, int]:
    arm = tried.candidate.arm
    peak = tried.measurement.judged_bytes(arm) if tried.measurement else 0
    levers = (arm.torch_compile, arm.gradient_checkpointing, arm.use_liger_kernel, arm.expandable_segments)
    # As binary digits: one lever that is worse than another outweighs all that are less.
    digits = int("".join(str(int(on)) for on in levers), 2)
    return PRECISION_PREFERENCE.index(arm.precision), digits, arm.dataloader_num_workers, arm.cpu_affinity, peak
