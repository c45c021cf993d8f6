"""Write a study and its trials as the JSON documents of ``--json``."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from autotune.core.candidate import Arm, Document
from autotune.core.look import Look
from autotune.core.outcome import Completed, Failed, FailureReason, Measurement, OutOfMemory, Source, source_of
from autotune.core.schema import encode, make_record, record_fields, with_version
from autotune.results.report import Report
from autotune.results.study_view import StudyView, TrialView
from autotune.store.records import LeftOut, Stage, StopReason, StudyState, TrialState

_CANDIDATE = (("per_device_train_batch_size", int), ("gradient_accumulation_steps", int), *record_fields(Arm))
# The fields of a measurement that are printed under their own names.
_MEASURED = (
    "samples_per_second",
    "step_seconds",
    "micro_steps_run",
    "device_used_bytes",
    "compile_seconds",
    "first_epoch_samples_per_second",
    "steady_samples_per_second",
    "run_steps",
    "run_epochs",
    "allocation_retries",
    "skipped_steps",
    "joules_per_sample",
    "data_seconds",
    "saving_seconds",
    "gpu_busy_share",
    "cpu_core",
    "host_bytes_to_build",
    "worst_batch_tokens",
    "worst_batch_step_seconds",
    "worst_batch_peak_reserved_bytes",
)


@dataclass(frozen=True)
class ShapesDocument:
    """Shapes of batches that are new to a process, each of which costs host time once."""

    expected: int | None
    """New shapes in the first epoch; ``None`` where the lengths of the samples are not known."""
    seconds_each: float | None
    """Time that a new shape costs; ``None`` where the trial cannot tell it from that of known shapes."""
    seen: int
    """Different shapes that the trial met."""
    new_in_steps: tuple[tuple[int, int], ...]
    """Pairs of a number of first steps of the run and the number of new shapes in these steps."""


@dataclass(frozen=True)
class NextRun:
    """The predicted speed of the winner's next run, with its 95 % interval."""

    samples_per_second: float
    samples_per_second_low: float
    samples_per_second_high: float
    processes_measured: int


@dataclass(frozen=True)
class ExpertDocument:
    """What an expert would run without a search: bf16 at the largest batch that fits, checkpointed if needed."""

    candidate: Any
    samples_per_second: float
    measured: bool
    """Whether a trial measured it; else its speed is predicted from smaller batches."""
    speedup: float | None
    """The winner's speed over the expert's."""


@dataclass(frozen=True)
class StudyDocument:
    """A study with all its trials."""

    schema_version: int
    study: str
    autotune_version: str
    started_at: str
    ended_at: str | None
    state: StudyState
    stop_reason: StopReason | None
    stopped_because: str | None
    left_out: tuple[LeftOut, ...]
    look: Look | None
    """How the winner's training differs from the requested one; ``None`` before the search compares them at its end,
    and in studies of versions that did not."""
    request: dict[str, Any]
    """As it was recorded, by this version or an earlier one; so are workload and environment."""
    workload: dict[str, Any]
    environment: dict[str, Any]
    ceiling_bytes: int
    ceiling: dict[str, Any]
    seconds: float
    too_noisy: str | None
    """Why noise hides whether the best is the fastest, in words; ``None`` where it does not."""
    speedup: float | None
    expert: ExpertDocument | None
    """bf16 at the largest batch that fits, and nothing else; ``None`` where nothing like it was tried."""
    model_flops_utilization: float | None
    """Share of the GPU's rated arithmetic that the winner's step uses, for matrix products, convolutions and attention
    of samples without padding; nothing that is computed again counts. ``None`` where it is not known."""
    next_run: NextRun | None
    best: Any
    baseline: Any
    trials: list[Any]
    """Trials are of ``trial_type``."""
    notes: list[str]


