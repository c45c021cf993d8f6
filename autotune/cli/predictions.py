"""Predict memory and speed on GPUs that are not in this machine, for ``predict`` and ``advise``."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.core.errors import InvalidRequestError
from autotune.core.options import request_fields
from autotune.tuning.allowed import check_request

if TYPE_CHECKING:
    from autotune.core.workload import Workload
    from autotune.devices.gpus import Chip
    from autotune.estimate.memory import MemoryModel, Question
    from autotune.execution import TrialServer
    from autotune.space.space import Space
    from autotune.tuning.answer_cache import AnswersBeside
    from autotune.tuning.prepare import Prepared
    from autotune.tuning.request import SearchRequest


# One host has no more. A choice.
_MOST_RANKS = 64
_MOST_NAMED = 4


def known_chips(spec: str | None) -> dict[str, Chip]:
    """Return the GPUs of the catalog and of the user's own file, which take precedence."""
    from autotune.devices.gpus import CHIPS, read_chips

    return {**CHIPS, **(read_chips(spec) if spec is not None else {})}


def predictions(
    targets: Sequence[tuple[Chip, int]],
    options: Sequence[dict[str, Any]],
    answers: AnswersBeside,
    ranks: Sequence[int] = (1,),
) -> list[tuple[Prepared, MemoryModel]]:
    """Return the predictions for each chip with so much memory; one process makes those that are not stored.

    They are for every batch that so many ranks could have.
    """
    from autotune.core.device import precisions_of
    from autotune.core.inspection import Inspection
    from autotune.core.placement import Placement
    from autotune.devices import find_device
    from autotune.devices.gpus import TYPICAL_CONTEXT_BYTES
    from autotune.estimate.memory_jobs import Forecast, Target
    from autotune.execution import TrialServer
    from autotune.space.dataloader import usable_cores
    from autotune.tuning.answer_cache import KeptPredictions, inspection_key
    from autotune.tuning.forecasting import most_predictions
    from autotune.tuning.options import build_workload, in_usual_dtype
    from autotune.tuning.prepare import prepare

    precisions = {precision for chip, _ in targets for precision in precisions_of(chip.capability)}
    workload = in_usual_dtype(build_workload(options[0]), options[0]["dtype"], precisions)
    requests = [
        _request(workload, chip, limit_bytes, own) for (chip, limit_bytes), own in zip(targets, options, strict=True)
    ]
    for request in requests:
        check_request(request)
    cpu = find_device("cpu")
    # Of several ranks the inspection also says whether the model can be sharded, and what DDP need not do.
    placement = Placement.of(*[cpu] * max(request.ranks for request in requests))
    key = inspection_key(cpu, workload, placement.ranks)
    assert key is not None
    with (
        tempfile.TemporaryDirectory(prefix="autotune-predict-") as logs,
        TrialServer(placement, workload, Path(logs), on_start=lambda: None) as runner,
    ):
        remembered = answers.find(key, Inspection)
        if remembered is None:
            _begin(runner, answers)
        facts = remembered or runner.inspect()
        on_gpu = dataclasses.replace(facts, context_bytes=TYPICAL_CONTEXT_BYTES)
        every = [prepare(request, on_gpu) for request in requests]
        asked = [
            Target(chip, prepared.ceiling, _questions(prepared.space, ranks))
            for (chip, _), prepared in zip(targets, every, strict=True)
        ]
        forecast = Forecast(
            runner, asked, parallel=most_predictions(usable_cores()), kept=KeptPredictions(answers, workload)
        )
        if not forecast.is_complete:
            _begin(runner, answers)
        forecast.complete()
        if remembered is None:
            # Last, since making a database takes a second in which others could be predicting.
            answers.keep(key, facts)
    return list(zip(every, forecast.models, strict=True))


def _begin(runner: TrialServer, answers: AnswersBeside) -> None:
    """Start the process that predicts, and import what storing its answers needs while that imports torch."""
    runner.start()
    answers.prepare_to_keep()


def told_unknown(calls: dict[str, int], share: float) -> str:
    """Return a sentence about operations of which only the memory traffic is predicted."""
    most = sorted(calls, key=lambda name: -calls[name])
    names = ", ".join(f"{name} ({calls[name]} ×)" for name in most[:_MOST_NAMED])
    more = f" and {len(most) - _MOST_NAMED} more" if len(most) > _MOST_NAMED else ""
    return (
        f"Too fast, perhaps: how long {names}{more} take is not known. Their memory traffic is counted, {share:.1%} of "
        "the GPU time, and nothing else of them."
    )


def _request(workload: Workload, chip: Chip, limit_bytes: int, options: dict[str, Any]) -> SearchRequest:
    """Return the request of a search on the chip."""
    from autotune.devices import Device
    from autotune.tuning.request import SearchRequest

    ranks = _ranks(options.get("gpus"))
    first = Device("cuda", 0, chip.name, chip.name, limit_bytes, None, 0, limit_bytes, capability=chip.capability)
    others = tuple(dataclasses.replace(first, index=rank, uuid=f"{chip.name} {rank}") for rank in range(1, ranks))
    asked = {**request_fields(options), "memory_limit_bytes": limit_bytes}
    if ranks > 1 and options["world_size"] == 1:
        asked["world_size"] = ranks
    return SearchRequest(workload=workload, device=first, others=others, is_at_hand=False, **asked)


def _ranks(gpus: str | None) -> int:
    """Return how many GPUs train together; raises ``InvalidRequestError`` where that is no number."""
    if gpus is None:
        return 1
    if not gpus.isdecimal() or not 1 <= int(gpus) <= _MOST_RANKS:
        raise InvalidRequestError(f"--gpus {gpus} is not a number of GPUs", f"give one from 1 to {_MOST_RANKS}")
    return int(gpus)


def _questions(space: Space, ranks: Sequence[int]) -> list[Question]:
    from autotune.estimate.memory import questions

    shared = [of_ranks(space, count) for count in ranks] if ranks != (1,) else [space]
    pairs = [(batch, each.batches.accumulation(batch)) for each in shared for batch in batches_of(each)]
    multiple = space.batches.levels()[0] if space.batches.effective_batch is None else None
    return questions(space.arms, pairs, multiple)


def of_ranks(space: Space, count: int) -> Space:
    """Return the space with the effective batch shared by so many ranks.

    Raises ``InvalidRequestError`` where it cannot be shared equally.
    """
    return dataclasses.replace(space, batches=dataclasses.replace(space.batches, world_size=count))


def batches_of(space: Space) -> list[int]:
    """Return every batch of an effective batch; none where the batch is free, since only the largest is predicted."""
    if space.batches.effective_batch is None:
        return []
    return sorted(batch for level in space.batches.levels() for batch in space.batches.at_level(level))
