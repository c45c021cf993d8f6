"""Put single facts of a study into words: a trial's result, a ratio, the data that was measured."""

from __future__ import annotations

from collections.abc import Iterator

from autotune.core.candidate import Arm, Candidate, Document
from autotune.core.ceiling import Ceiling
from autotune.core.dataset_spec import DataFacts, DataSpec, describe_packing
from autotune.core.outcome import Completed, Failed, Measurement, OutOfMemory, source_of
from autotune.core.schema import decode
from autotune.core.units import GIB, format_bytes, format_rate, format_seconds, plural
from autotune.core.workload import Workload
from autotune.estimate.bottleneck import DATA_BOUND, what_limits
from autotune.estimate.pooling import Speed
from autotune.results.report import Report, measurement
from autotune.space.space import waits_for_data
from autotune.store.records import StopReason, StudyRecord, TrialRecord

_NOTICEABLE_SECONDS = 1.0
_NOTICEABLE_SHARE = 0.1
# Host memory to build a model, above which a line tells it. The libraries of a trial take 1 to 2 GiB.
_MUCH_HOST_BYTES = 4 * GIB


def verdict(report: Report, trial: TrialRecord) -> str:
    """Describe a trial's result in a few words: why it failed or does not fit, else its speed over the baseline's."""
    measured, source = measurement(trial), source_of(trial.outcome)
    if report.is_elsewhere(trial):
        return "on another machine"
    match trial.outcome:
        case None:
            return "interrupted" if report.study.state == "interrupted" else "running"
        case Completed(disturbed=why) | OutOfMemory(disturbed=why) if why:
            return f"disturbed: {'; '.join(why)}"
        case OutOfMemory(where=where):
            ran_out = "out of memory" if where == "device" else "out of host memory"
            return f"{ran_out} ({source.describe()})" if source else ran_out
        case Failed(reason=reason, message=message):
            what = "failed" if reason in ("error", "non_finite") else reason
            return message if message.startswith(what) else f"{what}: {message}"
        case _ if not report.feasible(trial):
            return why_not_feasible(measured, trial.candidate.arm, report.ceiling) if measured else "does not fit"
    if trial.id == report.study.baseline_trial_id:
        words = ["baseline"]
    else:
        speed, baseline = report.speed(trial), report.speed(report.baseline)
        words = [times(speed.samples_per_second / baseline.samples_per_second)] if speed and baseline else []
    if trial.id == report.study.best_trial_id:
        words.append("best")
    return " ".join([*words, f"({source.describe()})"] if source else words)


def state_of(study: StudyRecord) -> str:
    """Return a study's state in words: ``budget spent`` where it ended for lack of budget."""
    is_cut = study.state == "finished" and study.stop_reason in (StopReason.TRIALS, StopReason.TIME)
    return "budget spent" if is_cut else study.state


def why_not_feasible(measured: Measurement, arm: Arm, ceiling: Ceiling) -> str:
    """Return in a few words why a completed trial is infeasible: its peak is above the line, or even above the cap."""
    peak = measured.judged_bytes(arm)
    return "low headroom" if peak <= ceiling.cap_bytes else "does not fit"


def times(ratio: float) -> str:
    """Format a ratio: ``7.45×``, ``12.4×``."""
    return f"{ratio:.2f}×" if ratio < 9.995 else f"{ratio:,.1f}×"


def counted_in(workload: Document) -> str:
    """Return the unit of a batch: ``sample``, or ``row`` for packed data."""
    return "row" if (workload.get("data") or {}).get("packing") else "sample"


def rate_unit(workload: Document) -> str:
    """Return the unit of speed: ``samples/s``, or ``rows/s`` for packed data."""
    return f"{counted_in(workload)}s/s"


