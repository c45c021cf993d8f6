"""Say how likely a candidate runs and fits: one probability, from predictions, measured peaks and failures."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from itertools import chain, combinations
from statistics import fmean

from autotune.core.candidate import Arm, Candidate
from autotune.core.outcome import Failed
from autotune.estimate.history import History, Tried, batch_of, failed_without_verdict
from autotune.estimate.speed_model import normal_cdf
from autotune.space.arms import levers_of, memory_class, needs_at_least, without
from autotune.space.levers import HALF, PRIORS

_COMPILED_FAILS, _LEVER_FAILS, _ARM_FAILS, _CANDIDATE_FAILS, _LIMITED = 0.1, 0.02, 0.1, 0.03, 0.05
"""Prior probability that one of these fails: a lever that compiles or captures, another lever, an arm, a single
candidate, all batches from some size on. Choices."""
_COMPILED_KEEPS = 0.7
"""Share of its activations that a compiled model keeps at least: 0.7 to 1.0 (Qwen2.5-0.5B and Llama-3.1-8B with LoRA,
H200, 23 November 2026)."""
_EXPANDED, _EXPANDED_DOUBT = 0.02, 0.012
"""What is reserved beyond what is allocated where segments expand, and its deviation: 0.003 to 0.045 (H200)."""
_RIGHT, _DISTRUSTED = 0.02, 0.2
"""Deviation of the logarithm of a measured peak from its prediction: where no peak disagreed, and where one did or a
trial ran out of memory unexpectedly."""
_RANKS = 0.008
"""The same of several ranks under DDP and FSDP (62 peaks of four models, two H200, studies/peak_memory.py)."""
_UNTRACED = 0.1
"""The same of code that a trace does not show, as compiled layers are: it keeps 0.7 to 1.0 of activations (H200)."""
LEAST_CHANCE = 0.03
"""As long as others are left, a candidate waits that is less likely to run, or to fit where nothing fitted yet. An arm
whose batch was halved after each of three failures is below it: they reach batches that are small enough for a kernel.
A choice."""
_UNCHECKED_RIGHT = 1 - LEAST_CHANCE
"""How likely predictions are right before a trial checked one: so likely that a candidate far over the line waits."""
_SMALL_SHARES = 0.6
"""Where one batch was measured: less than x of its peak grows with the batch with probability x to this power. A
choice."""
_ANYWHERE = 0.02
"""Weight of the case that a peak grows in no such way. A choice."""
_USUAL_BATCH, _BELOW_OVER = 64.0, 0.3
"""The batch that fits with probability 1/2: where nothing is known, and as a share of one that did not fit. Choices."""


@dataclass(frozen=True)
class _Peaks:
    """How the peak memory of a memory class (arms that need the same memory) grows with the batch.

    The peak is ``measured peak × (1 + share × (batch / measured_batch - 1))``.
    """

    room: float
    """By which share of the measured peak the line is above it."""
    measured_batch: float
    """The batch of that peak; of another class's, the batch whose activations are about as large here."""
    share: float | None = None
    """The share of that peak that grows with the batch; ``None`` unless two batches of the class were measured."""

    @classmethod
    def of(cls, history: History, candidate: Candidate) -> _Peaks | None:
        """Return how the peak of a candidate's memory class grows; ``None`` where no trial has a peak."""
        own, batch = memory_class(candidate.arm), candidate.per_device_train_batch_size
        line_bytes, measured = history.ceiling.line_bytes, [t for t in history.tried if t.measurement]
        own_peaks = {
            batch_of(t): _peak_bytes(t)
            for t in measured
            if memory_class(t.candidate.arm) == own and t.candidate.accumulates == candidate.accumulates
        }
        # Two batches that hardly differ do not show how the peak grows.
        if smaller := [b for b in own_peaks if b <= 0.75 * max(own_peaks)]:
            top = max(own_peaks)
            share = (1 - own_peaks[max(smaller)] / own_peaks[top]) / (1 - max(smaller) / top)
            return cls(line_bytes / own_peaks[top] - 1, top, min(1.0, max(0.0, share)))
        peaks = {_activations(t.candidate) / _activations(candidate) * batch: _peak_bytes(t) for t in measured}
        nearest = min(peaks, key=lambda at: abs(math.log2(at / batch)), default=None)
        return None if nearest is None else cls(line_bytes / peaks[nearest] - 1, nearest)

    def fits(self, batch: int) -> float:
        """Return the probability that the peak at a batch is under the line."""
        growth = batch / self.measured_batch - 1
        if self.share is not None:
            doubt = 0.005 + 0.016 * abs(math.log2(batch / self.measured_batch))
            return normal_cdf((math.log1p(self.room) - math.log(max(1e-3, 1 + self.share * growth))) / doubt)
        if growth * self.room <= 0:
            return float(self.room >= growth)
        is_less = math.pow(min(1.0, self.room / growth), _SMALL_SHARES)
        return is_less if growth > 0 else 1 - is_less


