"""How fast what was not tried can be, from what was: step times per arm, bounds, and why an arm is left out.

Bounds rather than guesses decide what is not tried:

- recomputing activations costs time at the same batch, so checkpointing is never faster there;
- fp32 does on slower units what tf32 does, and fp16 is bf16 with loss scaling on top;
- tensor cores multiply bf16 at twice the rate of tf32 (NVIDIA's data sheets), on half the bytes: once bf16 fills the
  GPU, tf32 is slower. On five recorded landscapes it had 0.4 to 0.86 times the speed at the same batch;
- a step's time is affine in the batch above a floor, so that the slope between two batches of an arm tells the
  most samples a second that any larger one can reach.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.history import LAUNCH_BOUND_SECONDS, NOISE, History, Tried
from autotune.space import Space
from autotune.trial import TRANSIENT, Arm, Failed

# An arm whose best trial is this far behind is not followed to smaller batches, which do not get
# faster: on recorded landscapes halving a batch gained at most 3 %.
_HOPELESS = 0.75
# An arm this far behind is not asked for larger batches at the price of recomputation: on recorded
# landscapes they gained at most 33 % once a micro-step took 60 ms, and recomputing cost 17 % or more.
_FAR_BEHIND = 0.7
FAR_ENOUGH = 0.75
"""Two batches nearer to each other than this tell more of the noise than of the slope between them."""

_NEVER_SLOWER = {"fp32": "tf32", "fp16": "bf16"}


@dataclass(frozen=True)
class Seconds:
    """A step time with the half-width of its 95 % interval, both in seconds."""

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
        self.failed = {batch: t.outcome for batch, t in self.tried.items() if isinstance(t.outcome, Failed)}
        # One fault says little of the arm; one that came again when it was run again, or at two batches, does.
        self.broken = len(self.failed) > 1 or any(found.reason in TRANSIENT for found in self.failed.values())

    def _counts(self, tried: Tried) -> bool:
        return tried.candidate.arm == self.arm and self.space.contains(tried.candidate)

    def open(self, batch: int) -> bool:
        """Whether the batch was neither tried nor ruled out."""
        return batch not in self.tried and not self.history.is_ruled_out(self.space.candidate(self.arm, batch))

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
        """One of the micro-steps of a feasible batch."""
        measured = self.feasible[batch].measurement
        assert measured is not None
        seconds = measured.step_seconds / self.space.batches.accumulation(batch)
        return Seconds(seconds, seconds * measured.relative_spread)

    def seconds_a_sample(self, peak: int) -> Seconds | None:
        """What each sample more costs, by the slope up to ``peak``; ``None`` while one batch alone is known."""
        smaller = [batch for batch in self.feasible if batch <= FAR_ENOUGH * peak]
        if not smaller:
            return None
        low, high = self.micro_step(max(smaller)), self.micro_step(peak)
        more = peak - max(smaller)
        return Seconds((high.value - low.value) / more, (high.half_width**2 + low.half_width**2) ** 0.5 / more)


class Speeds:
    """What the trials so far say of the speed of the rest."""

    def __init__(self, space: Space, history: History) -> None:
        self._space, self._history = space, history

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
        """Whether the same arm without recomputation or expanding, never slower, measured the batch or a larger one."""
        twins = [
            dataclasses.replace(view.arm, gradient_checkpointing=False),
            dataclasses.replace(view.arm, expandable_segments=False),
        ]
        faster = [twin for twin in twins if twin != view.arm]
        return any(t.candidate.arm in faster and batch_of(t) >= batch for t in self._history.believed())

    def can_gain(self, view: ArmView, peak: int) -> bool:
        """Whether a batch above the arm's best can beat that by more than the tolerance and come near the best."""
        if max(view.feasible) > peak:
            return False
        cost = view.seconds_a_sample(peak)
        if cost is None:
            return view.micro_step(peak).value < LAUNCH_BOUND_SECONDS or not self.is_hopeless(view, peak)
        wanted = max(speed_of(view.feasible[peak]) * (1 + self._history.tolerance), self.best() * (1 - NOISE))
        return wanted * cost.value < 1

    def left_out(self, arm: Arm) -> str | None:
        """Why what was measured of like arms leaves this one no chance; ``None`` where it has one."""
        better = _NEVER_SLOWER.get(arm.precision)
        if better is not None:
            faster = dataclasses.replace(arm, precision=better)  # type: ignore[arg-type]
            if faster in self._space.arms and (self._history.feasible(faster) or self._is_out(faster)):
                return f"{arm.precision} is never faster than {better} and needs as much memory"
        if arm.precision == "tf32" and self._is_at_half_rate(arm):
            return "bf16 fills the GPU, and tf32 has half its rate on twice the bytes"
        if arm.expandable_segments and self._has_room(arm):
            return "expanding segments only helps the best arm, and only where memory limits it"
        if not arm.gradient_checkpointing:
            return None
        return self._recomputing(arm)

    def _is_at_half_rate(self, arm: Arm) -> bool:
        """Whether bf16 in this arm, or what left that out, computed rather than waited for kernels to be launched."""
        twin = dataclasses.replace(arm, precision="bf16")
        if self._fills(twin):
            return True
        plain = dataclasses.replace(twin, gradient_checkpointing=False)
        return plain != twin and self._fills(plain) and self._is_out(twin)

    def _is_out(self, arm: Arm) -> bool:
        """Whether an arm has no chance, though it was not measured."""
        return self.left_out(arm) is not None or self._is_beaten_throughout(arm)

    def _is_beaten_throughout(self, arm: Arm) -> bool:
        """Whether every batch that may fit was measured without recomputing or expanding, or a larger one was."""
        view = self.view(arm)
        still_open = [batch for batch in self._ladder() if view.open(batch)]
        return bool(still_open) and all(self.is_beaten(view, batch) for batch in still_open)

    def _ladder(self) -> list[int]:
        """The batches of the largest multiple."""
        batches = self._space.batches
        return [batch for level in batches.levels()[:1] for batch in batches.at_level(level)]

    def _fills(self, arm: Arm) -> bool:
        view = self.view(arm)
        if not any(view.was_chosen(tried) for tried in view.feasible.values()):
            return False
        return view.micro_step(view.fastest()).value >= LAUNCH_BOUND_SECONDS

    def _recomputing(self, arm: Arm) -> str | None:
        """Why larger batches that checkpointing allows cannot make up for what recomputing costs."""
        plain = dataclasses.replace(arm, gradient_checkpointing=False)
        twin = self.view(plain)
        if not self._fills(plain):
            return None
        peak = twin.fastest()
        if speed_of(twin.feasible[peak]) >= _FAR_BEHIND * self.best():
            return None
        share = speed_of(twin.feasible[peak]) / self.best()
        return f"without checkpointing it reached {share:.0%} of the best, and recomputing is slower still"

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
        return bool(twin.feasible) and not self.can_gain(twin, twin.fastest())

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
