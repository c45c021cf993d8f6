"""Bound how fast a candidate that was not tried can be, from those that were, and say why an arm is left out.

Bounds rather than guesses decide what is not tried:

- recomputing activations costs time at the same batch, so checkpointing is never faster there;
- fp32 does on slower units what tf32 does, and fp16 is bf16 with loss scaling on top;
- tensor cores multiply bf16 at twice the rate of tf32 (NVIDIA's data sheets), on half the bytes. So the time that the
  GPU computes in a step of bf16 bounds that of tf32 from below, where that time was measured;
- a larger batch takes at least as much GPU time a sample as the arm's gain from small to large batches leaves;
- a step's time is affine in the batch above a floor, so that the slope between two batches of an arm tells the
  most samples a second that any larger one can reach, within the error of the two measurements.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.core.candidate import Arm
from autotune.core.outcome import Measurement
from autotune.core.statistics import quantile
from autotune.estimate.feasibility import Judge, failed_without_verdict
from autotune.estimate.history import History, Tried
from autotune.space.space import Space

# The GPU time that a sample takes falls by at most this factor from one batch to a larger one: 1.20 from 8 to 32 with
# BERT-large in bf16 on an H200, and at most 1.33 on five recorded landscapes once a micro-step took 60 ms.
_LARGER_BATCH_GAIN = 1.33
# How many times as long the GPU computes in tf32 as in bf16, at least: 2.2 with BERT-large, 1.7 with a checkpointed
# ViT-large (CUPTI, H200, 22 November 2026), and 2 by the data sheets. Less, since two models are few.
_TF32_TIMES = 1.4
# How many times as long the GPU computes in a step with recomputation, at least. The forward pass is repeated, a third
# of the operations of a step without that; on recorded landscapes it cost 17 % or more.
_RECOMPUTING_TIMES = 1.15
# An arm this far behind is not followed to other batches where nothing is known of what limits it.
_HOPELESS = 0.75
FAR_ENOUGH = 0.75
"""Two batches nearer to each other than this tell more of the noise than of the slope between them."""
# Two-sided, so that a bound is crossed in one case of ten.
_CONFIDENCE = 0.8

_NEVER_SLOWER = {"fp32": "tf32", "fp16": "bf16"}


@dataclass(frozen=True)
class Seconds:
    """A step time with the half-width of its interval, both in seconds."""

    value: float
    half_width: float


def speed_of(tried: Tried) -> float:
    """Samples a second; 0 for a trial that did not complete."""
    return tried.measurement.samples_per_second if tried.measurement else 0.0


def batch_of(tried: Tried) -> int:
    """The per-device batch."""
    return tried.candidate.per_device_train_batch_size


class ArmView:
    """One arm's trials among those of a history, by per-device batch."""

    def __init__(self, space: Space, arm: Arm, history: History) -> None:
        self.space, self.arm, self.history = space, arm, history
        self.tried = {batch_of(t): t for t in history.tried if self._counts(t)}
        self.feasible = {batch_of(t): t for t in history.believed() if self._counts(t)}
        self.failed = {batch for batch, tried in self.tried.items() if failed_without_verdict(tried)}
        self.judge = Judge(space, history)
        self.doubtful = self.judge.is_doubtful(arm)

    def _counts(self, tried: Tried) -> bool:
        return tried.candidate.arm == self.arm and self.space.contains(tried.candidate)

    def open(self, batch: int) -> bool:
        """Whether the batch was neither tried nor ruled out."""
        return self.judge.is_open(self.space.candidate(self.arm, batch))

    def predicted_to_fit(self, batches: Sequence[int]) -> list[int]:
        """Those of the batches that are predicted to fit; none where nothing is predicted."""
        memory = self.history.memory
        return [b for b in batches if memory and memory.likely_fits(self.space.candidate(self.arm, b))]

    def fastest(self) -> int:
        """The feasible batch with the most samples a second."""
        return max(self.feasible, key=lambda batch: speed_of(self.feasible[batch]))

    def was_chosen(self, tried: Tried) -> bool:
        """The baseline's batch was not chosen for its speed, so climbing does not start from there."""
        return tried.candidate != self.space.baseline(tried.candidate.arm.attn_implementation)

    def micro_step(self, batch: int) -> Seconds:
        """One of the micro-steps of a feasible batch, with what other processes may differ by in its interval."""
        seconds = self.measured(batch).step_seconds / self.space.batches.accumulation(batch)
        speed = self.history.speed(self.feasible[batch].candidate)
        error = speed.log_sample_seconds.half_width(_CONFIDENCE) if speed is not None else 0.0
        return Seconds(seconds, seconds * error)

    def measured(self, batch: int) -> Measurement:
        """What a feasible batch measured."""
        measured = self.feasible[batch].measurement
        assert measured is not None
        return measured

    def seconds_a_sample(self, top: int) -> Seconds | None:
        """What each sample more costs, by the slope up to ``top``; ``None`` while one batch alone is known."""
        smaller = [batch for batch in self.feasible if batch <= FAR_ENOUGH * top]
        if not smaller:
            return None
        low, high = self.micro_step(max(smaller)), self.micro_step(top)
        more = top - max(smaller)
        return Seconds((high.value - low.value) / more, math.hypot(high.half_width, low.half_width) / more)

    def gpu_bound(self, *, at_any_batch: bool = False) -> float | None:
        """The most samples a second that this arm can reach; ``None`` where no GPU time was measured.

        By the GPU time that a sample took, and by the slope where two batches are known. A sample takes no less GPU
        time in a smaller batch, so only batches that are still open can gain on the largest that was measured.
        ``at_any_batch`` is for arms that need less memory than this one, and so can have larger batches.
        """
        bounds = []
        for batch, tried in self.feasible.items():
            share = self.history.busy_share(tried.candidate)
            if share is not None:
                bounds.append((batch, speed_of(tried) / share))
        if not bounds:
            return None
        largest, bound = max(bounds)
        if at_any_batch or any(batch > largest and self.open(batch) for batch in self.judge.batches_in_reach()):
            bound *= _LARGER_BATCH_GAIN
        cost = self.seconds_a_sample(max(self.feasible))
        by_slope = cost.value - cost.half_width if cost is not None else 0.0
        return min(bound, 1 / by_slope) if by_slope > 0 else bound


