"""Summarize a study in a few lines for a terminal or a file."""

from __future__ import annotations

import math

from autotune.core.candidate import Document
from autotune.core.outcome import Completed, Failed, Measurement, OutOfMemory
from autotune.core.statistics import difference
from autotune.core.units import GIB, format_bytes, format_rate, format_seconds, format_spread, plural
from autotune.estimate.bottleneck import describe_limit, what_limits
from autotune.results.expert import computed_in, expert_of, utilization
from autotune.results.report import Report, data_facts
from autotune.results.warnings import notes
from autotune.results.wording import verdict
from autotune.space.dataloader import waits_for_data
from autotune.store.records import TrialRecord

_NOTICEABLE_SECONDS = 1.0
_NOTICEABLE_SHARE = 0.1
# The libraries of a trial take one or two.
_MUCH_HOST_BYTES = 4 * GIB


def summary_lines(report: Report) -> list[str]:
    """Return the result of a study in a few lines."""
    best, measured, speed = report.best, report.pooled(report.best), report.speed(report.best)
    request = report.study.request
    if best is None or measured is None or speed is None:
        told = "No answer yet" if report.study.state == "running" else "No feasible trial"
        return [f"{told} in the study {report.study.name}: {counts_line(report)}", *_note_lines(report)]
    lines = [
        f"Best: per-device batch {best.candidate.per_device_train_batch_size} × accumulation "
        f"{best.candidate.gradient_accumulation_steps}"
        + (f" × {request['world_size']} devices" if request["world_size"] > 1 else "")
        + f", {best.candidate.arm.describe()}"
    ]
    tokens = report.tokens_per_second(measured)
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
    if (expert := expert_of(report)) is not None and expert.speedup is not None:
        lines.append(f"  {expert.describe()}")
    if speedup is None and request["measure_baseline"] and request["objective"] == "throughput":
        lines.append(f"  {report.baseline_name} did not complete, so the speed-up is not known")
    if request["objective"] == "throughput":
        lines += [f"  {line}" for line in runner_up_lines(report, best)]
    limit = describe_limit(best.candidate, measured)
    share = utilization(report, measured, best.candidate.arm)
    if share is not None:
        precision = computed_in(best.candidate.arm.precision, report.workload["dtype"])
        lines.append(f"  {share:.0%} of the GPU's rated arithmetic in {precision} (MFU: linear layers, no attention)")
    details = [_memory_line(report, best, measured), limit, *detail_lines(report, best, measured)]
    lines += [f"  {line}" for line in details if line is not None]
    left_out = [f"  not tried: {each.describe()}" for each in report.study.left_out]
    return [*lines, f"  {counts_line(report)}", *left_out, *_note_lines(report)]


def runner_up_lines(report: Report, best: TrialRecord) -> list[str]:
    """Compare the winner with the fastest of the others, and say whether their speeds can be told apart."""
    others = [tried for tried in report.history.believed() if tried.candidate != best.candidate]
    if report.baseline is not None:
        # Above, the winner is compared with it.
        others = [tried for tried in others if tried.candidate != report.baseline.candidate]
    speeds = [(found, each.candidate) for each in others if (found := report.history.speed(each.candidate))]
    own = report.history.speed(best.candidate)
    if not speeds or own is None:
        return []
    speed, runner_up = max(speeds, key=lambda pair: pair[0].samples_per_second)
    gain = difference(speed.log_sample_seconds, own.log_sample_seconds)
    ratio, width = math.exp(gain.mean), gain.half_width()
    words = f"{ratio:.2f} ± {ratio * width:.2f} × the next fastest ({runner_up.describe()})"
    if abs(gain.mean) > width:
        return [words]
    return [f"{words}: " + ("not distinguishable" if ratio >= 1 else "as fast, and the plainer is preferred")]


def detail_lines(report: Report, best: TrialRecord, measured: Measurement) -> list[str]:
    """Return more about the winner: energy, waiting for data, the first epoch, the boundary of the largest batch."""
    lines = []
    if measured.joules_per_sample is not None:
        watts = measured.joules_per_sample * measured.samples_per_second
        drew = "the whole GPU drew" if measured.ranks == 1 else f"the {measured.ranks} GPUs together drew"
        lines.append(f"{measured.joules_per_sample:.3g} J a sample; {drew} {watts:.0f} W meanwhile")
    lines += [*_bucket_copy_lines(measured), *_data_lines(measured, report.workload), *_first_epoch_lines(measured)]
    if (measured.host_bytes_to_build or 0) > _MUCH_HOST_BYTES:
        lines.append(
            f"building the model took up to {format_bytes(measured.host_bytes_to_build or 0)} of the host's memory"
        )
    if report.study.request["objective"] == "max-batch":
        lines += _boundary_lines(report, best)
    return lines


