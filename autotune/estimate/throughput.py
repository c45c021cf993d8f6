"""Bound the speed of candidates that were not tried by those that were, and say why an arm is left out.

A candidate is left out by a bound, not by a guess:

- At the same batch, recomputing activations costs time, so checkpointing is never faster.
- fp32 computes on slower units than tf32, and fp16 is bf16 with loss scaling on top. So fp32 is never faster than tf32,
  nor fp16 than bf16.
- Tensor cores multiply bf16 at twice the rate of tf32 (NVIDIA's data sheets), on half the bytes. So the GPU time
  measured for a step in bf16 bounds that of tf32 from below.
- The GPU time of a sample falls by a bounded factor from smaller to larger batches.
- Above a floor, the time of a step is affine in the batch. So the slope between two batches of an arm bounds the
  samples a second at any larger batch, within the error of the two measurements.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.core.candidate import Arm
from autotune.core.outcome import Measurement
from autotune.core.stop import LeftOut
from autotune.core.units import format_rate
from autotune.estimate.arm_names import names_of_arms
from autotune.estimate.feasibility import Judge, failed_without_verdict
from autotune.estimate.history import History, Tried
from autotune.space.levers import changed, faster_precision, never_slower
from autotune.space.space import Space

# Most by which the GPU time of a sample falls from one batch to a larger one: 1.20 times from 8 to 32 with BERT-large
# in bf16 on an H200, and at most 1.33 times on five recorded landscapes once a micro-step took 60 ms.
_LARGER_BATCH_GAIN = 1.33
# Least factor between the GPU time of a step in tf32 and in bf16: 2.2 with BERT-large, 1.7 with a checkpointed
# ViT-large (CUPTI, H200, 22 November 2026), and 2 by the data sheets. Set lower, since two models are few.
_TF32_TIMES = 1.4
# Least factor that recomputing activations adds to the GPU time of a step. It repeats the forward pass, a third of the
# operations; on recorded landscapes it cost 17 % or more.
_RECOMPUTING_TIMES = 1.15
# An arm whose speed is below this share of the best is not tried at other batches where its GPU time is not known.
_HOPELESS = 0.75
FAR_ENOUGH = 0.75
"""Largest ratio of two batches whose slope is used; that between nearer batches is mostly noise."""
# Two-sided confidence of the intervals in this module, so that a bound is exceeded in one case of ten.
_CONFIDENCE = 0.8

_NOTHING_FITS = "no batch of it fits"


@dataclass(frozen=True)
class Seconds:
    """A step time with the half-width of its interval, both in seconds."""

    value: float
    half_width: float


def speed_of(tried: Tried) -> float:
    """Return the samples a second of a trial; 0 where it did not complete."""
    return tried.measurement.samples_per_second if tried.measurement else 0.0


def _retried(tried: Tried) -> bool:
    """Return whether the allocator met its cap in a completed trial, which slows its steps."""
    return tried.measurement is not None and bool(tried.measurement.allocation_retries)


def batch_of(tried: Tried) -> int:
    """Return the per-device batch of a trial."""
    return tried.candidate.per_device_train_batch_size


class ArmView:
    """The trials of one arm by per-device batch."""

    def __init__(self, space: Space, arm: Arm, history: History) -> None:
        self.space, self.arm, self.history = space, arm, history
        self.tried = {batch_of(t): t for t in history.tried if self._counts(t)}
        self.feasible = {batch_of(t): t for t in history.believed() if self._counts(t)}
        self.failed = {batch for batch, tried in self.tried.items() if failed_without_verdict(tried)}
        self.pending = {c.per_device_train_batch_size for c in history.pending if c.arm == arm and space.contains(c)}
        self.judge = Judge(space, history)
        self.doubtful = self.judge.is_doubtful(arm)

    def _counts(self, tried: Tried) -> bool:
        return tried.candidate.arm == self.arm and self.space.contains(tried.candidate)

    def open(self, batch: int) -> bool:
        """Return whether the batch was neither tried, nor is it under way, nor ruled out."""
        return self.judge.is_open(self.space.candidate(self.arm, batch))

    def predicted_to_fit(self, batches: Sequence[int]) -> list[int]:
        """Return those of the batches that are predicted to fit; none where nothing is predicted."""
        memory = self.history.memory
        return [b for b in batches if memory and memory.likely_fits(self.space.candidate(self.arm, b))]

    def fastest(self) -> int:
        """Return the feasible batch with the most samples a second."""
        return max(self.feasible, key=lambda batch: speed_of(self.feasible[batch]))

    def was_chosen(self, tried: Tried) -> bool:
        """Return whether the policy chose the trial's batch; the baseline's batch is given, not chosen."""
        return tried.candidate != self.space.baseline(tried.candidate.arm.attn_implementation)

    def micro_step(self, batch: int) -> Seconds:
        """Return the time of one micro-step at a feasible batch.

        Its interval covers the deviation between processes.
        """
        seconds = self.measured(batch).step_seconds / self.space.batches.accumulation(batch)
        speed = self.history.speed(self.feasible[batch].candidate)
        error = speed.log_sample_seconds.half_width(_CONFIDENCE) if speed is not None else 0.0
        return Seconds(seconds, seconds * error)

    def measured(self, batch: int) -> Measurement:
        """Return the measurement of a feasible batch."""
        measured = self.feasible[batch].measurement
        assert measured is not None
        return measured

    def seconds_a_sample(self, top: int) -> Seconds | None:
        """Return the time each further sample takes, by the slope below ``top``.

        ``None`` with only one batch measured.
        """
        smaller = [batch for batch in self.feasible if batch <= FAR_ENOUGH * top]
        if not smaller:
            return None
        low, high = self.micro_step(max(smaller)), self.micro_step(top)
        more = top - max(smaller)
        return Seconds((high.value - low.value) / more, math.hypot(high.half_width, low.half_width) / more)

    def gpu_bound(self, *, at_any_batch: bool = False) -> float | None:
        """Return the most samples a second that this arm can reach; ``None`` where no GPU time was measured.

        It follows from the GPU time of a sample, and from the slope where two batches were measured. A sample takes no
        less GPU time in a smaller batch, so only batches above the largest measured one can be faster; the bound allows
        for that where such a batch is open. ``at_any_batch`` always allows for it: arms that need less memory may reach
        larger batches.
        """
        bounds = []
        for batch, tried in self.feasible.items():
            share = self.history.busy_share(tried.candidate)
            if share is not None:
                bounds.append((batch, speed_of(tried) / share))
        if not bounds:
            return None
        largest, bound = max(bounds)
        larger = [batch for batch in self.judge.batches_in_reach() if batch > largest]
        if at_any_batch or any(batch in self.pending or self.open(batch) for batch in larger):
            bound *= _LARGER_BATCH_GAIN
        cost = self.seconds_a_sample(max(self.feasible))
        by_slope = cost.value - cost.half_width if cost is not None else 0.0
        return min(bound, 1 / by_slope) if by_slope > 0 else bound


class Speeds:
    """Compares arms by the speed of the trials so far."""

    def __init__(self, space: Space, history: History) -> None:
        self._space, self._history = space, history
        self._judge = Judge(space, history)
        self._twins: dict[Arm, frozenset[Arm]] = {}

    def view(self, arm: Arm) -> ArmView:
        """Return the trials of an arm."""
        return ArmView(self._space, arm, self._history)

    def best(self) -> float:
        """Return the most samples a second so far, among candidates of the space."""
        believed = self._history.believed()
        return max((speed_of(t) for t in believed if self._space.contains(t.candidate)), default=0.0)

    def is_hopeless(self, view: ArmView, peak: int) -> bool:
        """Return whether an arm is so far behind that its smaller batches are not worth a trial."""
        return speed_of(view.feasible[peak]) < _HOPELESS * self.best()

    def is_beaten(self, view: ArmView, batch: int) -> bool:
        """Return whether an arm that is never slower was measured at this batch or a larger one.

        Such as the same arm without checkpointing, or in the faster of two precisions. A trial that retried allocations
        shows nothing: at its cap, the allocator freed and allocated segments in each step, which an arm with less
        memory is spared.
        """
        if view.arm not in self._twins:
            self._twins[view.arm] = never_slower(view.arm, allows=lambda other: other in self._space.arms)
        faster = self._twins[view.arm]
        return any(
            t.candidate.arm in faster and batch_of(t) >= batch and not _retried(t) for t in self._history.believed()
        )

    def _faster_precision(self, arm: Arm) -> Arm | None:
        """Return the same arm in a precision that is never slower; ``None`` where there is none in the space."""
        faster = dataclasses.replace(arm, precision=faster_precision(arm))
        return faster if faster != arm and faster in self._space.arms else None

    def can_gain(self, view: ArmView) -> bool:
        """Return whether a batch above the arm's largest can beat all others by more than the tolerance."""
        top, peak = max(view.feasible), view.fastest()
        wanted = max(speed_of(view.feasible[peak]), self.best()) * (1 + self._history.tolerance)
        cost = view.seconds_a_sample(top)
        if cost is not None:
            # The lower end of the interval of the cost.
            return wanted * (cost.value - cost.half_width) < 1
        bound = view.gpu_bound()
        return bound > wanted if bound is not None else not self.is_hopeless(view, peak)

    def left_out(self, arm: Arm) -> str | None:
        """Return why an arm has no chance, given similar arms that were measured; ``None`` where it has one."""
        faster = self._faster_precision(arm)
        # Where the faster precision failed at some batch, this arm may still run at it.
        is_known = faster is not None and not self.view(faster).failed
        if faster is not None and is_known and (self._history.feasible(faster) or self.left_out(faster)):
            return f"{arm.precision} is never faster than {faster.precision} and needs as much memory"
        if arm.precision == "tf32" and self._tf32_is_behind(arm):
            return f"tf32 takes at least {_TF32_TIMES} times the GPU time measured in bf16: too slow to reach the best"
        if arm.expandable_segments and self._expanding_cannot_help(arm):
            return "expandable segments only help the fastest arm, and only where memory limits its batch"
        if arm.gradient_checkpointing and (why := self._why_checkpointing_loses(arm)):
            return why
        return self._predicted_too_slow(arm)

    def _predictions_held(self) -> bool:
        """Return whether step times were predicted rightly for all that was measured on this machine."""
        steps = self._history.steps
        measured = ((t.candidate, speed_of(t)) for t in self._history.tried if t.measurement is not None)
        return steps is not None and steps.has_held(measured)

    def _predicted_too_slow(self, arm: Arm) -> str | None:
        """Return why no batch of an arm can reach the best, by predictions that held so far."""
        steps, best = self._history.steps, self.best()
        if steps is None or not best or not self._predictions_held():
            return None
        view = self.view(arm)
        open_batches = [batch for batch in self._judge.batches_in_reach() if view.open(batch)]
        most = steps.most(self._space.candidate(arm, batch) for batch in open_batches) if open_batches else None
        if most is None or most >= best * (1 + self._history.tolerance):
            return None
        return (
            f"predicted to reach {format_rate(most)} samples/s at most, and {format_rate(best)} were measured; "
            "all that was measured so far was in its predicted interval"
        )

    def is_predicted_slower(self, view: ArmView, batch: int, than: int) -> bool:
        """Return whether predictions that held so far say that a batch is slower than another one of its arm."""
        steps = self._history.steps
        if steps is None or not self._predictions_held():
            return False
        return steps.is_surely_slower(self._space.candidate(view.arm, batch), self._space.candidate(view.arm, than))

    def in_order(self, ladder: Sequence[int]) -> list[Arm]:
        """Return the arms of the space, those with predicted speeds by the fastest batch that is likely to fit.

        Without predictions, the speeds on other machines of this kind are used. Arms without either keep their places.
        A precision that is never faster than another one comes after it, also where only the other one's predictions
        were corrected by a slow trial.
        """
        expected = {arm: speed for arm in self._space.arms if (speed := self._expected(arm, ladder)) is not None}

        def place(arm: Arm) -> tuple[float, int]:
            speed, steps, faster = expected[arm], 0, self._faster_precision(arm)
            while faster is not None and faster in expected:
                speed, steps, faster = min(speed, expected[faster]), steps + 1, self._faster_precision(faster)
            return -speed, steps

        by_speed = iter(sorted(expected, key=place))
        return [next(by_speed) if arm in expected else arm for arm in self._space.arms]

    def _expected(self, arm: Arm, ladder: Sequence[int]) -> float | None:
        steps, memory, elsewhere = self._history.steps, self._history.memory, self._history.elsewhere
        candidates = [self._space.candidate(arm, batch) for batch in ladder]
        if steps is None or memory is None:
            return max((elsewhere[candidate] for candidate in candidates if candidate in elsewhere), default=None)
        speeds = [steps.samples_per_second(c) for c in candidates if memory.likely_fits(c)]
        return max((speed for speed in speeds if speed is not None), default=None)

    def _tf32_is_behind(self, arm: Arm) -> bool:
        """Return whether tf32 is slower than the best even without any waiting, by the GPU time measured in bf16.

        Checkpointing takes more GPU time still, so bf16 without it bounds tf32 with it as well.
        """
        twin = dataclasses.replace(arm, precision="bf16")
        plain = changed(twin, gradient_checkpointing=False)
        bounds = [self.view(twin).gpu_bound()]
        if twin != plain and (bound := self.view(plain).gpu_bound(at_any_batch=True)) is not None:
            bounds.append(bound / _RECOMPUTING_TIMES)
        finite = [bound for bound in bounds if bound is not None]
        return bool(finite) and min(finite) / _TF32_TIMES < self.best() * (1 + self._history.tolerance)

    def _is_beaten_throughout(self, arm: Arm) -> bool:
        """Return whether at every batch that may fit, an arm that is never slower was measured there or above."""
        view = self.view(arm)
        still_open = [batch for batch in self._judge.batches_in_reach() if view.open(batch)]
        return bool(still_open) and all(self.is_beaten(view, batch) for batch in still_open)

    def _why_checkpointing_loses(self, arm: Arm) -> str | None:
        """Return why the larger batches that checkpointing allows cannot make up for recomputing activations."""
        twin = self.view(changed(arm, gradient_checkpointing=False))
        if not twin.feasible:
            return None
        share = speed_of(twin.feasible[twin.fastest()]) / self.best()
        bound = twin.gpu_bound(at_any_batch=True)
        if bound is None:
            # On a CPU no GPU time is known. An arm so far behind is not followed to larger batches either.
            peak = twin.fastest()
            hopeless = self.is_hopeless(twin, peak) and not _retried(twin.feasible[peak])
            return f"without checkpointing it only reached {share:.0%} of the best" if hopeless else None
        if bound / _RECOMPUTING_TIMES >= self.best() * (1 + self._history.tolerance):
            return None
        return f"without checkpointing it reached {share:.0%} of the best, and larger batches gain less than that costs"

    def _expanding_cannot_help(self, arm: Arm) -> bool:
        """Return whether the default allocator's trials show that expandable segments cannot help this arm.

        They are never faster at the same batch, unless the default allocator retried allocations there. So only the
        best arm can win by them, and only where memory kept it from a larger batch.
        """
        plain = dataclasses.replace(arm, expandable_segments=False)
        tried = self._history.tried
        fastest = self._history.fastest(t.candidate for t in tried if self._space.contains(t.candidate))
        if plain not in self._space.arms or fastest is None:
            return False
        twin = self.view(plain)
        if any(map(_retried, twin.feasible.values())):
            bound = twin.gpu_bound()
            return bound is not None and bound < self.best() * (1 + self._history.tolerance)
        if fastest.candidate.arm not in (plain, arm):
            return True
        return bool(twin.feasible) and not self.can_gain(twin)

    def left_out_arms(self) -> tuple[LeftOut, ...]:
        """Return the arms without a trial, grouped by the reason."""
        untried = self._arms_without_trial()
        others, named = list(self._space.arms), []
        # What cannot fit first: the other reasons are then given for what is left.
        for why, arms in sorted(untried.items(), key=lambda item: item[0] != _NOTHING_FITS):
            named.append(LeftOut(names_of_arms(arms, others, self._space.arms), why))
            others = [arm for arm in others if arm not in arms]
        return tuple(named)

    def _arms_without_trial(self) -> dict[str, list[Arm]]:
        by_reason: dict[str, list[Arm]] = {}
        for arm in self._space.arms:
            view, in_reach = self.view(arm), self._judge.batches_in_reach()
            if any(self._judge.offloads_needlessly(self._space.candidate(arm, batch)) for batch in in_reach[:1]):
                continue
            has_a_trial = any(view.was_chosen(tried) for tried in view.tried.values())
            # The arm may have no batch but the baseline's.
            if not has_a_trial and not (in_reach and view.tried.keys() >= set(in_reach)):
                by_reason.setdefault(self._why_untried(view), []).append(arm)
        return by_reason

    def _why_untried(self, view: ArmView) -> str:
        why = self.left_out(view.arm)
        if why is not None:
            return why
        in_reach = self._judge.batches_in_reach()
        if in_reach and not any(view.open(batch) for batch in in_reach):
            return _NOTHING_FITS
        if view.arm.gradient_checkpointing and self._is_beaten_throughout(view.arm):
            return "every batch that fits was measured without checkpointing, which is never slower"
        return "no candidate of it was expected to be faster"
