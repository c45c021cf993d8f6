"""Decide how many steps and seconds a trial measures, and after how many seconds it is stopped."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from autotune.core.candidate import Candidate
from autotune.core.device import DeviceKind
from autotune.core.outcome import Effort
from autotune.core.statistics import CONFIDENCE
from autotune.estimate.history import History
from autotune.estimate.pooling import Tried
from autotune.space.arms import compiles
from autotune.space.space import patience
from autotune.store.records import Stage
from autotune.tuning.request import SearchRequest

# Target half-width of the baseline: a speed-up need not be exact, and the defaults are often the slowest trial.
_BASELINE_SPREAD = 0.03
# A trial ends early where its candidate has less than this share of the best speed. Where equal processes differ more,
# the share is smaller.
_BEHIND = 0.85
# With ``non_blocking``, steps that are timed one by one wait for the GPU, and take up to 1.65 times as long as untimed
# ones (GPT-2 on texts, H200). A choice.
_TIMED_STEP_FACTOR = 1.7
# Final trials may take this many times longer where the machine is noisy; where it is quiet, a few steps are enough.
# Four steps of an LLM on a busy host were 5 % off the mean of a hundred.
_FINAL_TIMES = 3
# A final trial whose step would take longer than this does not run every micro-step; the time of the others is added.
_LONGEST_FINAL_STEP_SECONDS = 6.0
# Compiling took 32 to 63 s a trial on an H200, and several times as long on a busy machine.
_COMPILE_SECONDS = 180.0
# Starting a process, building a model and its Trainer: seconds, and on a busy machine minutes.
_USUAL_SECONDS = 180.0
# A candidate of unknown speed gets no longer than this: one that hangs holds the search up for so long.
_MOST_SECONDS = 3600.0
# Reading weights from a slow disk or network: 100 MB/s in 16 bits. Random weights take less.
_BUILT_PARAMETERS_PER_SECOND = 50e6
# Operations a second that the slowest GPU or CPU computes in float32, in any step that is worth waiting for.
_LEAST_RATE: Mapping[DeviceKind, float] = {"cuda": 4e12, "cpu": 2e10}
# Patches or frames a sample of a model that reads no text.
_LEAST_TOKENS = 256
# Factor by which a trial's steps may exceed their expected time: machines slow down, and new shapes compile kernels.
_TIMEOUT_TIMES = 4.0

# A GPU that reaches its power limit slows down within a second of work. Qwen2.5-0.5B compiled and in CUDA graphs ran at
# 225 samples/s in the 0.2 s of a trial, and at 210 to 218 from 1.5 s on, at 680 to 710 W of 700 (H200, 24 November
# 2026).
_SUSTAINED_SECONDS, _SUSTAINED_STEPS = 1.5, 150
# A slow step that comes at least once in this many is among them. A choice.
_FINAL_STEPS = 20


def effort_of(
    request: SearchRequest, candidate: Candidate, stage: Stage, best: Tried | None, history: History
) -> Effort:
    """Return how long a candidate's trial measures; a search trial ends early where it is far slower than ``best``."""
    effort = patience(request.effort, candidate.arm)
    if stage == "final" or candidate.arm.torch_compile:
        # A candidate that compiles is measured as in a final trial at once: a second trial would compile again.
        is_gpu = request.device.kind == "cuda"
        effort = replace(
            effort,
            min_steps=max(effort.min_steps, _FINAL_STEPS),
            max_steps=max(_FINAL_TIMES * effort.max_steps, _SUSTAINED_STEPS if is_gpu else 0),
            min_seconds=_SUSTAINED_SECONDS if is_gpu else 0.0,
            max_seconds=_FINAL_TIMES * effort.max_seconds,
            max_micro_steps=_final_micro_steps(candidate, effort, history),
        )
        return _with_profiled_step(effort, request, candidate, history)
    if request.objective == "max-batch":
        return effort
    if stage == "baseline":
        # The defaults are only what speed-ups are relative to, so that a step less is exact enough for them. A script's
        # own settings are also where its search begins.
        effort = replace(effort, min_steps=effort.min_steps - 1, target_spread=_BASELINE_SPREAD)
        return effort if request.workload.source is None else _with_profiled_step(effort, request, candidate, history)
    effort = _with_profiled_step(effort, request, candidate, history)
    if best is None or best.measurement is None:
        return effort
    speed = history.speed(best.candidate)
    # Half of the confidence interval of the best's speed in another process, as a logarithm.
    half_width = speed.next_process.half_width(CONFIDENCE) if speed is not None else 0.0
    share = min(_BEHIND, math.exp(-half_width))
    step_seconds = candidate.samples_per_step / (share * best.measurement.samples_per_second)
    if candidate.arm.non_blocking:
        step_seconds *= _TIMED_STEP_FACTOR
    return replace(effort, behind_step_seconds=step_seconds)


