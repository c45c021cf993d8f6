"""Put single facts of a study into words: a trial's result, a ratio, the data that was measured."""

from __future__ import annotations

from autotune.core.candidate import Arm, Document
from autotune.core.ceiling import Ceiling
from autotune.core.dataset_spec import DataFacts, DataSpec
from autotune.core.outcome import Completed, Failed, Measurement, OutOfMemory, source_of
from autotune.core.schema import decode
from autotune.core.stop import StopReason
from autotune.results.report import Report, measurement
from autotune.store.records import StudyRecord, TrialRecord


def verdict(report: Report, trial: TrialRecord) -> str:
    """Describe a trial's result in a few words: why it failed, or its speed-up over the baseline."""
    measured, source = measurement(trial), source_of(trial.outcome)
    if report.is_elsewhere(trial):
        return "on another machine"
    match trial.outcome:
        case None:
            return "running"
        case Completed(disturbed=why) | OutOfMemory(disturbed=why) if why:
            return f"disturbed: {'; '.join(why)}"
        case OutOfMemory(where=where):
            ran_out = "out of memory" if where == "device" else "out of host memory"
            return f"{ran_out} ({source.describe()})" if source else ran_out
        case Failed(reason=reason, message=message):
            return f"failed: {message}" if reason in ("error", "non_finite") else f"{reason}: {message}"
        case _ if not report.feasible(trial):
            return why_not_feasible(measured, trial.candidate.arm, report.ceiling) if measured else "does not fit"
    if trial.id == report.study.baseline_trial_id:
        words = ["baseline"]
    else:
        baseline = report.speed(report.baseline)
        words = [times(measured.samples_per_second / baseline.samples_per_second)] if measured and baseline else []
    if trial.id == report.study.best_trial_id:
        words.append("best")
    return " ".join([*words, f"({source.describe()})"] if source else words)


def state_of(study: StudyRecord) -> str:
    """Return a study's state in a word or two: one whose budget was spent is not finished."""
    if study.state != "finished" or study.stop_reason not in (StopReason.TRIALS, StopReason.TIME):
        return study.state
    if study.best_trial_id is not None and study.best_trial_id == study.baseline_trial_id:
        return "baseline only"
    return "budget spent"


def why_not_feasible(measured: Measurement, arm: Arm, ceiling: Ceiling) -> str:
    """Say in a few words what an infeasible trial uses too much of."""
    peak = measured.judged_bytes(arm)
    if ceiling.fits(peak, measured.context_bytes):
        return "no room for a copy of DDP's buckets"
    return "low headroom" if peak <= ceiling.cap_bytes else "does not fit"


def times(ratio: float) -> str:
    """Format a ratio: ``7.45×``, ``12.4×``."""
    return f"{ratio:.2f}×" if ratio < 9.995 else f"{ratio:,.1f}×"


def describe_data(workload: Document) -> str:
    """Describe the samples that were measured: ``512 tokens, full length``."""
    data = decode(workload["data"], DataSpec) if workload.get("data") else None
    if data is not None and data.facts is not None:
        return _describe_own(data, data.facts, int(workload["seq_len"]))
    if workload["task"] == "own":
        return f"as {workload['model']} makes it"
    if workload["task"] == "image-classification":
        return "synthetic images"
    if workload["task"] == "speech-seq2seq":
        return f"synthetic speech, {workload['seq_len']} target tokens"
    padding = workload["padding"]
    return f"{workload['seq_len']} tokens, " + (f"{padding:.0%} padding" if padding else "full length")


def _describe_own(data: DataSpec, facts: DataFacts, seq_len: int) -> str:
    """Return ``train.jsonl, 4,000 samples, 12 to 512 tokens (median 180), padded to the longest``."""
    words = f"{data.label}, {facts.samples:,} samples"
    if facts.lengths is None:
        return words
    words += f", {facts.lengths.shortest} to {facts.lengths.longest} tokens (median {facts.lengths.median}), padded to "
    words += f"{seq_len}" if data.padding == "max_length" else "the longest of a batch"
    if data.pad_to_multiple_of:
        words += f" and a multiple of {data.pad_to_multiple_of}"
    return words + (", grouped by length" if data.group_by_length else "")