class Speeds:
    """What the trials so far say of the speed of the rest."""

    def __init__(self, space: Space, history: History) -> None:
        self._space, self._history = space, history
        self._judge = Judge(space, history)

    def view(self, arm: Arm) -> ArmView:
        """The arm's trials."""
        return ArmView(self._space, arm, self._history)

    def best(self) -> float:
        """The most samples a second so far; a baseline outside the space is nothing to be measured by."""
        believed = self._history.believed()
        return max((speed_of(t) for t in believed if self._space.contains(t.candidate)), default=0.0)

    def is_hopeless(self, view: ArmView, peak: int) -> bool:
        """Whether an arm is so far behind that its smaller batches are not worth a trial."""
        return speed_of(view.feasible[peak]) < _HOPELESS * self.best()

    def is_beaten(self, view: ArmView, batch: int) -> bool:
        """Whether an arm that is never slower measured the batch or a larger one.

        That is the same arm without recomputation, with torch's default allocator, or in the faster precision of its
        kind.
        """
        twins = [
            dataclasses.replace(view.arm, gradient_checkpointing=False),
            dataclasses.replace(view.arm, expandable_segments=False),
            self._faster_precision(view.arm) or view.arm,
        ]
        faster = [twin for twin in twins if twin != view.arm]
        return any(t.candidate.arm in faster and batch_of(t) >= batch for t in self._history.believed())

    def _faster_precision(self, arm: Arm) -> Arm | None:
        """The same arm in the precision that is never slower than its own, where that is searched."""
        precision = _NEVER_SLOWER.get(arm.precision)
        faster = dataclasses.replace(arm, precision=precision) if precision else None  # type: ignore[arg-type]
        return faster if faster in self._space.arms else None

    def can_gain(self, view: ArmView) -> bool:
        """Whether a batch above the arm's largest can beat all others by more than the tolerance."""
        top, peak = max(view.feasible), view.fastest()
        if top > peak and self._is_slower(view, top, peak):
            return False
        wanted = max(speed_of(view.feasible[peak]), self.best()) * (1 + self._history.tolerance)
        cost = view.seconds_a_sample(top)
        if cost is not None:
            # The cheapest that a further sample may be, so far as the two measurements tell.
            return wanted * (cost.value - cost.half_width) < 1
        bound = view.gpu_bound()
        return bound > wanted if bound is not None else not self.is_hopeless(view, peak)

    def _is_slower(self, view: ArmView, batch: int, than: int) -> bool:
        """Whether one batch is slower than another beyond what their measurements leave open."""
        one, other = (self._history.speed(view.feasible[b].candidate) for b in (batch, than))
        if one is None or other is None:
            return False
        error = math.hypot(one.log_sample_seconds.error, other.log_sample_seconds.error)
        degrees = min(one.log_sample_seconds.degrees, other.log_sample_seconds.degrees)
        return one.log_sample_seconds.mean - other.log_sample_seconds.mean > quantile(degrees, _CONFIDENCE) * error

    def left_out(self, arm: Arm) -> str | None:
        """Why what was measured of like arms leaves this one no chance; ``None`` where it has one."""
        faster = self._faster_precision(arm)
        # Where that failed at some batch, this arm may still be asked for it.
        is_known = faster is not None and not self.view(faster).failed
        if faster is not None and is_known and (self._history.feasible(faster) or self._is_out(faster)):
            return f"{arm.precision} is never faster than {faster.precision} and needs as much memory"
        if arm.precision == "tf32" and self._is_at_half_rate(arm):
            return "tf32 takes more GPU time than bf16, whose GPU time was measured: it cannot come near the best"
        if arm.expandable_segments and self._has_room(arm):
            return "expanding segments only helps the best arm, and only where memory limits it"
        if not arm.gradient_checkpointing:
            return None
        return self._recomputing(arm)

    def _is_at_half_rate(self, arm: Arm) -> bool:
        """Whether tf32 would be slower than the best even if the GPU never waited, by the GPU time that bf16 took.

        Recomputing takes more GPU time still, so that bf16 without it bounds tf32 with it, too.
        """
        twin = dataclasses.replace(arm, precision="bf16")
        plain = dataclasses.replace(twin, gradient_checkpointing=False)
        bounds = [self.view(twin).gpu_bound()]
        if twin != plain and (bound := self.view(plain).gpu_bound(at_any_batch=True)) is not None:
            bounds.append(bound / _RECOMPUTING_TIMES)
        known = [bound for bound in bounds if bound is not None]
        return bool(known) and min(known) / _TF32_TIMES < self.best() * (1 + self._history.tolerance)

    def _is_out(self, arm: Arm) -> bool:
        """Whether an arm has no chance, though it was not measured."""
        return self.left_out(arm) is not None or self._is_beaten_throughout(arm)

    def _is_beaten_throughout(self, arm: Arm) -> bool:
        """Whether every batch that may fit was measured without recomputing or expanding, or a larger one was."""
        view = self.view(arm)
        still_open = [batch for batch in self._ladder() if view.open(batch)]
        return bool(still_open) and all(self.is_beaten(view, batch) for batch in still_open)

    def _ladder(self) -> list[int]:
        """The batches that the search looks at now."""
        return self._judge.batches_in_reach()

    def _recomputing(self, arm: Arm) -> str | None:
        """Why larger batches that checkpointing allows cannot make up for what recomputing costs."""
        twin = self.view(dataclasses.replace(arm, gradient_checkpointing=False))
        bound = twin.gpu_bound(at_any_batch=True)
        if bound is None or bound / _RECOMPUTING_TIMES >= self.best() * (1 + self._history.tolerance):
            return None
        share = speed_of(twin.feasible[twin.fastest()]) / self.best()
        return f"without it {share:.0%} of the best was reached, and no larger batch gains what recomputing costs"

    def _has_room(self, arm: Arm) -> bool:
        """Whether the same arm with torch's default allocator shows that expanding segments cannot help.

        They are never faster at the same batch, so only the best arm can win by them, and only where it was
        memory that kept it from a larger batch.
        """
        plain = dataclasses.replace(arm, expandable_segments=False)
        tried = self._history.tried
        fastest = self._history.fastest(t.candidate for t in tried if self._space.contains(t.candidate))
        if plain not in self._space.arms or fastest is None:
            return False
        if fastest.candidate.arm not in (plain, arm):
            return True
        twin = self.view(plain)
        return bool(twin.feasible) and not self.can_gain(twin)

    def left_out_lines(self) -> list[str]:
        """A line for each reason why arms had no trial: ``all fp16: fp16 is never faster than bf16 …``."""
        return [f"{'; '.join(self._names(arms))}: {why}" for why, arms in self._untried().items()]

    def _names(self, arms: list[Arm]) -> list[str]:
        """What to call arms: those of a precision that are all there is of it by that alone."""
        names: list[str] = []
        for precision in dict.fromkeys(arm.precision for arm in arms):
            of_it = [arm for arm in arms if arm.precision == precision]
            is_all = len(of_it) > 1 and len(of_it) == sum(arm.precision == precision for arm in self._space.arms)
            names += [f"all {precision}"] if is_all else [arm.describe() for arm in of_it]
        return names

    def _untried(self) -> dict[str, list[Arm]]:
        found: dict[str, list[Arm]] = {}
        for arm in self._space.arms:
            view, ladder = self.view(arm), self._ladder()
            has_a_trial = any(view.was_chosen(tried) for tried in view.tried.values())
            # The baseline's batch may be all there is of its arm.
            if not has_a_trial and not (ladder and view.tried.keys() >= set(ladder)):
                found.setdefault(self._why_untried(view), []).append(arm)
        return found

    def _why_untried(self, view: ArmView) -> str:
        why = self.left_out(view.arm)
        if why is not None:
            return why
        ladder = self._ladder()
        if ladder and not any(view.open(batch) for batch in ladder):
            return "no batch of it fits"
        if view.arm.gradient_checkpointing and self._is_beaten_throughout(view.arm):
            return "every batch that fits was measured without recomputing, which is never slower"
        return "nothing promised to be faster"
