"""A study for a terminal, a file or a program: a few sentences, one JSON document."""

from __future__ import annotations

import dataclasses

from autotune.core.candidate import Document
from autotune.core.outcome import Completed, Failed, Measurement, OutOfMemory, source_of
from autotune.core.units import format_bytes, format_rate, format_seconds, format_spread, plural
from autotune.estimate.bottleneck import describe_limit, what_limits
from autotune.results.report import Report, data_facts, lengths_of, measurement, verdict
from autotune.results.warnings import notes
from autotune.space.dataloader import LOADER_BOUND, waits_for_data
from autotune.store import TrialRecord

_NOTICEABLE_SECONDS = 1.0
_NOTICEABLE_SHARE = 0.1


def summary_lines(report: Report) -> list[str]:
    """The answer in a few lines, for a terminal or a file."""
    best, measured, speed = report.best, report.pooled(report.best), report.speed(report.best)
    request = report.study.request
    if best is None or measured is None or speed is None:
        return [f"No feasible trial in the study {report.study.name}: {counts_line(report)}", *_note_lines(report)]
    lines = [
        f"Best: per-device batch {best.candidate.per_device_train_batch_size} × accumulation "
        f"{best.candidate.gradient_accumulation_steps}"
        + (f" × {request['world_size']} devices" if request["world_size"] > 1 else "")
        + f", {best.candidate.arm.describe()}"
    ]
    tokens = tokens_per_second(report, measured)
    lines.append(
        f"  {format_rate(speed.samples_per_second)} samples/s{format_spread(speed.relative_half_width)}"
        + (f", {format_rate(tokens)} tokens/s" if tokens else "")
        + f"; {format_seconds(measured.step_seconds)} an optimizer step"
    )
    speedup, baseline = report.speedup(), report.speed(report.baseline)
    if speedup is not None and baseline is not None and report.baseline is not None:
        lines.append(
            f"  {speedup:.2f} × {report.baseline_name} "
            f"({report.baseline.candidate.describe()}: {format_rate(baseline.samples_per_second)} samples/s)"
        )
    elif request["measure_baseline"] and request["objective"] == "throughput":
        lines.append(f"  {report.baseline_name} did not complete, so there is no speed-up to tell")
    limit = describe_limit(best.candidate, measured)
    details = [_memory_line(report, best, measured), limit, *detail_lines(report, best, measured)]
    lines += [f"  {line}" for line in details if line is not None]
    left_out = [f"  not tried: {each.describe()}" for each in report.study.left_out]
    return [*lines, f"  {counts_line(report)}", *left_out, *_note_lines(report)]


def detail_lines(report: Report, best: TrialRecord, measured: Measurement) -> list[str]:
    """What else is known of the winner: energy, waiting for data, the first epoch, that no larger batch fits."""
    lines = []
    if measured.joules_per_sample is not None:
        watts = measured.joules_per_sample * measured.samples_per_second
        lines.append(f"{measured.joules_per_sample:.3g} J a sample; the whole GPU drew {watts:.0f} W meanwhile")
    lines += [*_data_lines(measured, report.workload), *_first_epoch_lines(measured)]
    if report.study.request["objective"] == "max-batch":
        lines += _boundary_lines(report, best)
    return lines


def _memory_line(report: Report, best: TrialRecord, measured: Measurement) -> str:
    """The winner's peak and headroom; where segments expand, what proves that it fits."""
    cap, spare = report.ceiling.cap_bytes, _headroom_bytes(report, best) or 0
    headroom = f"headroom {format_bytes(spare)} ({spare / cap:.0%})"
    if best.candidate.arm.expandable_segments:
        return (
            f"{format_bytes(measured.peak_allocated_bytes)} allocated at the peak, in a trial that could reserve "
            f"{format_bytes(report.ceiling.line_bytes)} of {format_bytes(cap)}; {headroom}"
        )
    reserved = format_bytes(measured.peak_reserved_bytes)
    return f"{reserved} of {format_bytes(cap)} reserved at the peak, measured; {headroom}"


def _data_lines(measured: Measurement, workload: Document) -> list[str]:
    """What the user's own data adds: the worst batches, and whether the loader keeps up."""
    if not workload.get("data") and workload["task"] != "own":
        return []
    lines = []
    if measured.worst_batch_tokens is not None and measured.worst_batch_peak_reserved_bytes is not None:
        seconds = measured.worst_batch_step_seconds
        lines.append(
            f"after steps of the longest samples, padded to {measured.worst_batch_tokens} tokens: "
            f"{format_bytes(measured.worst_batch_peak_reserved_bytes)}"
            + (f", {format_seconds(seconds)} a step; " if seconds else "; ")
            + "the speed is that of an epoch's mean batch"
        )
    share = waits_for_data(measured)
    if share <= LOADER_BOUND and what_limits(measured).kind == "host":
        return [*lines, f"{share:.1%} of a step is spent waiting for data"]
    which = "the data loader" if share > LOADER_BOUND else "computing, not the data loader,"
    return [*lines, f"{which} is the bottleneck: {share:.1%} of a step is spent waiting for data"]


