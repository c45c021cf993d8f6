"""Look up stored predictions of a recorded study, without starting a process."""

from __future__ import annotations

from dataclasses import replace

from autotune.core.candidate import Candidate
from autotune.core.device import Device
from autotune.core.errors import AutotuneError
from autotune.core.inspection import Inspection
from autotune.core.messages import Answer
from autotune.core.prediction import MemoryPrediction, PredictionWork
from autotune.core.workload import Workload
from autotune.devices.gpus import chip_of_device
from autotune.estimate.memory import MemoryModel
from autotune.estimate.step_time import StepTime, StepTimeModel
from autotune.results.report import Report
from autotune.tuning.answer_cache import KeptPredictions, StoredAnswers, inspection_key
from autotune.tuning.forecasting import forecast_of
from autotune.tuning.prepare import prepare
from autotune.tuning.request import request_from_document


class _Nobody:
    """Runs no jobs, so predictions that are not stored stay unknown."""

    def submit(self, job_id: str, work: PredictionWork, timeout_seconds: float) -> None:
        """Start nothing."""

    def ended(self, wait_seconds: float = 0.0) -> dict[str, Answer]:
        """Return nothing: no prediction was started."""
        return {}


def stored_prediction(report: Report, candidate: Candidate, answers: StoredAnswers) -> MemoryPrediction | None:
    """Return the prediction of a candidate's memory that the study's search used.

    ``None`` where none is stored: on a CPU, for the user's own code, and where other versions of torch, transformers or
    autotune made the predictions than are installed.
    """
    model = _stored_model(report, answers)
    return model.prediction(candidate) if model is not None else None


def stored_step(report: Report, candidate: Candidate, answers: StoredAnswers) -> StepTime | None:
    """Return the step of a candidate as it was predicted from the operations that the study's search traced.

    Nothing that was measured corrects it. ``None`` where no operations are stored, and for a GPU whose rates are not
    known.
    """
    model = _stored_model(report, answers)
    operations = model.operations(candidate.arm) if model is not None else None
    chip = chip_of_device(str(report.environment.get("device_name")))
    if operations is None or chip is None or chip.rates is None:
        return None
    return StepTimeModel(chip).predict(operations, candidate)


def _stored_model(report: Report, answers: StoredAnswers) -> MemoryModel | None:
    try:
        workload = Workload.from_document(report.workload)
        request = request_from_document(report.study.request, workload, _device_of(report), report.study.name)
        key = inspection_key(request.device, workload)
        facts = answers.find(key, Inspection) if key is not None else None
        if facts is None:
            return None
        # The study's own ceiling: the free memory may have changed when it was resumed.
        prepared = replace(prepare(request, facts), ceiling=report.ceiling)
        forecast = forecast_of(prepared, _Nobody(), KeptPredictions(answers, workload))
    except (AutotuneError, AttributeError, KeyError, TypeError, ValueError):
        # Records of another version, or a damaged answer. The rest of a report does not need it.
        return None
    return forecast.model if forecast is not None else None


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
