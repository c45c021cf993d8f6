"""Predict memory and speed on GPUs that are not in this machine, for ``predict`` and ``advise``.

What was predicted of a recorded study is looked up without starting a process.
"""

from __future__ import annotations

import dataclasses
import importlib
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.core.candidate import Arm, Candidate
from autotune.core.ceiling import PREDICTION_MARGIN
from autotune.core.device import Device, precisions_of
from autotune.core.errors import AutotuneError, InvalidRequestError
from autotune.core.inspection import Inspection
from autotune.core.placement import Placement
from autotune.core.prediction import MemoryPrediction
from autotune.core.schema import encode
from autotune.core.units import format_bytes
from autotune.core.workload import Workload
from autotune.devices.gpus import CHIPS, TYPICAL_CONTEXT_BYTES, Chip, chip_of_device, find_chip, read_chips
from autotune.devices.listing import find_device
from autotune.estimate.memory import MemoryModel, Question, questions, reserved_interval
from autotune.estimate.step_time import StepTime, StepTimeModel
from autotune.execution import TrialServer
from autotune.results.predicted import (
    ArmPrediction,
    BatchDocument,
    GpuPredictionDocument,
    PredictionDocument,
    RanksPredictionDocument,
    TimedBatchDocument,
    best_of,
    speed_document,
)
from autotune.results.prediction_text import ACCURACY, FEW_BITS_SPEED, RANKS_ACCURACY, SPEED_ACCURACY
from autotune.space.arms import why_unpredictable
from autotune.space.space import Space, usable_cores
from autotune.tuning.allowed import check_request
from autotune.tuning.answer_cache import AnswerCache, KeptPredictions, inspection_key
from autotune.tuning.forecast import Forecast, Target, forecast_of, most_predictions
from autotune.tuning.options import build_workload, in_usual_dtype, with_effective_batch
from autotune.tuning.prepare import Prepared, prepare
from autotune.tuning.request import SearchRequest, request_fields, request_from_document

if TYPE_CHECKING:
    from autotune.results.report import Report
    from autotune.store.answers import Answers

# One host has no more. A choice.
_MOST_RANKS = 64


def known_chips(spec: str | None) -> dict[str, Chip]:
    """Return the GPUs of the catalog and of the user's own file, which has precedence."""
    return {**CHIPS, **(read_chips(spec) if spec is not None else {})}


def predictions(
    targets: Sequence[tuple[Chip, int]],
    options: Sequence[dict[str, Any]],
    answers: AnswerCache,
    ranks: Sequence[int] = (1,),
    *,
    saves_memory: bool = False,
) -> list[tuple[Prepared, MemoryModel]]:
    """Predict memory for each target, a chip with its bytes of memory, and the target's own ``options``.

    Returns a prepared search and a memory model for each. One process computes what ``answers`` has not stored. The
    predictions cover every batch that any of the numbers ``ranks`` could have. Memory-saving arms are predicted where
    nothing else fits, and always with ``saves_memory``.
    """
    workload, asked_dtype = build_workload(options[0]), options[0]["dtype"]
    usual = [in_usual_dtype(workload, asked_dtype, precisions_of(chip.capability)) for chip, _ in targets]
    if len({each.dtype for each in usual}) > 1:
        # Each dtype is a workload of its own, so that its targets are predicted by a call of their own.
        found: dict[int, tuple[Prepared, MemoryModel]] = {}
        for dtype in dict.fromkeys(each.dtype for each in usual):
            indices = [index for index, each in enumerate(usual) if each.dtype == dtype]
            own = [{**options[index], "dtype": dtype} for index in indices]
            alike = predictions([targets[index] for index in indices], own, answers, ranks, saves_memory=saves_memory)
            found |= dict(zip(indices, alike, strict=True))
        return [found[index] for index in range(len(targets))]
    workload = usual[0]
    if workload.task == "image-text-to-text":
        raise InvalidRequestError(
            f"--model {workload.model}: the memory of models of images and text is not predicted",
            "measure it with autotune search",
        )
    requests = [
        _request(workload, chip, limit_bytes, with_effective_batch(own, workload))
        for (chip, limit_bytes), own in zip(targets, options, strict=True)
    ]
    for request in requests:
        check_request(request)
    cpu = find_device("cpu")
    # The inspection runs on the CPU. For several ranks it also says whether the model can be sharded, and what DDP need
    # not do.
    placement = Placement.of(*[cpu] * max(request.ranks for request in requests))
    key = inspection_key(cpu, workload, placement.ranks)
    assert key is not None
    with (
        tempfile.TemporaryDirectory(prefix="autotune-predict-") as logs,
        TrialServer(placement, workload, Path(logs), on_start=lambda: None) as runner,
    ):
        remembered = answers.find(key, Inspection)
        if remembered is None:
            _start_predicting(runner)
        facts = remembered or runner.inspect()
        on_gpu = dataclasses.replace(facts, context_bytes=TYPICAL_CONTEXT_BYTES)
        every = [prepare(request, on_gpu) for request in requests]
        asked = [_target(chip, prepared, ranks) for (chip, _), prepared in zip(targets, every, strict=True)]
        forecast = Forecast(
            runner, asked, parallel=most_predictions(usable_cores()), kept=KeptPredictions(answers, workload)
        )
        if not forecast.is_answered:
            _start_predicting(runner)
        forecast.complete()
        if saves_memory or not all(model.expects_a_fit() for model in forecast.models):
            if not forecast.is_complete:
                _start_predicting(runner)
            forecast.call_on_reserve()
        if remembered is None:
            # Last, since making a database takes a second in which others could be predicting.
            answers.keep(key, facts)
    return list(zip(every, forecast.models, strict=True))


