"""Write a study and its trials as the JSON documents of ``--json``."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, get_type_hints

from autotune.core.candidate import Arm, Document
from autotune.core.outcome import Completed, Failed, FailureReason, Measurement, OutOfMemory, Source, source_of
from autotune.core.schema import encode, make_record, with_version
from autotune.core.stop import LeftOut, StopReason
from autotune.estimate.bottleneck import what_limits
from autotune.results.expert import expert_of, utilization
from autotune.results.report import Report, measurement
from autotune.results.warnings import notes
from autotune.store.records import Stage, StudyState, TrialRecord, TrialState

# The fields of a measurement that are printed under their own names.
_MEASURED = (
    "samples_per_second",
    "step_seconds",
    "micro_steps_run",
    "device_used_bytes",
    "compile_seconds",
    "new_length_seconds",
    "epoch_lengths",
    "allocation_retries",
    "skipped_steps",
    "loss_of_batch",
    "joules_per_sample",
    "data_seconds",
    "gpu_busy_share",
    "gpu_busy_cost_seconds",
    "cpu_core",
    "host_bytes_to_build",
    "worst_batch_tokens",
    "worst_batch_step_seconds",
    "worst_batch_peak_reserved_bytes",
    "bucket_copy_bytes",
    "peak_allocated_with_bucket_copy_bytes",
    "peak_reserved_with_bucket_copy_bytes",
)


@dataclass(frozen=True)
class NextRun:
    """The predicted speed of the winner's next run, with its 95 % interval."""

    samples_per_second: float
    samples_per_second_low: float
    samples_per_second_high: float
    processes_measured: int


@dataclass(frozen=True)
class ExpertDocument:
    """What an informed user runs: bf16 at the largest batch that fits, with checkpointing if nothing fits without."""

    candidate: Any
    samples_per_second: float
    measured: bool
    """Whether a trial measured it; else its speed is predicted from smaller batches."""
    speedup: float | None
    """The winner's speed over this one."""


@dataclass(frozen=True)
class StudyDocument:
    """A whole study."""

    schema_version: int
    study: str
    autotune_version: str
    started_at: str
    ended_at: str | None
    state: StudyState
    stop_reason: StopReason | None
    stopped_because: str | None
    left_out: tuple[LeftOut, ...]
    request: dict[str, Any]
    """As it was recorded, by this version or an earlier one; so are workload and environment."""
    workload: dict[str, Any]
    environment: dict[str, Any]
    ceiling_bytes: int
    ceiling: dict[str, Any]
    seconds: float
    speedup: float | None
    expert: ExpertDocument | None
    """bf16 at the largest batch that fits, and nothing else; ``None`` where nothing like it was tried."""
    model_flops_utilization: float | None
    """Share of the GPU's rated arithmetic that the winner's step uses: six operations for each trained weight of a
    linear layer and token, four for another; ``None`` where it is not known."""
    next_run: NextRun | None
    best: Any
    baseline: Any
    trials: list[Any]
    """Trials are of ``trial_type``."""
    notes: list[str]


def report_document(report: Report) -> Document:
    """Return the whole study as ``--json`` prints it."""
    study, ceiling = report.study, report.ceiling

    def of(trial: TrialRecord | None) -> Document | None:
        """Return a trial with the speed and the peaks of all processes of its candidate, as they are shown."""
        pooled = report.pooled(trial)
        if trial is None or pooled is None or not isinstance(trial.outcome, Completed):
            return trial_document(report, trial) if trial else None
        return trial_document(
            report, dataclasses.replace(trial, outcome=dataclasses.replace(trial.outcome, measurement=pooled))
        )

    found = StudyDocument(
        **with_version({}),
        study=study.name,
        autotune_version=study.autotune_version,
        started_at=study.started_at.isoformat(),
        ended_at=study.ended_at.isoformat() if study.ended_at else None,
        state=study.state,
        stop_reason=study.stop_reason,
        stopped_because=study.stopped_because,
        left_out=study.left_out,
        request=study.request,
        workload=report.workload,
        environment={k: v for k, v in report.environment.items() if k != "training_arguments_fields"},
        ceiling_bytes=ceiling.cap_bytes,
        ceiling={**study.ceiling, "cap_bytes": ceiling.cap_bytes, "line_bytes": ceiling.line_bytes},
        seconds=study.seconds,
        speedup=report.speedup(),
        expert=_expert(report),
        model_flops_utilization=_utilization(report),
        next_run=_next_run(report),
        best=of(report.best),
        baseline=of(report.baseline),
        trials=[trial_document(report, trial) for trial in report.trials],
        notes=notes(report),
    )
    document: Document = encode(found)
    return document


def _expert(report: Report) -> ExpertDocument | None:
    expert = expert_of(report)
    if expert is None:
        return None
    return ExpertDocument(expert.candidate.parameters(), expert.samples_per_second, expert.is_measured, expert.speedup)


def _utilization(report: Report) -> float | None:
    best, measured = report.best, report.pooled(report.best)
    return utilization(report, measured, best.candidate.arm) if best is not None and measured is not None else None


def _next_run(report: Report) -> NextRun | None:
    speed = report.speed(report.best)
    return None if speed is None else NextRun(speed.samples_per_second, *speed.interval(), speed.processes)


@functools.cache
def candidate_type() -> type[Any]:
    """Return the type of a candidate's document, see ``Candidate.parameters``."""
    arm = get_type_hints(Arm)
    fields = ((field.name, arm[field.name]) for field in dataclasses.fields(Arm))
    return make_record(
        "Candidate", [("per_device_train_batch_size", int), ("gradient_accumulation_steps", int), *fields]
    )


@functools.cache
def trial_type() -> type[Any]:
    """Return the type of a trial's document."""
    measured, arm = get_type_hints(Measurement), get_type_hints(Arm)
    return make_record(
        "Trial",
        [
            ("number", int),
            ("stage", Stage),
            ("per_device_train_batch_size", int),
            ("gradient_accumulation_steps", int),
            *((field.name, arm[field.name]) for field in dataclasses.fields(Arm)),
            ("state", TrialState),
            ("feasible", bool),
            *((name, measured[name] | None) for name in _MEASURED),
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


def trial_document(report: Report, trial: TrialRecord) -> Document:
    """Return one trial as ``--json`` prints it; what was not measured is ``None``."""
    measured, outcome = measurement(trial), trial.outcome
    peaks = measured or (outcome if isinstance(outcome, OutOfMemory) else None)
    document: Document = encode(
        {
            "number": trial.number,
            "stage": trial.stage,
            **trial.candidate.parameters(),
            "state": trial.state,
            "feasible": report.feasible(trial),
            **{name: getattr(measured, name, None) for name in _MEASURED},
            "relative_spread": measured.known_spread if measured else None,
            "tokens_per_second": report.tokens_per_second(measured),
            "peak_allocated_bytes": peaks.peak_allocated_bytes if peaks else None,
            "peak_reserved_bytes": peaks.peak_reserved_bytes if peaks else None,
            "headroom_bytes": report.headroom_bytes(trial),
            "limited_by": _limited_by(report, trial),
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


def _limited_by(report: Report, trial: TrialRecord) -> str | None:
    """Return what limits a trial's step. The GPU's share may have been measured in another trial of the candidate."""
    measured = measurement(trial)
    if measured is None:
        return None
    share = measured.gpu_busy_share or report.history.busy_share(trial.candidate)
    return what_limits(dataclasses.replace(measured, gpu_busy_share=share)).kind