def report_document(report: Report) -> Document:
    """Return the whole study as ``--json`` prints it."""
    view, study, ceiling = StudyView(report), report.study, report.ceiling
    best, expert, next_run = view.best, None, None
    if (found := view.expert) is not None:
        parameters = found.candidate.parameters()
        expert = ExpertDocument(parameters, found.samples_per_second, found.is_measured, found.speedup)
    if best is not None:
        next_run = NextRun(best.speed.samples_per_second, *best.speed.interval(), best.speed.processes)
    document: Document = encode(
        StudyDocument(
            **with_version({}),
            study=study.name,
            autotune_version=study.autotune_version,
            started_at=study.started_at.isoformat(),
            ended_at=study.ended_at.isoformat() if study.ended_at else None,
            state=study.state,
            stop_reason=study.stop_reason,
            stopped_because=study.stopped_because,
            left_out=study.left_out,
            look=study.look,
            request=study.request,
            workload=report.workload,
            environment={k: v for k, v in report.environment.items() if k != "training_arguments_fields"},
            ceiling_bytes=ceiling.cap_bytes,
            ceiling={**study.ceiling, "cap_bytes": ceiling.cap_bytes, "line_bytes": ceiling.line_bytes},
            seconds=study.seconds,
            too_noisy=report.too_noisy,
            speedup=report.speedup,
            expert=expert,
            model_flops_utilization=best.utilization if best is not None else None,
            next_run=next_run,
            best=trial_document(best) if best is not None else None,
            baseline=trial_document(view.baseline) if view.baseline is not None else None,
            trials=[trial_document(trial) for trial in view.trials],
            notes=list(view.notes),
        )
    )
    return document


@functools.cache
def candidate_type() -> type[Any]:
    """Return the msgspec type of what ``Candidate.parameters`` returns."""
    return make_record("Candidate", _CANDIDATE)


@functools.cache
def trial_type() -> type[Any]:
    """Return the msgspec type of what ``trial_document`` returns."""
    measured = dict(record_fields(Measurement))
    return make_record(
        "Trial",
        [
            ("number", int),
            ("stage", Stage),
            *_CANDIDATE,
            ("state", TrialState),
            ("feasible", bool),
            *((name, measured.get(name, float) | None) for name in _MEASURED),
            ("shapes", ShapesDocument | None),
            ("relative_spread", float | None),
            ("tokens_per_second", float | None),
            ("peak_allocated_bytes", int | None),
            ("peak_reserved_bytes", int | None),
            ("headroom_bytes", int | None),
            ("limited_by", str | None),
            ("step_seconds_each", list[float]),
            ("phase_seconds", dict[str, float]),
            ("seconds", float | None),
            ("reused_from", Source | None),
            ("message", str | None),
            ("reason", FailureReason | None),
            ("disturbed", list[str]),
            ("log_path", str | None),
        ],
    )


def _shapes(measured: Measurement | None) -> ShapesDocument | None:
    """Return the JSON of a trial's batch shapes; ``None`` where they were not measured."""
    if measured is None or measured.shapes_seen is None:
        return None
    seconds_each, in_steps = measured.new_shape_seconds, measured.new_shapes_in_steps
    return ShapesDocument(measured.epoch_shapes, seconds_each, measured.shapes_seen, in_steps)


def trial_document(view: TrialView) -> Document:
    """Return one trial as ``--json`` prints it, with ``None`` for missing measurements."""
    trial, measured, outcome = view.record, view.measured, view.record.outcome
    peaks = measured or (outcome if isinstance(outcome, OutOfMemory) else None)
    document: Document = encode(
        {
            "number": trial.number,
            "stage": trial.stage,
            **trial.candidate.parameters(),
            "state": trial.state,
            "feasible": view.is_feasible,
            **{name: getattr(measured, name, None) for name in _MEASURED},
            "shapes": _shapes(measured),
            "relative_spread": measured.known_spread if measured else None,
            "tokens_per_second": view.tokens_per_second,
            "peak_allocated_bytes": peaks.peak_allocated_bytes if peaks else None,
            "peak_reserved_bytes": peaks.peak_reserved_bytes if peaks else None,
            "headroom_bytes": view.headroom_bytes,
            "limited_by": view.limit.kind if view.limit else None,
            "step_seconds_each": list(measured.step_seconds_each) if measured else [],
            "phase_seconds": outcome.phase_seconds if outcome else {},
            "seconds": trial.seconds,
            "reused_from": source_of(outcome),
            "message": outcome.message if isinstance(outcome, OutOfMemory | Failed) else None,
            "reason": outcome.reason if isinstance(outcome, Failed) else None,
            "disturbed": list(outcome.disturbed) if isinstance(outcome, Completed | OutOfMemory) else [],
            "log_path": trial.log_path,
        }
    )
    return document