def _start_predicting(runner: TrialServer) -> None:
    """Start the predicting process, and meanwhile import the modules that store its answers."""
    runner.start()
    importlib.import_module("autotune.store.opening")


def _request(workload: Workload, chip: Chip, limit_bytes: int, options: dict[str, Any]) -> SearchRequest:
    """Return the request of a search on a chip that is not in this machine, with a memory limit."""
    ranks = _ranks(options.get("gpus"))
    first = Device("cuda", 0, chip.name, chip.name, limit_bytes, None, 0, limit_bytes, capability=chip.capability)
    others = tuple(dataclasses.replace(first, index=rank, uuid=f"{chip.name} {rank}") for rank in range(1, ranks))
    # What a search tries by default is predicted.
    fields = {**request_fields(options), "memory_limit_bytes": limit_bytes, "search_effort": "default"}
    if ranks > 1 and options["world_size"] == 1:
        fields["world_size"] = ranks
    return SearchRequest(workload=workload, device=first, others=others, is_at_hand=False, **fields)


def _ranks(gpus: str | None) -> int:
    """Return the number of GPUs that ``--gpus`` says train together. Raises ``InvalidRequestError`` for a wrong one."""
    if gpus is None:
        return 1
    if not gpus.isdecimal() or not 1 <= int(gpus) <= _MOST_RANKS:
        raise InvalidRequestError(f"--gpus {gpus} is not a number of GPUs", f"give one from 1 to {_MOST_RANKS}")
    return int(gpus)


def _target(chip: Chip, prepared: Prepared, ranks: Sequence[int]) -> Target:
    """Return a chip with the questions about it; questions about memory-saving arms are in reserve."""
    space, workload = prepared.space, prepared.request.workload
    arms, saving = (
        [arm for arm in among if not why_unpredictable(arm, workload)] for among in (space.arms, space.saving_arms)
    )
    return Target(chip, prepared.ceiling, _questions(space, arms, ranks), reserve=_questions(space, saving, (1,)))


def _questions(space: Space, arms: Sequence[Arm], ranks: Sequence[int]) -> list[Question]:
    """Return the questions to predict about some arms: at every batch that each number of ranks can have."""
    shared = [of_ranks(space, count) for count in ranks] if ranks != (1,) else [space]
    pairs = [(batch, each.batches.accumulation(batch)) for each in shared for batch in batches_of(each)]
    multiple = space.batches.levels()[0] if space.batches.effective_batch is None else None
    return questions(arms, pairs, multiple)