def describe_data(workload: Document, *, padding_free: bool = False) -> str:
    """Describe the samples that trials train on: ``512 tokens, full length``, or the user's own data."""
    data = decode(workload["data"], DataSpec) if workload.get("data") else None
    if data is not None and data.facts is not None:
        return _describe_own(data, data.facts, int(workload["seq_len"]), padding_free=padding_free)
    if workload["task"] == "own":
        lengths = ((workload.get("source") or {}).get("interface") or {}).get("lengths") or {}
        unread = f", samples of unknown lengths: {lengths['unknown']}" if lengths.get("unknown") else ""
        return f"as {workload['model']} makes it{unread}"
    if workload["task"] == "image-classification":
        return "synthetic images"
    if workload["task"] == "speech-seq2seq":
        return f"synthetic speech, {workload['seq_len']} target tokens"
    padding, images = workload["padding"], workload.get("images")
    words = f"{workload['seq_len']} tokens, " + (f"{padding:.0%} padding" if padding else "full length")
    if not images:
        return words
    side = workload["image_side"]
    return f"{words}, of which {images} image{'s' if images > 1 else ''} of {side} × {side} pixels"


def _describe_own(data: DataSpec, facts: DataFacts, seq_len: int, *, padding_free: bool) -> str:
    """Describe a user's data: ``train.jsonl, 4,000 samples, 12 to 512 tokens (median 180), padded to the longest``."""
    if facts.packed is not None:
        return f"{data.label}, {describe_packing(facts)}; batches are counted in rows"
    words = f"{data.label}, {facts.samples:,} samples"
    if facts.lengths is None:
        return words
    words += f", {facts.lengths.shortest} to {facts.lengths.longest} tokens (median {facts.lengths.median})"
    if padding_free:
        return f"{words}, a batch in one row without padding" + (", grouped by length" if data.group_by_length else "")
    if facts.lengths.stored is not None:
        words += f", {facts.lengths.padding:.0%} of the tokens are padding that the dataset holds"
    words += ", padded to "
    words += f"{seq_len}" if data.padding == "max_length" else "the longest of a batch"
    if data.pad_to_multiple_of:
        words += f" and a multiple of {data.pad_to_multiple_of}"
    return words + (", grouped by length" if data.group_by_length else "")


def searched_lines(report: Report) -> tuple[str, str, str]:
    """Return three lines: the model; the data and the batch; the device and the versions."""
    workload, environment, batch = report.workload, report.environment, report.study.request["effective_batch"]
    packages, driver = environment["packages"], environment.get("driver")
    task = "" if workload["task"] == "own" else f"{workload['task']}, "
    weights = f"{workload['dtype']} weights"
    if workload.get("peft") or workload.get("quantize"):
        weights = Workload.from_document(workload).describe_weights()
    return (
        f"{workload['model']}, {task}{weights}",
        f"{describe_data(workload, padding_free=report.study.request.get('padding_free') == 'on')}; "
        + (f"effective batch {batch}" if batch else "any batch"),
        f"{environment['device_name']}, torch {packages['torch']}, transformers {packages['transformers']}"
        + (f", driver {driver}" if driver else ""),
    )


def detail_lines(report: Report, best: TrialRecord, measured: Measurement) -> Iterator[str]:
    """Yield sentences on the winner's energy, data loading and host memory, and on why its batch is no larger."""
    if measured.joules_per_sample is not None:
        watts, word = measured.joules_per_sample * measured.samples_per_second, counted_in(report.workload)
        drew = "the whole GPU drew" if measured.ranks == 1 else f"the {measured.ranks} GPUs together drew"
        yield f"{measured.joules_per_sample:.3g} J a {word}; {drew} {watts:.0f} W meanwhile"
    if report.workload.get("data") or report.workload["task"] == "own":
        yield from _data_lines(measured, in_one_row=best.candidate.arm.padding_free)
    host_bytes = measured.host_bytes_to_build or 0
    if host_bytes > _MUCH_HOST_BYTES:
        each = "" if measured.ranks == 1 else f" in the first of {measured.ranks} processes"
        yield f"building the model took up to {format_bytes(host_bytes)} of the host's memory{each}"
    if report.study.request["objective"] == "max-batch" or report.study.request["effective_batch"] is None:
        yield from _boundary_lines(report, best)