def _peak_bytes(tried: Tried) -> int:
    """Return the peak of a completed trial that is compared with the memory line."""
    assert tried.measurement is not None
    return tried.measurement.judged_bytes(tried.candidate.arm)


def _doubt(arm: Arm) -> float:
    """Return the deviation of the logarithm of a peak of this arm from its prediction, where no peak disagreed."""
    if arm.ranks > 1 and arm.zero_stage is None:
        return _RANKS
    return _RIGHT * (1.5 if arm.gradient_checkpointing else 1.0)


def _activations(candidate: Candidate) -> float:
    """Return a rough size of a micro-batch's activations, relative to a sample's in 16 bits."""
    arm = candidate.arm
    a_sample = (1.0 if arm.precision in HALF else 1.6) * (0.3 if arm.gradient_checkpointing else 1.0)
    return candidate.per_device_train_batch_size * a_sample


class Chances:
    """Probabilities that candidates (arms with a batch) run and fit, given the trials and the predicted peaks."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._line = math.log(history.ceiling.line_bytes)
        self._fits: dict[tuple[Arm, bool, int], float] = {}
        self._ratios = [
            (memory_class(t.candidate.arm), math.log(t.measurement.judged_bytes(t.candidate.arm) / p))
            for t in history.tried
            if t.measurement and (p := self._predicted_bytes(t.candidate))
        ]
        """Memory class of each measured trial, with the logarithm of its measured over its predicted peak."""
        self._proven = {n for t in history.tried if t.measurement for n in _may_break(t.candidate.arm)}
        self._broken_levers = self._weigh_broken_levers()
        self._failures: dict[Arm, list[int]] = {}
        self._completed: dict[Arm, list[int]] = {}
        for tried in history.tried:
            batch = tried.candidate.per_device_train_batch_size
            if failed_without_verdict(tried):
                self._failures.setdefault(tried.candidate.arm, []).append(batch)
            elif tried.measurement:
                self._completed.setdefault(tried.candidate.arm, []).append(batch)
        self._limits = self._weigh_limits()

    def chance(self, candidate: Candidate) -> float:
        """Return the probability that a candidate runs without an error and stays under the memory line."""
        return self.fits(candidate) * self.runs(candidate)

    # Memory

    def rules_out(self, candidate: Candidate) -> bool:
        """Return whether a trial shows that a candidate does not fit, or a prediction that it hardly does.

        Predictions that a trial contradicted rule nothing out, nor do measured peaks of other batches alone.
        """
        memory = self._history.memory
        if self._history.ruled_out_by(candidate) is not None:
            return True
        if memory is None or self._predicted_bytes(candidate) is None:
            return False
        return (not memory.is_checked or memory.trusted(candidate.arm)) and self.fits(candidate) <= LEAST_CHANCE

    def fits(self, candidate: Candidate) -> float:
        """Return the probability that a candidate's peak memory stays under the line."""
        key = memory_class(candidate.arm), candidate.accumulates, candidate.per_device_train_batch_size
        if key not in self._fits:
            if self._ran_out_alike(candidate):
                self._fits[key] = 0.0
            elif (allocated := self._allocated_bytes(candidate)) is not None:
                self._fits[key] = normal_cdf((self._line - math.log(allocated) - _EXPANDED) / _EXPANDED_DOUBT)
            elif (predicted := self._predicted_bytes(candidate)) is not None:
                self._fits[key] = self._by_prediction(candidate, math.log(predicted))
            else:
                self._fits[key] = self._by_peaks(candidate)
            self._fits[key] *= self._by_checkpointed_layers(candidate)
        return self._fits[key]

    def _ran_out_alike(self, candidate: Candidate) -> bool:
        """Return whether an arm that needs no more memory was over the line, at this batch or a smaller one.

        Passing no mask saves next to nothing, and how an arm compiles changes little: arms that differ in these alone
        count as the same.
        """
        own = memory_class(without(candidate.arm, _ALIKE))
        return any(
            batch_of(t) <= candidate.per_device_train_batch_size
            and t.candidate.accumulates <= candidate.accumulates
            and needs_at_least(own, memory_class(without(t.candidate.arm, _ALIKE)))
            for t in self._history.tried
            if self._history.is_over(t)
        )

    def _allocated_bytes(self, candidate: Candidate) -> int | None:
        """Return the peak of allocated bytes measured without expandable segments, for an arm that has them.

        ``None`` where it was not measured, and for other arms.
        """
        if not candidate.arm.expandable_segments:
            return None
        plain = replace(candidate, arm=without(candidate.arm, ["expandable_segments"]))
        measured = [t.measurement.peak_allocated_bytes for t in self._history.outcomes_of(plain) if t.measurement]
        return max(measured, default=None)

    def _by_checkpointed_layers(self, candidate: Candidate) -> float:
        """Return a factor on the probability to fit, from trials that checkpoint other numbers of layers.

        It grows linearly from 0 at the largest number that was over the line to 1 at the smallest that fitted.
        Without a trial over the line it is 1.
        """
        layers, own = self._history.layers, candidate.arm.checkpointed_layers
        if own is None:
            return 1.0
        tried = [
            t
            for t in self._history.tried
            # Most trials have another batch. Comparing that first saves a copy.
            if batch_of(t) == candidate.per_device_train_batch_size
            and replace(t.candidate, arm=replace(t.candidate.arm, checkpointed_layers=own)) == candidate
        ]
        over = [t.candidate.arm.checkpointed_layers or layers for t in tried if self._history.is_over(t)]
        fits = [t.candidate.arm.checkpointed_layers or layers for t in tried if self._history.is_feasible(t)]
        if not over:
            return 1.0
        # Where no number fitted yet, that of all layers may.
        least = min(fits, default=layers)
        return min(1.0, max(0, own - max(over)) / max(1, least - max(over)))

    def _predicted_bytes(self, candidate: Candidate) -> int | None:
        """Return a candidate's predicted reserved bytes, or ``None``. Compiled steps are derived from plain ones."""
        memory = self._history.memory
        if memory is None:
            return None
        if candidate.arm.torch_compile:
            # Compiled code is not traced: it keeps no more than the same layers do otherwise.
            candidate = replace(candidate, arm=without(candidate.arm, ["torch_compile"]))
            if candidate.arm.gradient_checkpointing and not self._history.compiled_recomputes:
                kept = self._predicted_bytes(replace(candidate, arm=without(candidate.arm, ["gradient_checkpointing"])))
                recomputing = self._predicted_bytes(candidate)
                if kept is None or recomputing is None:
                    return None
                return round(recomputing + _COMPILED_KEEPS * max(0, kept - recomputing))
        predicted = memory.prediction(candidate)
        if predicted is None and (arm := without(candidate.arm, PRIORS)) != candidate.arm:
            predicted = memory.prediction(replace(candidate, arm=arm))
        return predicted.peak_reserved_bytes if predicted else None

    def _by_prediction(self, candidate: Candidate, predicted: float) -> float:
        """Return the probability to fit from a predicted peak and from the predicted peaks of trials out of memory.

        ``predicted`` is the logarithm of the predicted bytes.
        """
        memory, arm = self._history.memory, candidate.arm
        assert memory is not None
        own = [ratio for kind, ratio in self._ratios if kind == memory_class(arm)]
        alike = [ratio for kind, ratio in self._ratios if kind.torch_compile == arm.torch_compile]
        mean = fmean(own or alike or [ratio for _, ratio in self._ratios] or [0.005])
        right, width = 1.0, _doubt(arm)
        if not own and levers_of(arm, PRIORS) and self._ratios:
            # Untraced levers add a doubt of their own.
            width = _UNTRACED * (1.0 if arm.torch_compile and not alike else 0.4)
        elif not memory.is_checked:
            right = _UNCHECKED_RIGHT
        elif not memory.trusted(arm):
            right, width = 0.5, _DISTRUSTED
        ran_out = self._history.over_with_no_more(arm, accumulates=candidate.accumulates)
        rooms = [self._line - math.log(p) for t in ran_out if (p := self._predicted_bytes(t.candidate))]
        # The line is below each peak that ran out of memory: what would fit even so is no longer possible.
        least = normal_cdf((max(rooms) - mean) / width) if rooms else 0.0
        fits = max(0.0, normal_cdf((self._line - predicted - mean) / width) - least) / (1.0 - least + 1e-9)
        return right * fits + (1 - right) * self._by_peaks(candidate)

    def _by_peaks(self, candidate: Candidate) -> float:
        """Return the probability to fit from measured peaks of similar trials, and from batches that did not fit."""
        history, own, batch = self._history, memory_class(candidate.arm), candidate.per_device_train_batch_size
        fits = [
            batch_of(t)
            for t in history.believed()
            if needs_at_least(memory_class(t.candidate.arm), own) and t.candidate.accumulates >= candidate.accumulates
        ]
        fitting = max(fits, default=0)
        if batch <= fitting:
            return 0.99
        peaks = _Peaks.of(history, candidate)
        if peaks is None:
            sizes = [_activations(t.candidate) / _activations(candidate) for t in history.tried if history.is_over(t)]
            # Where nothing is known, the usual batch is as likely to fit as not, else a part of what did not fit.
            even_size = min(sizes) * _BELOW_OVER if sizes else _USUAL_BATCH / batch
            return 1 / (1 + 1 / even_size)
        over = history.smallest_over(candidate.arm, accumulates=candidate.accumulates)
        most = peaks.fits(fitting) if fitting else 1.0
        least = peaks.fits(over) if over else 0.0
        # A peak that grows in no such way reaches the line anywhere between what fits and what does not.
        anywhere = _ANYWHERE * (0.5 if over is None else (over - batch) / (over - fitting))
        return (max(0.0, peaks.fits(batch) - least) + anywhere) / (max(0.0, most - least) + _ANYWHERE)

    # Failures

    def runs(self, candidate: Candidate) -> float:
        """Return the probability that a candidate does not fail for another reason than memory.

        An arm may be broken, every batch above some size may be, or a single candidate.
        """
        arm, batch = candidate.arm, candidate.per_device_train_batch_size
        chance = self._none_is_broken(_may_break(arm))
        if not self._failures:
            return chance * (1 - _ARM_FAILS) if arm not in self._completed else chance
        total = runs = 0.0
        for limit, weight in self._limits.items():
            broken, whole = self._evidence(arm, limit)
            total += weight
            if batch < limit:
                runs += weight * (1 - _CANDIDATE_FAILS) * (whole / (broken + whole) if whole else 0.0)
        return chance * runs / total

    def failed_from(self, arm: Arm) -> float:
        """Return the smallest batch at which an arm failed for another reason than memory; infinite without one."""
        return min(self._failures.get(arm, ()), default=math.inf)

    def _evidence(self, arm: Arm, limit: float) -> tuple[float, float]:
        """Return the joint probability of an arm's trials with its being broken, and with its not being broken.

        Batches from ``limit`` on are taken to fail in any case.
        """
        failed, completed = self._failures.get(arm, []), self._completed.get(arm, [])
        if any(batch >= limit for batch in completed):
            return 0.0, 0.0
        whole = math.prod(1.0 if batch >= limit else _CANDIDATE_FAILS for batch in failed)
        return 0.0 if completed else _ARM_FAILS, (1 - _ARM_FAILS) * whole

    def _weigh_limits(self) -> dict[float, float]:
        """Return the weight of each batch from which on all may fail, given all trials. Infinity stands for none."""
        limits = {math.inf: 1 - _LIMITED} | {2 ** (quarter / 4): _LIMITED / 64 for quarter in range(64)}
        arms = {*self._failures, *self._completed}
        return {
            limit: weight * math.prod(sum(self._evidence(arm, limit)) for arm in arms)
            for limit, weight in limits.items()
        }

    def _weigh_broken_levers(self) -> dict[frozenset[str], float]:
        """Return the posterior weight of each set of broken levers, or levers broken under checkpointing.

        Only levers that never completed and failed at least once are suspected. A failure is due to a broken lever, or
        to the candidate itself.
        """
        failed = [
            unproven
            for t in self._history.tried
            if isinstance(t.outcome, Failed) and (unproven := _may_break(t.candidate.arm) - self._proven)
        ]
        failures = Counter(sorted(chain.from_iterable(failed)))
        # The rarest suspects are left out where there are many: each doubles the sets.
        suspects = [name for name, _ in failures.most_common(_MOST_SUSPECTS)]
        subsets = chain.from_iterable(combinations(suspects, count) for count in range(len(suspects) + 1))
        weights: dict[frozenset[str], float] = {}
        for broken in map(frozenset, subsets):
            priors = ((name in broken, _failure_prior(name)) for name in suspects)
            weight = math.prod(prior if is_broken else 1 - prior for is_broken, prior in priors)
            weights[broken] = weight * math.prod(1.0 if names & broken else _BY_ITSELF for names in failed)
        total = sum(weights.values())
        return {broken: weight / total for broken, weight in weights.items()}

    def _none_is_broken(self, levers: frozenset[str]) -> float:
        """Return the probability that none of some levers is broken."""
        suspected = frozenset().union(*self._broken_levers)
        chance = sum(weight for broken, weight in self._broken_levers.items() if not broken & levers)
        return chance * math.prod(1 - _failure_prior(name) for name in levers - suspected - self._proven)

    def failing(self, least: float = 0.5) -> dict[str, str]:
        """Return the levers that are probably broken, each with the error message of a trial."""
        found = dict[str, str]()
        for tried in self._history.tried:
            if isinstance(tried.outcome, Failed):
                for name in sorted(levers_of(tried.candidate.arm, PRIORS)):
                    if sum(weight for broken, weight in self._broken_levers.items() if name in broken) > least:
                        found.setdefault(name, " ".join(tried.outcome.message.split()))
        return found


_ALIKE = ("unpadded", "regional_compilation", "torch_compile_mode")
"""Levers with and without which an arm needs nearly the same memory."""
_CHECKPOINTED = " under checkpointing"
_BY_ITSELF, _MOST_SUSPECTS = 0.002, 9
"""Probability that a candidate fails though none of its levers is broken; most levers that are suspected. Choices."""


def _may_break(arm: Arm) -> frozenset[str]:
    """Return the levers of an arm. With checkpointing, levers that compile or capture are there a second time.

    Layers that recompute may not compile, and not draw the same dropout again in a CUDA graph, where other layers may.
    """
    levers = levers_of(arm, PRIORS)
    again = [name + _CHECKPOINTED for name in levers if arm.gradient_checkpointing and PRIORS[name].seconds > 0]
    return levers.union(again)


def _failure_prior(lever: str) -> float:
    """Return the prior probability that a lever fails in this model; levers that take time compile or capture."""
    return _COMPILED_FAILS if PRIORS[lever.removesuffix(_CHECKPOINTED)].seconds > 0 else _LEVER_FAILS
