"""How long a trial measures: a winner in full, the defaults roughly, one far behind no longer than to see that."""

from __future__ import annotations

from dataclasses import replace

from autotune.history import Tried
from autotune.loader import patience
from autotune.request import SearchRequest
from autotune.store import Stage
from autotune.trial import Candidate, Effort

# A speed-up need not be known to the per cent, and the defaults are often the slowest trial of all.
_BASELINE_SPREAD = 0.03
# A candidate slower than this fraction of the best is measured no further; noise is 2 %, at most 6 %.
_BEHIND = 0.85
# What a search promises in the end may take so many times longer to measure where the machine is noisy; where it is
# quiet, a few steps are enough as before. Four steps of an LLM on a busy host were 5 % off the mean of a hundred.
_FINAL_TIMES = 3


def effort_of(request: SearchRequest, candidate: Candidate, stage: Stage, best: Tried | None) -> Effort:
    """The effort of the next trial, with ``best`` as the one to beat."""
    effort = patience(request.effort, candidate.arm)
    if stage == "final" or candidate.arm.torch_compile:
        # What compiles is measured so at once: a second trial would compile again.
        return replace(
            effort,
            max_steps=_FINAL_TIMES * effort.max_steps,
            max_seconds=_FINAL_TIMES * effort.max_seconds,
            max_micro_steps=candidate.gradient_accumulation_steps,
        )
    if request.objective == "max-batch":
        return effort
    if stage == "baseline":
        return replace(effort, min_steps=effort.min_steps - 1, target_spread=_BASELINE_SPREAD)
    if best is None or best.measurement is None:
        return effort
    behind = candidate.samples_per_step / (_BEHIND * best.measurement.samples_per_second)
    return replace(effort, behind_step_seconds=behind)