def _data_lines(measured: Measurement, *, in_one_row: bool) -> Iterator[str]:
    """Yield lines on the user's own data: memory of the largest batches, and time spent waiting for data."""
    if measured.worst_batch_tokens is not None and measured.worst_batch_peak_reserved_bytes is not None:
        seconds = measured.worst_batch_step_seconds
        at_longest, words = measured.worst_batch_peak_reserved_bytes, f"{measured.worst_batch_tokens:,} tokens"
        words += " in one row" if in_one_row else ""
        yield (
            f"{format_bytes(at_longest)} of it after the first steps, on the longest samples ({words}"
            + (f", {format_seconds(seconds)} a step)" if seconds else ")")
            + ("" if at_longest >= measured.peak_reserved_bytes else "; the rest came with batches of other lengths")
            + "; the speed is that of an epoch's mean batch"
        )
    share = waits_for_data(measured)
    waiting = f"{share:.1%} of a step is spent waiting for data"
    if what_limits(measured).kind == "gpu":
        waiting = f"computing, not the data loader, is the bottleneck: {waiting}"
    elif share > DATA_BOUND:
        # With a smaller share, the wait for data may only be the longer one of two short waits.
        waiting = f"the data loader is the bottleneck: {waiting}"
    yield waiting


def run_lines(
    measured: Measurement, candidate: Candidate, unit: str, speed: Speed, other: tuple[str, float] | None
) -> Iterator[str]:
    """Yield the run's duration, compared with that of ``other`` settings (name, speed), and the cost of new shapes."""
    if measured.run_steps is not None:
        samples, epochs = candidate.samples_per_step * measured.run_steps, measured.run_epochs
        seconds = samples / measured.samples_per_second + (measured.compile_seconds or 0.0)
        what = plural(measured.run_steps, "step") if epochs is None else f"{epochs:g} epoch{'' if epochs == 1 else 's'}"
        instead = f" instead of {format_seconds(samples / other[1])} with {other[0]}" if other is not None else ""
        yield f"{what}: {format_seconds(seconds)}{instead}"
    shape_seconds, shapes = measured.new_shape_seconds, measured.epoch_shapes
    if shape_seconds is None:
        return
    if shapes is None:
        if shape_seconds > _NOTICEABLE_SHARE * measured.step_seconds:
            yield (
                f"the first batch of each new shape takes {format_seconds(shape_seconds)} longer, which the speed does "
                "not include: how many shapes an epoch has is not known"
            )
    # Told where the later speed differs by more than the uncertainty, or the epoch is noticeably longer.
    elif 1 / measured.steady_share - 1 > speed.relative_half_width or shape_seconds * shapes >= _NOTICEABLE_SECONDS:
        yield (
            f"{format_rate(measured.steady_samples_per_second)} {unit} once all shapes were seen: the first epoch "
            f"meets about {shapes}, each of which takes {format_seconds(shape_seconds)} longer the first time"
        )


def _boundary_lines(report: Report, best: TrialRecord) -> Iterator[str]:
    """Yield a sentence on why the winner's batch is no larger; nothing where that is not known."""
    request, samples, batch = report.study.request, report.samples, best.candidate.per_device_train_batch_size
    is_max_batch = request["objective"] == "max-batch"
    larger = [trial for trial in report.trials if trial.candidate.per_device_train_batch_size > batch]
    # A larger batch that completed was over the line, or it would have won.
    too_large = [
        trial
        for trial in larger
        if trial.candidate.arm == best.candidate.arm and isinstance(trial.outcome, OutOfMemory | Completed)
    ]
    if is_max_batch and too_large:
        nearest = min(too_large, key=lambda trial: trial.candidate.per_device_train_batch_size)
        yield f"batch {nearest.candidate.per_device_train_batch_size} does not fit: {verdict(report, nearest)}"
    elif samples is not None and not larger and samples < batch + (request["batch_multiple"] or 8):
        yield f"the data has {plural(samples, counted_in(report.workload))}, so no larger batch was tried"
    elif is_max_batch:
        yield "no larger batch was tried in this configuration"


def counts_line(report: Report) -> str:
    """Return a line on the number of trials, their outcomes, the duration and the reason for the end."""
    study = report.study
    # A trial that was ended with its search is recorded as failed.
    states: list[str] = [
        "interrupted" if isinstance(trial.outcome, Failed) and trial.outcome.reason == "interrupted" else trial.state
        for trial in report.trials
    ]
    told = [state for state in ("out_of_memory", "failed", "interrupted", "running") if state in states]
    others = [f"{states.count(state)} {state.replace('_', ' ')}" for state in told]
    text = plural(len(states), "trial")
    if others:
        text += f" ({', '.join(others)})"
    if study.ended_at is None:
        return text
    return f"{text} in {format_seconds(study.seconds)}; {study.stopped_because or ''}"
