"""Decide how long a trial measures, and which candidates are measured again before a search ends.

Each measurement is a new process. The winner and candidates that may be faster are measured in alternation, so that a
drift of the machine affects them alike, until the expected gain of choosing another one is below the tolerance, or each
was measured in its share of processes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from autotune.core.candidate import Candidate
from autotune.core.device import DeviceKind
from autotune.core.outcome import Effort
from autotune.core.statistics import CONFIDENCE
from autotune.estimate.history import History
from autotune.estimate.pooling import Tried
from autotune.space.dataloader import patience
from autotune.space.levers import compiles
from autotune.store.records import Stage
from autotune.tuning.request import SearchRequest

# Target half-width of the baseline: a speed-up need not be exact, and the defaults are often the slowest trial.
_BASELINE_SPREAD = 0.03
# A candidate slower than this fraction of the best is not measured further, where processes deviate by less than that.
_BEHIND = 0.85
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

_MOST_RIVALS = 2
# Processes for each of winner and rivals. The error of a mean falls with the square root of their number. A choice.
_MOST_PROCESSES = 3
# A host-bound winner is measured in at least two processes, since one does not show how much processes differ.
_HOST_BOUND_PROCESSES = 2
# From so many deviations of a kind on, the prior hardly counts: intervals hold in 93 to 97 % of simulated cases.
_ENOUGH_DEVIATIONS = 12
# Until then one more process of the winner is measured where that takes no longer than this share of the search.
_CHEAP_SHARE = 0.05
# From so many deviations on, a promise rests on this machine rather than on those where the prior was measured. A
# process that is missing for that may take a larger share of the search.
_FEW_DEVIATIONS = 2
_FEW_SHARE = 0.1
# A GPU that reaches its power limit slows down within a second of work. Qwen2.5-0.5B compiled and in CUDA graphs ran at
# 225 samples/s in the 0.2 s of a trial, and at 210 to 218 from 1.5 s on, at 680 to 710 W of 700 (H200, 24 November
# 2026).
_SUSTAINED_SECONDS, _SUSTAINED_STEPS = 1.5, 150
# As many as show a slow step that comes at least every so manyth time. A choice.
_FINAL_STEPS = 20
# Relative half-width of a winner's own mean above which it is measured once more.
_UNCERTAIN = 0.05


def effort_of(
    request: SearchRequest, candidate: Candidate, stage: Stage, best: Tried | None, history: History
) -> Effort:
    """Return the effort of the next trial, with ``best`` as the one to beat."""
    effort = patience(request.effort, candidate.arm)
    if stage == "final" or candidate.arm.torch_compile:
        # A candidate that compiles is measured so at once, since a second trial would compile again.
        sustains = request.device.kind == "cuda"
        effort = replace(
            effort,
            min_steps=max(effort.min_steps, _FINAL_STEPS),
            max_steps=max(_FINAL_TIMES * effort.max_steps, _SUSTAINED_STEPS if sustains else 0),
            min_seconds=_SUSTAINED_SECONDS if sustains else 0.0,
            max_seconds=_FINAL_TIMES * effort.max_seconds,
            max_micro_steps=_final_micro_steps(candidate, effort, history),
        )
        return _profiled(effort, request, candidate, history)
    if request.objective == "max-batch":
        return effort
    if stage == "baseline":
        effort = replace(effort, min_steps=effort.min_steps - 1, target_spread=_BASELINE_SPREAD)
        # The defaults are a yardstick alone. A script's own settings are where its search begins.
        return effort if request.workload.source is None else _profiled(effort, request, candidate, history)
    effort = _profiled(effort, request, candidate, history)
    if best is None or best.measurement is None:
        return effort
    speed = history.speed(best.candidate)
    doubt = speed.next_run.half_width(CONFIDENCE) if speed is not None else 0.0
    slower = min(_BEHIND, math.exp(-doubt))
    behind = candidate.samples_per_step / (slower * best.measurement.samples_per_second)
    return replace(effort, behind_step_seconds=behind)


def _profiled(effort: Effort, request: SearchRequest, candidate: Candidate, history: History) -> Effort:
    """Ask for the GPU's share of a step where it is not known, since rules and the report depend on it.

    Not for a smaller batch than one measured: it keeps the GPU no busier, and is seldom the winner.
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
    """Return how many micro-steps to run: all, or as many as take no longer than a final trial's step should."""
    speed = history.speed(candidate)
    whole = candidate.gradient_accumulation_steps
    if speed is None:
        return whole
    micro_seconds = candidate.per_device_train_batch_size / speed.samples_per_second
    return max(effort.max_micro_steps, min(whole, int(_LONGEST_FINAL_STEP_SECONDS / micro_seconds)))


