"""Model the speed of every candidate: two Gaussian processes, of the GPU's and of the host's time, and their maximum.

A step takes as long as the GPU computes or as the host launches, whichever is longer. The logarithm of each is a
Gaussian process over candidates:

- its mean is the predicted step where there is one, else what precision, checkpointing, batch and levers usually do;
- its kernel adds up what candidates have in common: the machine, the precision, checkpointing, each lever, each pair of
  levers, and what small batches cost;
- a trial observes the GPU's time by the share of the step in which the GPU was busy, and the host's time where the GPU
  does not limit the step. A step that the GPU fills says only that the host takes no longer.

So a lever that shortens the host's time alone promises nothing where the GPU limits the step, and two levers that pay
only together promise it together: no rule says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from autotune.core.candidate import PRECISIONS, Arm, Candidate
from autotune.core.outcome import Measurement
from autotune.estimate.bottleneck import HOST_BOUND, USUAL_SHARE_IN_PASSING, share_in_passing
from autotune.estimate.history import History, Tried
from autotune.estimate.pooling import within_error
from autotune.estimate.step_time import StepTime
from autotune.space.arms import compiles, levers_of, without
from autotune.space.levers import BY_NAME, PRIORS
from autotune.space.space import plain_loader, waits_for_data

Floats = NDArray[np.float64]

_FULL = 0.95
"""Share of a GPU-bound step in which the GPU is busy: 0.92 and 0.89 for BERT-large, up to 0.97 (H200)."""
_HOST_SECONDS = 0.03
"""Host time of a micro-step where nothing is known: between 0.005 and 0.2 s on H200 machines. A choice."""


@dataclass(frozen=True)
class Effect:
    """What a feature of a candidate adds to the logarithm of a step's time: a normal distribution."""

    mean: float
    deviation: float


# Effects of a feature on the GPU's and on the host's time, in logs. GPU: tensor cores multiply 16 bits at 1.4 to 2.4
# times the rate of tf32, and fp32 has none; recomputing repeats a third of the operations: 1.15 to 1.4 times the time.
# The host has casts to launch in autocast, and loss scaling in fp16 (five recorded landscapes, H200).
_GPU: Mapping[str, Effect] = {
    "single": Effect(0.6, 0.15), "fp16": Effect(0.03, 0.015), "fp32": Effect(0.7, 0.35),
    "recomputing": Effect(0.25, 0.07), "small batch": Effect(0.12, 0.08),
}  # fmt: skip
_HOST: Mapping[str, Effect] = {
    "half": Effect(0.15, 0.12), "fp16": Effect(0.15, 0.1), "fp32": Effect(0.0, 0.01), "recomputing": Effect(0.25, 0.07),
}  # fmt: skip
# Effects on the whole step's time where no trial tells the GPU's share, as on a CPU: bf16 may be slower or faster than
# fp32 there, and the fixed time of each micro-step is part of the one time. Choices, and wide.
_WHOLE: Mapping[str, Effect] = {
    **_GPU, "single": Effect(0.0, 0.7), "fp32": Effect(0.0, 0.35), "small batch": Effect(0.15, 0.3),
}  # fmt: skip
# Largest deviation of an effect where predicted steps are the mean: features then only correct errors of some per cent
# that steps of one precision share (studies/corrections.py).
_PREDICTED = 0.06
_MACHINE, _MACHINE_PREDICTED = 4.0, 0.3
_HOST_MACHINE, _HOST_PREDICTED = 2.0, 0.35
"""Deviation of what all candidates share on a machine, for GPU and host, without and with predicted steps."""
_OWN = 0.004
"""Deviation of a candidate's own part, which its effects do not explain."""
_FAR_DEVIATIONS, _MOST_DOUBT = 2.0, 0.5
"""A step whose limit was not measured is host-bound where it takes longer than the GPU is expected to by so many
deviations, and else tells of the GPU's time with at most such a deviation. Choices (10,000 random worlds)."""
_PINNED = Effect(-0.07, 0.08)
"""Pinned to one core, host-bound steps were 0.98 to 1.3 times as fast (H200)."""


