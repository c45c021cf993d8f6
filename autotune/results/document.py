"""Write a study and its trials as the JSON documents of ``--json``."""

from __future__ import annotations

import dataclasses

from autotune.core.candidate import Document
from autotune.core.outcome import Completed, Failed, OutOfMemory, source_of
from autotune.estimate.bottleneck import what_limits
from autotune.results.report import Report, measurement
from autotune.results.warnings import notes
from autotune.store import TrialRecord


def report_document(report: Report) -> Document:
    """Return the whole study as ``--json`` prints it."""
    study = report.study

    def of(trial: TrialRecord | None) -> Document | None:
        return trial_document(report, trial) if trial else None

    environment = {k: v for k, v in report.environment.items() if k != "training_arguments_fields"}
    return {
        "study": study.name,
        "autotune_version": study.autotune_version,
        "started_at": study.started_at.isoformat(),
        "ended_at": study.ended_at.isoformat() if study.ended_at else None,
        "state": study.state,
        "stop_reason": study.stop_reason,
        "stopped_because": study.stopped_because,
        "left_out": [{"arms": list(each.arms), "reason": each.reason} for each in study.left_out],
        "request": study.request,
        "workload": report.workload,
        "environment": environment,
        "ceiling_bytes": report.ceiling.cap_bytes,
        "ceiling": {
            **study.ceiling,
            "cap_bytes": report.ceiling.cap_bytes,
            "line_bytes": report.ceiling.line_bytes,
        },
        "seconds": study.seconds,
        "speedup": report.speedup(),
        "next_run": _next_run(report),
        "best": of(report.best),
        "baseline": of(report.baseline),
        "trials": [trial_document(report, trial) for trial in report.trials],
        "notes": notes(report),
    }


def _next_run(report: Report) -> Document | None:
    """Return the predicted speed of the winner's next run, with its 95 % interval."""
    speed = report.speed(report.best)
    if speed is None:
        return None
    low, high = speed.interval()
    return {
        "samples_per_second": speed.samples_per_second,
        "samples_per_second_low": low,
        "samples_per_second_high": high,
        "processes_measured": speed.processes,
    }


def trial_document(report: Report, trial: TrialRecord) -> Document:
    """Return one trial as ``--json`` prints it; what was not measured is ``None``."""
    measured = measurement(trial)
    outcome = trial.outcome
    peaks = measured or (outcome if isinstance(outcome, OutOfMemory) else None)
    reserved = peaks.peak_reserved_bytes if peaks else None
    source = source_of(outcome)
    return {
        "number": trial.number,
        "stage": trial.stage,
        **trial.candidate.parameters(),
        "state": trial.state,
        "feasible": report.feasible(trial),
        "samples_per_second": measured.samples_per_second if measured else None,
        "tokens_per_second": report.tokens_per_second(measured),
        "step_seconds": measured.step_seconds if measured else None,
        "relative_spread": measured.known_spread if measured else None,
        "micro_steps_run": measured.micro_steps_run if measured else None,
        "peak_allocated_bytes": peaks.peak_allocated_bytes if peaks else None,
        "peak_reserved_bytes": reserved,
        "headroom_bytes": report.headroom_bytes(trial),
        "device_used_bytes": measured.device_used_bytes if measured else None,
        "compile_seconds": measured.compile_seconds if measured else None,
        "new_length_seconds": measured.new_length_seconds if measured else None,
        "epoch_lengths": measured.epoch_lengths if measured else None,
        "allocation_retries": measured.allocation_retries if measured else None,
        "skipped_steps": measured.skipped_steps if measured else None,
        "joules_per_sample": measured.joules_per_sample if measured else None,
        "data_seconds": measured.data_seconds if measured else None,
        "gpu_busy_share": measured.gpu_busy_share if measured else None,
        "gpu_busy_cost_seconds": measured.gpu_busy_cost_seconds if measured else None,
        "limited_by": _limited_by(report, trial),
        "cpu_core": measured.cpu_core if measured else None,
        "worst_batch_tokens": measured.worst_batch_tokens if measured else None,
        "worst_batch_step_seconds": measured.worst_batch_step_seconds if measured else None,
        "worst_batch_peak_reserved_bytes": measured.worst_batch_peak_reserved_bytes if measured else None,
        "step_seconds_each": list(measured.step_seconds_each) if measured else [],
        "phase_seconds": outcome.phase_seconds if outcome else {},
        "seconds": trial.seconds,
        "reused_from": dataclasses.asdict(source) if source else None,
        "message": outcome.message if isinstance(outcome, OutOfMemory | Failed) else None,
        "reason": outcome.reason if isinstance(outcome, Failed) else None,
        "disturbed": list(outcome.disturbed) if isinstance(outcome, Completed | OutOfMemory) else [],
        "log_path": trial.log_path,
    }


def _limited_by(report: Report, trial: TrialRecord) -> str | None:
    """Return what limits a trial's step. The GPU's share may have been measured in another trial of the candidate."""
    measured = measurement(trial)
    if measured is None:
        return None
    share = measured.gpu_busy_share or report.history.busy_share(trial.candidate)
    return what_limits(dataclasses.replace(measured, gpu_busy_share=share)).kind