def of_ranks(space: Space, count: int) -> Space:
    """Return the space with the effective batch divided among ranks.

    Raises ``InvalidRequestError`` where it is not divisible.
    """
    return dataclasses.replace(space, batches=dataclasses.replace(space.batches, world_size=count))


def batches_of(space: Space) -> list[int]:
    """Return all per-device batches to predict; empty without an effective batch: then the largest is of interest."""
    if space.batches.effective_batch is None:
        return []
    return space.batches.every


def predicted_document(
    gpu: tuple[str, ...] | None, gpu_spec: str | None, storage: str, options: dict[str, Any]
) -> tuple[dict[str, Any], AutotuneError | None]:
    """Predict memory and speed on the named GPUs; return the JSON of ``predict``, and why answers could not be stored.

    ``gpu_spec`` is a file with further GPUs; ``storage`` is the database with cached answers.
    """
    targets = _chips(gpu, options["memory_limit"], gpu_spec)
    with AnswerCache(storage) as answers:
        predicted = predictions(targets, [options] * len(targets), answers)
    documents = [
        gpu_document(chip, prepared, model) for (chip, _), (prepared, model) in zip(targets, predicted, strict=True)
    ]
    speed = f"{SPEED_ACCURACY}; {FEW_BITS_SPEED}" if options.get("quantize") else SPEED_ACCURACY
    answer: PredictionDocument = PredictionDocument(True, ACCURACY, speed, documents, documents[0].arms)
    if any(arm.ranks > 1 for document in documents for arm in document.arms):
        answer = RanksPredictionDocument(**vars(answer), ranks_accuracy=RANKS_ACCURACY)
    document: dict[str, Any] = encode(answer)
    return document, answers.problem


def _chips(names: tuple[str, ...] | None, limit_bytes: int | None, spec: str | None) -> list[tuple[Chip, int]]:
    """Return the chips to predict for, each with its bytes of usable memory: the limit, else all.

    Without ``names`` it is a GPU with that much memory. Raises ``InvalidRequestError`` for an unknown GPU, and for a
    limit that is missing or above a GPU's memory.
    """
    known = known_chips(spec)
    if not names:
        if limit_bytes is None:
            raise InvalidRequestError(
                "the memory of the GPU is not known", "give --memory-limit 24GiB or --gpu rtx-3090"
            )
        # Without rates: its speed is not known.
        return [(Chip(name="a GPU like the H200", memory_bytes=limit_bytes), limit_bytes)]
    chips = []
    for name in names:
        chip = find_chip(name, known)
        assert chip.memory_bytes is not None
        if limit_bytes is not None and limit_bytes > chip.memory_bytes:
            raise InvalidRequestError(
                f"--memory-limit {format_bytes(limit_bytes)} is more than the {format_bytes(chip.memory_bytes)} "
                f"of {chip.name}",
                "leave it out, or lower it",
            )
        chips.append((chip, limit_bytes or chip.memory_bytes))
    return chips


def gpu_document(chip: Chip, prepared: Prepared, model: MemoryModel) -> GpuPredictionDocument:
    """Return the part of ``predict``'s JSON about one chip: every arm at every batch; memory-saving ones if needed."""
    ceiling = prepared.ceiling
    speeds = StepTimeModel(chip) if chip.rates is not None else None
    arms = [_arm_prediction(arm, prepared, model, speeds) for arm in prepared.space.arms]
    if not any(arm.largest_batch for arm in arms):
        arms += [_arm_prediction(arm, prepared, model, speeds) for arm in prepared.space.saving_arms]
    best = best_of(arms)
    return GpuPredictionDocument(
        gpu=chip.name,
        workload={k: v for k, v in prepared.request.workload.document().items() if k != "config"},
        ceiling_bytes=ceiling.cap_bytes,
        line_bytes=ceiling.line_bytes,
        fits_below_bytes=ceiling.bounds.below_line_bytes(PREDICTION_MARGIN),
        unquantized_bytes=prepared.unquantized_bytes,
        best={**encode(best[0].arm), **encode(best[1])} if best is not None else None,
        arms=arms,
    )