Amounts = Mapping[str, float]
"""How much of each named effect a candidate has: 1 for a setting."""


@dataclass
class Process:
    """A Gaussian process that is linear in the amounts of effects, given observations of some candidates.

    ``effects`` are its prior, by name. Each candidate also has a part of its own, which no effect explains.
    """

    effects: dict[str, Effect]
    points: list[Amounts] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    """Observed logarithms of times, less their prior means."""
    variances: list[float] = field(default_factory=list)

    def observe(self, at: Amounts, value: float, deviation: float) -> None:
        """Add an observation: its value less the prior mean, and the standard deviation of its noise."""
        self.points.append(at)
        self.values.append(value)
        self.variances.append(deviation**2 + _OWN**2)

    def posterior(self, among: Sequence[Amounts]) -> tuple[Floats, Floats]:
        """Return the posterior mean, less the prior mean, and the standard deviation at each of some candidates."""
        # Of some hundred effects, mostly pairs of levers, candidates have few.
        had = set().union(*self.points, *among)
        effects = {name: effect for name, effect in self.effects.items() if name in had}
        new, old = _matrix(among, effects), _matrix(self.points, effects)
        cross = old @ new.T
        solved = np.linalg.solve(old @ old.T + np.diag(self.variances), cross)
        variances = np.sum(new**2, axis=1) - np.sum(cross * solved, axis=0)
        return solved.T @ np.array(self.values), np.sqrt(np.maximum(variances, 0.0) + _OWN**2)

    def mean(self, at: Amounts) -> float:
        """Return the prior mean: the sum of a candidate's effects."""
        return math.fsum(amount * self.effects[name].mean for name, amount in at.items() if name in self.effects)


def _matrix(points: Sequence[Amounts], effects: Mapping[str, Effect]) -> Floats:
    """Return the amounts of effects in units of their deviations, with a row for each candidate."""
    rows = [[at.get(name, 0.0) * effect.deviation for name, effect in effects.items()] for at in points]
    return np.array(rows, dtype=np.float64).reshape(len(points), len(effects))


@lru_cache(maxsize=65536)
def features(candidate: Candidate) -> Amounts:
    """Return the amounts of the effects that a candidate has, by name."""
    arm = candidate.arm
    amounts: dict[str, float] = {f"{name}={getattr(arm, name)}": 1.0 for name in _FURTHER if getattr(arm, name)}
    amounts |= {"machine": 1.0, "half" if arm.precision in ("bf16", "fp16") else "single": 1.0}
    if arm.precision in ("fp16", "fp32"):
        amounts[arm.precision] = 1.0
    if "single" in amounts and compiles(arm):
        amounts["compiled single"] = 1.0
    if arm.gradient_checkpointing:
        amounts["recomputing"] = 1.0
    if arm.cpu_affinity:
        amounts["pinned"] = 1.0
    amounts["small batch"] = 8 / candidate.per_device_train_batch_size
    levers = levers_of(arm, PRIORS)
    # The prior of a lever that is part of another one holds for both together.
    levers -= {BY_NAME[name].part_of for name in levers}
    amounts |= dict.fromkeys(levers, 1.0)
    # Only levers that change operations form pairs. The others combine with every lever alike.
    changing = sorted(name for name in levers if BY_NAME[name].operations is None)
    amounts |= {f"{one} and {other}": 1.0 for one, other in combinations(changing, 2)}
    return amounts


