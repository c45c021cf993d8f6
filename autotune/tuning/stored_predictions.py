"""Look up what was predicted of a recorded study, without starting a process."""

from __future__ import annotations

from dataclasses import replace

from autotune.core.candidate import Candidate
from autotune.core.device import Device
from autotune.core.errors import AutotuneError
from autotune.core.inspection import Inspection
from autotune.core.prediction import MemoryPrediction
from autotune.core.workload import Workload
from autotune.devices.gpus import chip_of_device
from autotune.estimate.step_time import StepTime, StepTimeModel
from autotune.results.report import Report
from autotune.store.answers import Answers
from autotune.tuning.answer_cache import AnswerCache, KeptPredictions, inspection_key
from autotune.tuning.forecast import forecast_of
from autotune.tuning.prepare import prepare
from autotune.tuning.request import request_from_document


def stored_prediction(
    report: Report, candidate: Candidate, answers: Answers
) -> tuple[MemoryPrediction | None, StepTime | None]:
    """Return what the study's search predicted of a candidate: its memory, and its step from the traced operations.

    Nothing that was measured corrects the step. ``None`` where nothing is stored: on a CPU, for the user's own code,
    and where other versions of torch, transformers or autotune made the predictions than are installed; the step also
    for a GPU whose rates are not known.
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
        # Records of another version, or a damaged answer. The rest of a report does not need it.
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
    """Return the device in the state it was in when the study began."""
    environment = report.environment
    capability = environment.get("device_capability")
    return Device(
        kind=environment["device_kind"],
        index=None,
        uuid=environment["device_uuid"],
        name=environment["device_name"],
        memory_total_bytes=environment["device_memory_bytes"],
        memory_reserved_bytes=None,
        memory_used_bytes=None,
        memory_free_bytes=report.ceiling.free_bytes,
        driver=environment["driver"],
        capability=(int(capability[0]), int(capability[1])) if capability else None,
    )
