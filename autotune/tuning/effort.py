"""Decide how long a trial measures: a winner in full, the defaults roughly, a candidate far behind only to see that."""

from __future__ import annotations

import math
from dataclasses import replace

from autotune.core.candidate import Candidate
from autotune.core.outcome import Effort
from autotune.core.statistics import CONFIDENCE
from autotune.estimate.history import History
from autotune.estimate.pooling import Tried
from autotune.space.dataloader import patience
from autotune.space.features import compiles
from autotune.store import Stage
from autotune.tuning.request import SearchRequest

# A speed-up need not be known to the per cent, and the defaults are often the slowest trial of all.
_BASELINE_SPREAD = 0.03
# A candidate slower than this fraction of the best is measured no further, where processes differ by less than that.
_BEHIND = 0.85
# What a search promises in the end may take so many times longer to measure where the machine is noisy; where it is
# quiet, a few steps are enough as before. Four steps of an LLM on a busy host were 5 % off the mean of a hundred.
_FINAL_TIMES = 3
# A step of a final that would take longer than this is not run whole: its micro-steps are added up.
_LONGEST_FINAL_STEP_SECONDS = 6.0
# Compiling took 32 to 63 s a trial on an H200, and several times as long on a busy machine.
_COMPILE_SECONDS = 300.0
# What a trial's steps may take, times what they are expected to: machines slow down, and new shapes compile kernels.
_TIMEOUT_TIMES = 4.0


def effort_of(
    request: SearchRequest, candidate: Candidate, stage: Stage, best: Tried | None, history: History
) -> Effort:
    """Return the effort of the next trial, with ``best`` as the one to beat."""
    effort = patience(request.effort, candidate.arm)
    if stage == "final" or candidate.arm.torch_compile:
        # What compiles is measured so at once: a second trial would compile again.
        effort = replace(
            effort,
            max_steps=_FINAL_TIMES * effort.max_steps,
            max_seconds=_FINAL_TIMES * effort.max_seconds,
            max_micro_steps=_final_micro_steps(candidate, effort, history),
        )
        return _profiled(effort, request, candidate, history)
    if request.objective == "max-batch":
        return effort
    if stage == "baseline":
        return replace(effort, min_steps=effort.min_steps - 1, target_spread=_BASELINE_SPREAD)
    effort = _profiled(effort, request, candidate, history)
    if best is None or best.measurement is None:
        return effort
    speed = history.speed(best.candidate)
    doubt = speed.next_run.half_width(CONFIDENCE) if speed is not None else 0.0
    slower = min(_BEHIND, math.exp(-doubt))
    behind = candidate.samples_per_step / (slower * best.measurement.samples_per_second)
    return replace(effort, behind_step_seconds=behind)


def _profiled(effort: Effort, request: SearchRequest, candidate: Candidate, history: History) -> Effort:
    """Have the GPU's share of a step measured where it is not known: rules and the report depend on it.

    A smaller batch keeps the GPU no busier than a larger one of the same arm, and is seldom the winner.
    """
    if request.device.kind != "cuda":
        return effort
    for tried in history.believed():
        other = tried.candidate
        is_larger = other.per_device_train_batch_size >= candidate.per_device_train_batch_size
        if other.arm == candidate.arm and is_larger and history.busy_share(other) is not None:
            return effort
    return replace(effort, busy_steps=1)


def _final_micro_steps(candidate: Candidate, effort: Effort, history: History) -> int:
    """Return how many micro-steps of a step to run: all, or as many as take no longer than a final's step should."""
    speed = history.speed(candidate)
    whole = candidate.gradient_accumulation_steps
    if speed is None:
        return whole
    micro_seconds = candidate.per_device_train_batch_size / speed.samples_per_second
    return max(effort.max_micro_steps, min(whole, int(_LONGEST_FINAL_STEP_SECONDS / micro_seconds)))


def timeout_seconds(request: SearchRequest, candidate: Candidate, effort: Effort, history: History) -> float:
    """Return when to give a trial up: the request's limit, and what its steps are expected to take beyond that."""
    limit = request.trial_timeout_seconds + (_COMPILE_SECONDS if compiles(candidate.arm) else 0.0)
    speed = history.speed(candidate)
    if speed is None:
        return limit
    run = min(candidate.gradient_accumulation_steps, effort.max_micro_steps)
    step_seconds = run * candidate.per_device_train_batch_size / speed.samples_per_second
    steps = effort.warmup_steps + effort.busy_steps + min(effort.max_steps, 2 + effort.max_seconds / step_seconds)
    return limit + _TIMEOUT_TIMES * steps * step_seconds