# Fields of an arm whose values, where set, are features of their own.
_FURTHER = ("attn_implementation", "optim", "strategy", "use_liger_kernel", "experts_implementation", "sync_each_batch")
_FURTHER_EFFECT = Effect(0.0, 0.1)
_PAIR = 0.05
"""Deviation of what two levers give together from what they give alone."""
_COMPILED_SINGLE = Effect(0.12, 0.12)
"""Compiling gives less in single precision, which has no casts to fuse: 0.3 less with T5-base (H200). A choice."""


class SpeedModel:
    """Predicts the speed of every candidate, from the trials of a search and from predicted steps."""

    def __init__(self, history: History) -> None:
        self._history = history
        known = next(iter(history.steps.known()), None) if history.steps is not None else None
        self._is_predicted = known is not None
        seen = [(t, m) for t in history.tried if (m := t.measurement) is not None and not m.allocation_retries]
        is_busy_known = any(measured.gpu_busy_share is not None for _, measured in seen)
        self._is_whole = len(seen) > 1 and not is_busy_known and not self._is_predicted
        """Whether a step has one time, not a GPU's and a host's: of several trials none measured the GPU's share. One
        trial does not show that, since a trial of the defaults does not measure it."""
        shares = [share for _, measured in seen if (share := share_in_passing(measured)) is not None]
        self._gpu, self._host = self._processes(shares[-1] if shares else USUAL_SHARE_IN_PASSING)
        self._bases = self._bases_of(known) if known is not None else (0.0, math.log(_HOST_SECONDS))
        self._data_seconds = 0.0
        """Seconds per sample for which the last trial waited for data."""
        self._learn(seen)

    def _processes(self, share_in_passing: float) -> tuple[Process, Process]:
        """Return the Gaussian processes of the GPU's and the host's time, before any observation.

        ``share_in_passing`` is the share of the GPU's time in work that a compiler can fuse.
        """
        most = _PREDICTED if self._is_predicted else math.inf
        usual = _WHOLE if self._is_whole else _GPU
        gpu_effects = {name: Effect(effect.mean, min(effect.deviation, most)) for name, effect in usual.items()}
        host_effects = {name: Effect(effect.mean, min(effect.deviation, most)) for name, effect in _HOST.items()}
        if self._is_predicted:
            gpu_effects["small batch"] = replace(gpu_effects["small batch"], deviation=0.03)
        gpu, host = (_MACHINE_PREDICTED, _HOST_PREDICTED) if self._is_predicted else (_MACHINE, _HOST_MACHINE)
        gpu_effects["machine"], host_effects["machine"] = Effect(0.0, gpu), Effect(0.0, host)
        for name, prior in PRIORS.items():
            work = share_in_passing * prior.passing + (1 - share_in_passing) * prior.computing
            # Replayed graphs leave no gaps between the kernels of a GPU-bound step.
            gpu_effects[name] = _effect_of_factor(work * (_FULL if prior.host < 0.5 else 1.0))
            host_effects[name] = _effect_of_factor(prior.host)
            if BY_NAME[name].memory == "reserved":
                # How the allocator reserves memory makes nothing faster.
                gpu_effects[name] = host_effects[name] = Effect(0.005, 0.002)
        host_effects["pinned"], gpu_effects["pinned"] = _PINNED, Effect(0.0, 0.01)
        gpu_effects["compiled single"] = _COMPILED_SINGLE
        alike = {f"{one} and {other}": Effect(0.0, _PAIR) for one, other in combinations(sorted(PRIORS), 2)}
        settings = {f"{n}={v}" for t in self._history.tried for n in _FURTHER if (v := getattr(t.candidate.arm, n))}
        alike |= dict.fromkeys(settings, _FURTHER_EFFECT)
        alike |= {f"{precision} not predicted": Effect(0.0, 0.2) for precision in PRECISIONS}
        return Process(gpu_effects | alike), Process(host_effects | alike)

    def _learn(self, seen: Sequence[tuple[Tried, Measurement]]) -> None:
        """Add the completed trials to both Gaussian processes."""
        steps: list[tuple[Candidate, float, float, float | None]] = []
        for tried, measured in seen:
            # Waiting for data is none of the GPU's nor the host's time.
            waits = waits_for_data(measured)
            total = math.log(measured.step_seconds * (1 - waits) / tried.candidate.samples_per_step)
            self._data_seconds = measured.step_seconds * waits / tried.candidate.samples_per_step
            busy = 1.0 if self._is_whole else measured.gpu_busy_share
            busy = min(1.0, busy / (1 - waits)) if busy is not None else None
            steps.append((tried.candidate, total, self._noise(tried), busy))
        # Trials that say little of the host's time come last, when the others have narrowed it down.
        for candidate, total, noise, busy in sorted(steps, key=lambda step: math.inf if step[3] is None else step[3]):
            at, gpu_mean, host_mean = self._prior(candidate)
            gpu, gpu_error, host, host_error = (float(each[0]) for each in self.times([candidate]))
            doubt = 0.0
            if busy is None:
                # The less is known of the GPU's time, the less sure it is that this step took as long.
                doubt = min(_MOST_DOUBT, gpu_error / 2)
                # What takes far longer than is expected of the GPU waits for the host, and says nothing of the GPU.
                busy = 1.0 if total < gpu + _FAR_DEVIATIONS * gpu_error else 0.0
            if busy > 0:
                # A GPU-bound step is busy for ``_FULL`` of it. The less it is, the less its share tells of its time.
                share = min(1.0, busy / _FULL)
                self._gpu.observe(at, total + math.log(share) - gpu_mean, math.hypot(noise, 0.2 * (1 - share), doubt))
            if busy < HOST_BOUND:
                self._host.observe(at, total - host_mean, noise)
            elif host > total:
                # The host takes no longer than the step. This is nearly what a normal distribution is below a limit.
                self._host.observe(at, total - host_error - host_mean, host_error / 2)

    def _noise(self, tried: Tried) -> float:
        """Return the relative standard error of a candidate's measured time, at least 0.3 %."""
        speed = self._history.speed(tried.candidate)
        return max(0.003, speed.log_sample_seconds.error if speed is not None else within_error(tried))

    def _bases_of(self, step: StepTime) -> tuple[float, float]:
        """Return the logarithms of a predicted step's GPU seconds per sample and host seconds per micro-step.

        The effects of its candidate are taken out.
        """
        candidate, at = step.candidate, features(step.candidate)
        gpu = math.log(step.gpu_seconds / candidate.samples_per_step) - self._gpu.mean(at)
        return gpu, math.log(step.host_seconds / candidate.gradient_accumulation_steps) - self._host.mean(at)

    def _prior(self, candidate: Candidate) -> tuple[Amounts, float, float]:
        """Return a candidate's effects, and the prior means of the logarithms of GPU and host seconds per sample."""
        at, step = features(candidate), self._predicted(candidate)
        gpu, host = self._bases_of(step) if step is not None else self._bases
        gpu, host = gpu + self._gpu.mean(at), host + self._host.mean(at)
        host -= math.log(candidate.samples_per_step / candidate.gradient_accumulation_steps)
        if candidate.arm.checkpointed_layers is not None:
            at = {**at, "recomputing": candidate.arm.checkpointed_layers / self._history.layers}
        if self._is_predicted and step is None:
            at = {**at, f"{candidate.arm.precision} not predicted": 1.0}
        return at, gpu, host

    def _predicted(self, candidate: Candidate) -> StepTime | None:
        """Return the predicted step of the candidate without optional levers; ``None`` without a prediction."""
        if self._history.steps is None:
            return None
        plain = without(plain_loader(candidate.arm), (*PRIORS, "cpu_affinity"))
        return self._history.steps.predicted(replace(candidate, arm=plain))

    # What the model predicts

    def times(self, among: Sequence[Candidate]) -> tuple[Floats, Floats, Floats, Floats]:
        """Return mean and deviation of the logarithm of seconds per sample, of the GPU and then of the host."""
        at, gpu_means, host_means = zip(*map(self._prior, among), strict=True)
        (gpu, gpu_error), (host, host_error) = self._gpu.posterior(at), self._host.posterior(at)
        return gpu + np.array(gpu_means), gpu_error, host + np.array(host_means), host_error

    def expected(self, among: Sequence[Candidate], best: float) -> tuple[Floats, Floats]:
        """Return the expected improvement of candidates over a speed, and their expected seconds, in logarithms.

        ``best`` is in samples a second. The expected seconds of a sample are the larger of the GPU's and the host's,
        without waits for data.
        """
        gpu, gpu_error, host, host_error = self.times(among)
        limit = -math.log(best)
        # The integral over all faster times of the probability that both GPU and host take no longer.
        times = limit - 3 * np.linspace(0, 1, 80) ** 2
        step = np.log(np.maximum(np.exp(times) - self._data_seconds, 1e-300))
        both = _normal_cdf_of_each((step[None, :] - gpu[:, None]) / gpu_error[:, None])
        both *= _normal_cdf_of_each((step[None, :] - host[:, None]) / host_error[:, None])
        widths = -np.diff(times)
        gains: Floats = np.sum((both[:, :-1] + both[:, 1:]) / 2 * widths, axis=1)
        return gains, np.maximum(gpu, host)


