"""What a search knows so far: every trial it ran, which candidates that rules out, which one is best."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from autotune.device import Ceiling
from autotune.memory import MemoryModel, memory_class
from autotune.space import PRECISION_PREFERENCE
from autotune.trial import Arm, Candidate, Completed, Measurement, Outcome, OutOfMemory


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

# Two measurements closer than this are the same, whatever their own spreads say: the recorded
# noise between repeated trials on an H200 (5 % where a micro-step is under 60 ms).
NOISE = 0.02
LAUNCH_BOUND_NOISE = 0.05
LAUNCH_BOUND_SECONDS = 0.06
# What a stock run may be slower than was promised: medians of a few steps lay within it of those over 150 steps.
PROMISE = 0.03


def noise(tried: Tried) -> float:
    """The relative difference in speed below which another candidate counts as equal."""
    return LAUNCH_BOUND_NOISE if _is_launch_bound(tried.candidate, tried.measurement) else NOISE


def promised_within(candidate: Candidate, measured: Measurement) -> float:
    """The share by which a stock run of a candidate may be slower than it was measured."""
    return LAUNCH_BOUND_NOISE if _is_launch_bound(candidate, measured) else PROMISE


def _is_launch_bound(candidate: Candidate, measured: Measurement | None) -> bool:
    """Whether a micro-step is so short that starting its kernels takes much of it."""
    return measured is not None and measured.step_seconds / candidate.gradient_accumulation_steps < LAUNCH_BOUND_SECONDS


@dataclass
class History:
    """Trials in the order in which they ended, and what follows from them under one ceiling."""

    ceiling: Ceiling
    tried: list[Tried] = field(default_factory=list)
    memory: MemoryModel | None = None
    """What is predicted, where anything is."""
    tolerance: float = DEFAULT_TOLERANCE
    """What could be faster by no more than this, as a fraction, is not worth a trial."""
    _summed_up: tuple[tuple[int, Ceiling], list[Tried], list[Tried], Counter[Candidate]] | None = field(
        default=None, repr=False, compare=False
    )

    def add(self, tried: Tried) -> None:
        """Take down one more."""
        self.tried.append(tried)
        if self.memory is not None:
            self.memory.learn(tried.candidate, tried.outcome)

    def times_measured(self, candidate: Candidate) -> int:
        """How many trials of exactly this candidate completed."""
        return self._summary()[2][candidate]

    def outcomes_of(self, candidate: Candidate) -> list[Tried]:
        """Every trial of exactly this candidate."""
        return [t for t in self.tried if t.candidate == candidate]

    def is_feasible(self, tried: Tried) -> bool:
        """Completed, and its peak reserved memory is at or under the ceiling's line."""
        measured = tried.measurement
        return measured is not None and measured.fits(tried.candidate.arm, self.ceiling)

    def is_over(self, tried: Tried) -> bool:
        """Known to need more than the line: out of memory, or completed above it."""
        if isinstance(tried.outcome, OutOfMemory):
            return not tried.outcome.disturbed
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
            for tried in self._summary()[0]
            if tried.candidate.accumulates <= accumulates and _needs_at_least(arm, tried.candidate.arm)
        ]

    def feasible(self, arm: Arm | None = None) -> list[Tried]:
        """Feasible trials, of one arm or of all."""
        return [t for t in self.tried if (arm is None or t.candidate.arm == arm) and self.is_feasible(t)]

    def believed(self, among: Iterable[Candidate] | None = None) -> list[Tried]:
        """One feasible trial for each candidate: the latest of those run in full, else the latest.

        A candidate that ran over in any of its trials is not there: it would in training, too.
        """
        if among is None:
            return list(self._all_believed())
        wanted = among if isinstance(among, set) else set(among)
        return [tried for tried in self._all_believed() if tried.candidate in wanted]

    def _all_believed(self) -> list[Tried]:
        return self._summary()[1]

    def _summary(self) -> tuple[list[Tried], list[Tried], Counter[Candidate]]:
        """What ran over, what is believed and how often each completed, once a trial: a long study is asked often."""
        if self._summed_up is None or self._summed_up[0] != (len(self.tried), self.ceiling):
            latest: dict[Candidate, Tried] = {}
            over = [tried for tried in self.tried if self.is_over(tried)]
            candidates_over = {tried.candidate for tried in over}
            for tried in self.feasible():
                known = latest.get(tried.candidate)
                if tried.candidate not in candidates_over and (known is None or tried.in_full or not known.in_full):
                    latest[tried.candidate] = tried
            completed = Counter(tried.candidate for tried in self.tried if tried.measurement)
            self._summed_up = (len(self.tried), self.ceiling), over, list(latest.values()), completed
        return self._summed_up[1:]

    def fastest(self, among: Iterable[Candidate] | None = None) -> Tried | None:
        """The feasible trial with the most samples a second."""
        return max(self.believed(among), key=_speed, default=None)

    def winner(self, among: Iterable[Candidate] | None = None) -> Tried | None:
        """The trial to recommend: within the noise of the fastest, the most comfortable one.

        Comfort is bf16 before fp16 before tf32, then nothing compiled, no
        checkpointing, no other kernels, torch's default allocator, fewer loaders, then more headroom.
        """
        believed = self.believed(among)
        fastest = max(believed, key=_speed, default=None)
        if fastest is None:
            return None
        return min((t for t in believed if self._is_as_fast(t, fastest)), key=_comfort)

    def _is_as_fast(self, tried: Tried, fastest: Tried) -> bool:
        """Within the noise; within the tolerance where both were measured in turn."""
        is_compared = min(self.times_measured(t.candidate) for t in (tried, fastest)) > 1
        share = min(self.tolerance, noise(fastest)) if is_compared else noise(fastest)
        return _speed(tried) >= _speed(fastest) * (1 - share)

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


def _comfort(tried: Tried) -> tuple[int, int, int, int]:
    arm = tried.candidate.arm
    peak = tried.measurement.judged_bytes(arm) if tried.measurement else 0
    levers = (arm.torch_compile, arm.gradient_checkpointing, arm.use_liger_kernel, arm.expandable_segments)
    # As binary digits: one lever that is worse than another outweighs all that are less.
    digits = int("".join(str(int(on)) for on in levers), 2)
    return PRECISION_PREFERENCE.index(arm.precision), digits, arm.dataloader_num_workers, peak