def _memory_line(report: Report, best: TrialRecord, measured: Measurement) -> str:
    """Return the winner's peak memory and headroom; with expandable segments, the line that its trial ran under."""
    cap = report.ceiling.cap_bytes
    is_expandable = best.candidate.arm.expandable_segments
    spare = report.ceiling.headroom_bytes if is_expandable else cap - measured.peak_reserved_bytes
    headroom = f"headroom {format_bytes(spare)} ({spare / cap:.0%})"
    if is_expandable:
        return (
            f"{format_bytes(measured.peak_allocated_bytes)} allocated at the peak, in a trial that could reserve "
            f"{format_bytes(report.ceiling.line_bytes)} of {format_bytes(cap)}; {headroom}"
        )
    reserved = format_bytes(measured.peak_reserved_bytes)
    processes = report.history.processes(best.candidate)
    measured_in = f"the most of {processes} processes" if processes > 1 else "measured"
    return f"{reserved} of {format_bytes(cap)} reserved at the peak, {measured_in}; {headroom}"


def _bucket_copy_lines(measured: Measurement) -> list[str]:
    """Return what the trial reserved in the step in which DDP held its gradient buckets twice, if it did."""
    reserved_bytes, copy_bytes = measured.peak_reserved_with_bucket_copy_bytes, measured.bucket_copy_bytes
    if reserved_bytes is None or copy_bytes is None:
        return []
    return [
        f"one step reserved {format_bytes(reserved_bytes)}: DDP held the {format_bytes(copy_bytes)} of its "
        "gradient buckets twice there, which happens at most once in a training"
    ]


def _data_lines(measured: Measurement, workload: Document) -> list[str]:
    """Return what concerns the user's own data: memory of the largest batches, and waiting for the data loader."""
    if not workload.get("data") and workload["task"] != "own":
        return []
    lines = []
    if measured.worst_batch_tokens is not None and measured.worst_batch_peak_reserved_bytes is not None:
        seconds = measured.worst_batch_step_seconds
        at_longest, words = measured.worst_batch_peak_reserved_bytes, f"{measured.worst_batch_tokens} tokens"
        lines.append(
            f"{format_bytes(at_longest)} of it after the first steps, on the longest samples ({words}"
            + (f", {format_seconds(seconds)} a step)" if seconds else ")")
            + ("" if at_longest >= measured.peak_reserved_bytes else "; the rest came with batches of other lengths")
            + "; the speed is that of an epoch's mean batch"
        )
    share = waits_for_data(measured)
    told = f"{share:.1%} of a step is spent waiting for data"
    which = {"data": "the data loader", "gpu": "computing, not the data loader,"}.get(what_limits(measured).kind)
    return [*lines, told if which is None else f"{which} is the bottleneck: {told}"]


def _first_epoch_lines(measured: Measurement) -> list[str]:
    """Return the extra time of padded lengths that are new to the GPU, where it is noticeable."""
    each, count = measured.new_length_seconds, measured.epoch_lengths
    if each is None:
        return []
    if count is None:
        # The lengths of an epoch are not known for the user's own code.
        told = (
            f"the first batch of each new shape takes {format_seconds(each)} longer, which the speed does not include: "
            "a first epoch with many shapes is slower"
        )
        return [told] if each > _NOTICEABLE_SHARE * measured.step_seconds else []
    if each * count < _NOTICEABLE_SECONDS:
        return []
    return [
        f"the first epoch takes about {format_seconds(each * count)} longer: {format_seconds(each)} for each of its "
        f"{count} padded lengths (--pad-to-multiple-of makes fewer)"
    ]


def _was_interrupted(trial: TrialRecord) -> bool:
    return isinstance(trial.outcome, Failed) and trial.outcome.reason == "interrupted"


def counts_line(report: Report) -> str:
    """Return how many trials were run, how they ended, how long it took and why the search ended."""
    study = report.study
    # A trial that was ended together with the search did not fail.
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
    """Return the smallest larger batch of the winner's arm that does not fit."""
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
        return ["no larger batch was tried in this configuration"]
    nearest = min(over, key=lambda trial: trial.candidate.per_device_train_batch_size)
    return [f"batch {nearest.candidate.per_device_train_batch_size} does not fit: {verdict(report, nearest)}"]