def _first_epoch_lines(measured: Measurement) -> list[str]:
    """What lengths cost that come for the first time, where a person would notice."""
    each, count = measured.new_length_seconds, measured.epoch_lengths
    if each is None:
        return []
    if count is None:
        # Code of the user's own, whose epoch nobody has looked at.
        told = (
            f"a batch whose shape comes for the first time takes {format_seconds(each)} longer; that is not in the "
            "speed, so a first epoch of many shapes is slower"
        )
        return [told] if each > _NOTICEABLE_SHARE * measured.step_seconds else []
    if each * count < _NOTICEABLE_SECONDS:
        return []
    return [
        f"the first epoch takes some {format_seconds(each * count)} longer: {format_seconds(each)} for each of "
        f"{count} padded lengths that come for the first time (--pad-to-multiple-of makes fewer)"
    ]


def _was_interrupted(trial: TrialRecord) -> bool:
    return isinstance(trial.outcome, Failed) and trial.outcome.reason == "interrupted"


def counts_line(report: Report) -> str:
    """How many trials were run and what became of them, how long it took and why it ended."""
    study = report.study
    # A trial that ended with the search did not fail.
    states = ["interrupted" if _was_interrupted(trial) else trial.state for trial in report.trials]
    others = [
        f"{states.count(state)} {word}"
        for state, word in (
            ("out_of_memory", "out of memory"),
            ("failed", "failed"),
            ("interrupted", "interrupted"),
            ("running", "running"),
        )
        if state in states
    ]
    text = plural(len(states), "trial")
    if others:
        text += f" ({', '.join(others)})"
    if study.ended_at is None:
        return text
    return f"{text} in {format_seconds(study.seconds)}; {study.stopped_because or ''}"


def _note_lines(report: Report) -> list[str]:
    return [f"  note: {note}" for note in notes(report)]


def _boundary_lines(report: Report, best: TrialRecord) -> list[str]:
    """What proves that nothing larger fits: the smallest batch of the same arm that does not."""
    over = [
        trial
        for trial in report.trials
        if trial.candidate.arm == best.candidate.arm
        and trial.candidate.per_device_train_batch_size > best.candidate.per_device_train_batch_size
        and isinstance(trial.outcome, OutOfMemory | Completed)
    ]
    if not over:
        facts = data_facts(report.workload)
        following = best.candidate.per_device_train_batch_size + (report.study.request["batch_multiple"] or 8)
        if facts is not None and facts.samples < following:
            return [f"the data has {plural(facts.samples, 'sample')}, so no larger batch was tried"]
        return ["no larger batch was tried in this arm"]
    nearest = min(over, key=lambda trial: trial.candidate.per_device_train_batch_size)
    return [f"batch {nearest.candidate.per_device_train_batch_size} does not fit: {verdict(report, nearest)}"]


def report_document(report: Report) -> Document:
    """The whole study as ``--json`` prints it."""
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
    """Return what is promised of the winner's next run: its speed, with the interval that 95 of 100 runs lie in."""
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
    """One trial under the fixed names of ``--json``; what was not measured is ``None``."""
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
        "tokens_per_second": tokens_per_second(report, measured),
        "step_seconds": measured.step_seconds if measured else None,
        "relative_spread": measured.known_spread if measured else None,
        "micro_steps_run": measured.micro_steps_run if measured else None,
        "peak_allocated_bytes": peaks.peak_allocated_bytes if peaks else None,
        "peak_reserved_bytes": reserved,
        "headroom_bytes": _headroom_bytes(report, trial),
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


def _headroom_bytes(report: Report, trial: TrialRecord) -> int | None:
    """What a completed trial left free of the cap; at least so much where it could reserve no more than the line."""
    measured = measurement(trial)
    if measured is None:
        return None
    if trial.candidate.arm.expandable_segments:
        return report.ceiling.headroom_bytes
    return report.ceiling.cap_bytes - measured.peak_reserved_bytes


def _limited_by(report: Report, trial: TrialRecord) -> str | None:
    """Return what limits a trial's step; the GPU's share of it may be known from another trial of the candidate."""
    measured = measurement(trial)
    if measured is None:
        return None
    share = measured.gpu_busy_share or report.history.busy_share(trial.candidate)
    return what_limits(dataclasses.replace(measured, gpu_busy_share=share)).kind


def tokens_per_second(report: Report, measured: Measurement | None) -> float | None:
    """Return the mean tokens a second of a measurement; ``None`` where samples are no text."""
    if measured is None or not report.is_text:
        return None
    lengths = lengths_of(report.workload)
    return measured.samples_per_second * (lengths.mean if lengths else int(report.workload["seq_len"]))