def extra_seconds(history: History, candidate: Candidate) -> float:
    """Return the seconds that a trial takes beyond a usual trial, mostly for compilation.

    For a compiled candidate they are those of the last trial with the same compiler settings and shapes, whose code may
    be cached, else the longest with the same compiler settings. Otherwise they are the prior. BERT-large took 10.9 s to
    compile, 2.3 s at the same batch without graphs, and 9.2 s at another batch (H200, 28 November 2026).
    """
    has, compiler = levers_of(candidate.arm, PRIORS), _compiler(candidate.arm)
    if has and compiles(candidate.arm):
        measured = [(t.candidate, t.measurement.compile_seconds) for t in history.tried if t.measurement]
        took = [(one, seconds) for one, seconds in measured if seconds is not None]
        known = [(_shape(one), seconds) for one, seconds in took if _compiler(one.arm) == compiler]
        same = [seconds for shape, seconds in known if shape == _shape(candidate)]
        if known:
            return same[-1] if same else max(seconds for _, seconds in known)
    wholes = {BY_NAME[name].part_of for name in has}
    return max((PRIORS[name].seconds for name in has - wholes), default=0.0)


def _compiler(arm: Arm) -> set[str]:
    """Return the levers of an arm that belong to ``torch.compile``."""
    return {name for name in levers_of(arm, PRIORS) if "torch_compile" in (name, BY_NAME[name].part_of)}


def _shape(candidate: Candidate) -> tuple[object, ...]:
    """Return the settings on which the compiled code depends."""
    arm = candidate.arm
    return candidate.per_device_train_batch_size, candidate.accumulates, arm.precision, arm.length_multiple


def normal_cdf(z: float) -> float:
    """Return the standard normal distribution function."""
    return 0.5 * math.erfc(-z / math.sqrt(2))


def _effect_of_factor(factor: float) -> Effect:
    """Return the effect of a factor on a time. The farther the factor is from 1, the less sure it is."""
    mean = math.log(factor)
    return Effect(mean, 0.02 + 0.4 * abs(mean))


def _normal_cdf_of_each(z: Floats) -> Floats:
    """Return the standard normal distribution function (Abramowitz and Stegun 26.2.17; its error is below 1e-7).

    For many thousand values, seven times as fast as calls of ``normal_cdf``.
    """
    t = 1 / (1 + 0.2316419 * np.abs(z))
    tail = np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    tail = tail * t * (0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))))
    out: Floats = np.where(z > 0, 1 - tail, tail)
    return out