def _with_profiled_step(effort: Effort, request: SearchRequest, candidate: Candidate, history: History) -> Effort:
    """Return the effort with one step more, under torch's profiler, that measures the share of time the GPU is busy.

    The rules of the search and the report need the share. A smaller batch than a measured one of the arm goes without:
    it keeps the GPU no busier, and is seldom the winner.
    """
    if request.device.kind != "cuda":
        return effort
    for tried in history.believed():
        other = tried.candidate
        is_larger = other.per_device_train_batch_size >= candidate.per_device_train_batch_size
        if other.arm == candidate.arm and is_larger and history.pool.busy_share(other) is not None:
            return effort
    return replace(effort, busy_steps=1)


def _final_micro_steps(candidate: Candidate, effort: Effort, history: History) -> int:
    """Return how many micro-steps of a step a final trial runs: as many as take ``_LONGEST_FINAL_STEP_SECONDS``.

    The candidate's speed so far tells how long they take; where it is unknown, all are run.
    """
    speed = history.speed(candidate)
    every = candidate.gradient_accumulation_steps
    if speed is None:
        return every
    micro_step_seconds = candidate.per_device_train_batch_size / speed.samples_per_second
    return max(effort.max_micro_steps, min(every, int(_LONGEST_FINAL_STEP_SECONDS / micro_step_seconds)))


def timeout_seconds(
    request: SearchRequest, parameters: int, candidate: Candidate, effort: Effort, history: History
) -> float:
    """Return the trial's timeout in seconds: a limit for the time before its steps, plus generous times for the steps.

    The limit is the user's, else it grows with the model, which has so many ``parameters``. The steps' times follow
    from the candidate's speed so far, else from what a step computes. Where no speed is known, a limit of the user's
    alone is the timeout.
    """
    limit = _USUAL_SECONDS if request.trial_timeout_seconds is None else request.trial_timeout_seconds
    if request.trial_timeout_seconds is None:
        source = request.workload.source
        compiles_itself = source is not None and source.interface.compiles
        limit += _COMPILE_SECONDS if compiles(candidate.arm) or compiles_itself else 0.0
        limit += parameters / _BUILT_PARAMETERS_PER_SECOND
    micro_steps = min(candidate.gradient_accumulation_steps, effort.max_micro_steps)
    samples = micro_steps * candidate.per_device_train_batch_size
    speed = history.speed(candidate)
    if speed is not None:
        step_seconds = _TIMEOUT_TIMES * samples / speed.samples_per_second
    elif request.trial_timeout_seconds is None:
        # Forward and backward pass take six operations a parameter and token, eight where activations are recomputed.
        operations = 8.0 * parameters * max(request.workload.seq_len, _LEAST_TOKENS) * samples
        step_seconds = operations / _LEAST_RATE[request.device.kind]
    else:
        return limit
    # At least two steps are measured, however long they take.
    most_steps = min(effort.max_steps, 2 + _TIMEOUT_TIMES * effort.max_seconds / step_seconds)
    limit += (effort.warmup_steps + effort.busy_steps + most_steps) * step_seconds
    return min(limit, _MOST_SECONDS) if speed is None else limit