def _arm_prediction(arm: Arm, prepared: Prepared, model: MemoryModel, speeds: StepTimeModel | None) -> ArmPrediction:
    """Return the predictions for one arm (configuration) at every batch; without ``speeds``, of memory alone."""
    space, workload = prepared.space, prepared.request.workload
    largest = model.largest_batch(arm)
    operations = model.operations(arm)
    is_free = space.batches.effective_batch is None
    pairs = [(batch, 1) for batch in model.batches(arm)] if is_free else []
    pairs += [(batch, space.batches.accumulation(batch)) for batch in batches_of(space)]
    rows: list[BatchDocument] = []
    for batch, accumulation in pairs:
        candidate = Candidate(arm, batch, accumulation)
        prediction = model.prediction(candidate)
        # Without accumulation, reducing gradients in each micro-step is the same as in the last one.
        is_duplicate = arm.sync_each_batch and not candidate.accumulates
        if prediction is not None and not is_duplicate:
            row = BatchDocument(
                per_device_train_batch_size=batch,
                gradient_accumulation_steps=accumulation,
                peak_allocated_bytes=prediction.peak_allocated_bytes,
                peak_reserved_bytes=prediction.peak_reserved_bytes,
                peak_reserved_interval_bytes=reserved_interval(prediction, arm),
                fits=prediction.fits,
                anatomy_bytes=prediction.anatomy,
            )
            if speeds is not None and operations is not None and speeds.knows(arm):
                speed = speed_document(speeds.predict(operations, candidate), workload)
                row = TimedBatchDocument(**vars(row), **vars(speed))
            rows.append(row)
    if not is_free:
        largest = max((row.per_device_train_batch_size for row in rows if row.fits), default=0)
    why_not = None if rows else why_unpredictable(arm, workload) or model.why_missing(arm)
    return ArmPrediction(**dataclasses.asdict(arm), largest_batch=largest, batches=tuple(rows), why_not=why_not)


def stored_prediction(
    report: Report, candidate: Candidate, answers: Answers
) -> tuple[MemoryPrediction | None, StepTime | None]:
    """Return the predictions of a candidate's memory and step time that are stored with a study, without a process.

    Both are ``None`` where nothing is stored: on a CPU, for the user's own code, and for other versions of torch,
    transformers or autotune than are installed. The step time, which no measurement corrected, is also ``None`` for a
    GPU whose rates are unknown.
    """
    try:
        workload = Workload.from_document(report.workload)
        request = request_from_document(report.study.request, workload, _device_of(report), report.study.name)
        key = inspection_key(request.device, workload)
        facts = answers.find(key, Inspection) if key is not None else None
        if facts is None:
            return None, None
        # The study's own ceiling: the free memory may have changed when it was resumed.
        prepared = replace(prepare(request, facts), ceiling=report.ceiling)
        forecast = forecast_of(prepared, None, KeptPredictions(AnswerCache(answers), workload))
    except (AutotuneError, AttributeError, KeyError, TypeError, ValueError):
        # Records of another version, or a damaged answer. A report does without predictions.
        return None, None
    if forecast is None:
        return None, None
    operations = forecast.model.operations(candidate.arm)
    chip = chip_of_device(str(report.environment.get("device_name")))
    step = None
    if operations is not None and chip is not None and chip.rates is not None:
        step = StepTimeModel(chip).predict(operations, candidate)
    return forecast.model.prediction(candidate), step


def _device_of(report: Report) -> Device:
    """Return the device of a study as it was at the start of the study."""
    environment = report.environment
    capability = environment.get("device_capability")
    return Device(
        kind=environment["device_kind"], index=None, uuid=environment["device_uuid"], name=environment["device_name"],
        memory_total_bytes=environment["device_memory_bytes"], memory_reserved_bytes=None, memory_used_bytes=None,
        memory_free_bytes=report.ceiling.free_bytes, driver=environment["driver"],
        capability=(int(capability[0]), int(capability[1])) if capability else None,
    )  # fmt: skip
