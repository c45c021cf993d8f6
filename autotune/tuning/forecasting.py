"""Choose what to predict for a search before its trials, and how many predictions to make at once."""

from __future__ import annotations

from collections.abc import Iterable

from autotune.core.candidate import OWN_OPTIM, Arm
from autotune.core.prediction import ArmsToTrace
from autotune.core.units import GIB
from autotune.devices.host import host_memory
from autotune.estimate.memory import questions
from autotune.estimate.memory_jobs import Forecast, Kept, OwnTraces, Submitter, Target
from autotune.space.levers import is_predictable
from autotune.tuning.prepare import Prepared
from autotune.tuning.request import SearchRequest

# A prediction takes a core for a few seconds, and about 1 GiB of host memory.
_MOST_PARALLEL = 8
# Of several ranks there are 20 questions for a model with checkpointing, of 2 to 10 s of a core each (Llama-3.2-1B).
_MOST_PARALLEL_OF_RANKS = 16
_PREDICTION_BYTES = GIB
# Trials of image models that were timed beside predictions were wrong by 10 % and more, so a search waits for
# predictions there, in total no longer than this.
_PATIENCE_SECONDS = 20.0
# The same for several ranks, whose strategies make more and slower predictions, and for models that are large for the
# memory, of which most candidates do not fit. With 20 s a search of Llama-3.2-1B on two H200 tried candidates before
# they were predicted: 12 of 17 ran out of memory, and it took 96 s.
_LONG_PATIENCE_SECONDS = 60.0
# Free batches double from 8; no GPU has memory for more doublings than this.
_MOST_RUNGS = 12


def arms_to_trace(request: SearchRequest) -> ArmsToTrace:
    """Return the arms of the user's own code whose memory is to be traced."""
    choices = {"on": (True,), "off": (False,)}.get(request.gradient_checkpointing, (False, True))
    return ArmsToTrace(request.chosen_precisions, choices, tuple(name for name in request.optims if name != OWN_OPTIM))


def most_predictions(cores: int, free_bytes: int | None = None, ranks: int = 1) -> int:
    """Return how many predictions may run at once on ``cores`` cores and the host's free memory, read if not given."""
    free_bytes = host_memory().free_bytes if free_bytes is None else free_bytes
    most = _MOST_PARALLEL if ranks == 1 else _MOST_PARALLEL_OF_RANKS
    return max(1, min(most, cores, most if free_bytes is None else free_bytes // _PREDICTION_BYTES))


def forecast_of(
    prepared: Prepared,
    submitter: Submitter,
    kept: Kept | None = None,
    *,
    cores: int | None = None,
    free_host_bytes: int | None = None,
    patience_seconds: float | None = None,
) -> Forecast | None:
    """Return a forecast for every candidate of a search on a GPU, without those already stored in ``kept``.

    At most half of the ``cores`` predict at once, by default those of the trials' machine, and no more than fit into
    the free memory of its host, by default this one's. ``None`` on a CPU, for which nothing is predicted. Of the user's
    own code the arms are predicted whose steps its inspection has traced.
    """
    is_own, ranks = prepared.request.workload.source is not None, prepared.request.ranks
    if prepared.chip is None or (is_own and ranks > 1):
        # What the user's own code allocates was traced on one rank.
        return None
    traces = None
    if is_own:
        traces = OwnTraces(submitter, prepared.model.memory)
        # What the code would be next time is not known without running it.
        submitter, kept = traces, None
    batches, objective = prepared.space.batches, prepared.request.objective
    rungs = sorted(rung for level in batches.levels() for rung in batches.at_level(level)[:_MOST_RUNGS])
    is_free = batches.effective_batch is None
    pairs = [] if is_free and objective == "max-batch" else [(rung, batches.accumulation(rung)) for rung in rungs]

    def predictable(arms: Iterable[Arm]) -> list[Arm]:
        return [
            arm for arm in arms
            if is_predictable(arm, prepared.request.workload) and (traces is None or traces.has(arm))
        ]  # fmt: skip

    # Of several ranks the precisions of 16 bits come first: the others are slower, and tried where those fail.
    arms = sorted(
        predictable(prepared.space.arms),
        key=lambda arm: (
            objective == "max-batch" and not arm.gradient_checkpointing,
            ranks > 1 and arm.precision not in ("bf16", "fp16"),
        ),
    )
    multiple = batches.levels()[0] if is_free else None
    inquiries = questions(arms, pairs, multiple)
    reserve = questions(predictable(prepared.space.saving_arms) if arms else [], pairs, multiple)
    # A trial on a GPU needs one or two cores to feed it.
    parallel = most_predictions((cores or prepared.usable_cores) // 2, free_host_bytes, ranks)
    target = Target(prepared.chip, prepared.ceiling, inquiries, prepared.model.checkpointing_layers, reserve)
    if patience_seconds is None:
        patience_seconds = _LONG_PATIENCE_SECONDS if ranks > 1 or prepared.is_large else _PATIENCE_SECONDS
    return Forecast(
        submitter, [target], parallel=parallel, kept=kept, patience_seconds=patience_seconds, asks_ahead=ranks > 1
    )