def timeout_seconds(
    request: SearchRequest, parameters: int, candidate: Candidate, effort: Effort, history: History
) -> float:
    """Return the trial's timeout in seconds: the request's limit plus the expected time of its steps.

    Without a limit of the user's it grows with the model, and where no speed is known, with what a step computes.
    """
    limit = _USUAL_SECONDS if request.trial_timeout_seconds is None else request.trial_timeout_seconds
    if request.trial_timeout_seconds is None:
        source = request.workload.source
        compiles_itself = source is not None and source.interface.compiles
        limit += _COMPILE_SECONDS if compiles(candidate.arm) or compiles_itself else 0.0
        limit += parameters / _BUILT_PARAMETERS_PER_SECOND
    run = min(candidate.gradient_accumulation_steps, effort.max_micro_steps)
    samples = run * candidate.per_device_train_batch_size
    speed = history.speed(candidate)
    if speed is not None:
        step_seconds = _TIMEOUT_TIMES * samples / speed.samples_per_second
    elif request.trial_timeout_seconds is None:
        # Forward and backward pass take six operations a parameter and token, eight where activations are recomputed.
        operations = 8.0 * parameters * max(request.workload.seq_len, _LEAST_TOKENS) * samples
        step_seconds = operations / _LEAST_RATE[request.device.kind]
    else:
        return limit
    most = min(effort.max_steps, 2 + _TIMEOUT_TIMES * effort.max_seconds / step_seconds)
    limit += (effort.warmup_steps + effort.busy_steps + most) * step_seconds
    return min(limit, _MOST_SECONDS) if speed is None else limit


def finals(history: History, among: Iterable[Candidate], *, tells_apart: bool = True) -> list[Candidate]:
    """Return the candidates that are still to be measured again, the next one first.

    The winner alone counts unless it is to be told apart from its rivals.
    """
    among = set(among)
    winner = history.winner(among)
    if winner is None:
        return []
    rivals = _rivals(history, winner, among) if tells_apart else []
    contenders = [winner.candidate, *rivals] if rivals else []
    # Failed trials count as well, so that a failing candidate is not repeated forever.
    owed = [candidate for candidate in contenders if history.attempts(candidate) < _MOST_PROCESSES]
    if owed:
        return sorted(owed, key=history.attempts)
    return [winner.candidate] if needs_another(history, winner) else []


def _rivals(history: History, winner: Tried, among: set[Candidate]) -> list[Candidate]:
    """Return the candidates worth measuring again: choosing one may gain more than the tolerance on average.

    Compiled candidates are left out, since they would compile again.
    """
    gains = {
        tried.candidate: history.pool.expected_gain(tried.candidate, winner.candidate)
        for tried in history.believed(among)
        if tried.candidate != winner.candidate and not tried.candidate.arm.torch_compile
    }
    possible = [candidate for candidate, gain in gains.items() if gain > history.tolerance]
    return sorted(possible, key=lambda candidate: -gains[candidate])[:_MOST_RIVALS]


def shows_deviation(history: History, winner: Tried, trial_seconds: float, spent_seconds: float) -> bool:
    """Return whether one more process of the winner is cheap, and tells how processes deviate on this machine.

    That makes the promises of this search and of all later ones on the machine more certain. The first search on a
    machine measures its winner in three processes, later ones in two until enough is known.
    """
    candidate, degrees = winner.candidate, history.pool.degrees(winner.candidate)
    if candidate.arm.torch_compile:
        return False
    if degrees < _FEW_DEVIATIONS:
        return history.attempts(candidate) < _MOST_PROCESSES and trial_seconds <= _FEW_SHARE * spent_seconds
    is_new = history.attempts(candidate) < _HOST_BOUND_PROCESSES and degrees < _ENOUGH_DEVIATIONS
    return is_new and trial_seconds <= _CHEAP_SHARE * spent_seconds


def needs_another(history: History, winner: Tried) -> bool:
    """Return whether the winner has to be measured in one more process."""
    candidate = winner.candidate
    done = history.attempts(candidate)
    if candidate.arm.torch_compile or done >= _MOST_PROCESSES:
        return False
    if not winner.in_full and done < 2:
        return True
    processes = history.pool.processes(candidate) + history.pending.count(candidate)
    if history.is_host_bound(candidate) and processes < _HOST_BOUND_PROCESSES:
        return True
    measured = winner.measurement
    return measured is not None and done < 2 and measured.relative_spread > _UNCERTAIN
