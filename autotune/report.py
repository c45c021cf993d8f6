"""A study as people and programs read it: one value, one JSON document, a table and a few sentences."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any

from autotune.data import DataFacts, DataSpec, Lengths, facts_from_document
from autotune.device import Ceiling
from autotune.errors import UnknownStudyError
from autotune.loader import LOADER_BOUND, waits_for_data
from autotune.store import Store, StudyRecord, TrialRecord, damaged
from autotune.trial import Completed, Document, Failed, Measurement, OutOfMemory, source_of
from autotune.units import format_bytes, format_rate, format_seconds

# The median of a few steps and that of 150 differed by no more than this where a step takes long
# enough; a wider interval than that deserves a word.
_WIDE_SPREAD = 0.03


@dataclass(frozen=True)
class Report:
    """Everything that is recorded of one study."""

    study: StudyRecord
    workload: Document
    environment: Document
    ceiling: Ceiling
    trials: tuple[TrialRecord, ...]

    def trial(self, trial_id: str | None) -> TrialRecord | None:
        """The trial of this id."""
        return None if trial_id is None else self._by_id.get(trial_id)

    @functools.cached_property
    def _by_id(self) -> dict[str, TrialRecord]:
        return {trial.id: trial for trial in self.trials}

    @property
    def best(self) -> TrialRecord | None:
        """The winner, once the search has ended or paused with one."""
        return self.trial(self.study.best_trial_id)

    @property
    def baseline(self) -> TrialRecord | None:
        """The trial of the ``TrainingArguments`` defaults."""
        return self.trial(self.study.baseline_trial_id)

    @property
    def is_text(self) -> bool:
        """Whether tokens are what a sample is counted in."""
        return self.workload["task"] not in ("image-classification", "speech-seq2seq", "own")

    @property
    def baseline_name(self) -> str:
        """Whose settings the baseline ran."""
        return "the TrainingArguments defaults" if self.workload["task"] != "own" else "your own settings"

    def feasible(self, trial: TrialRecord) -> bool:
        """Completed under the line."""
        measured = measurement(trial)
        return measured is not None and self.ceiling.fits(measured.judged_bytes(trial.candidate.arm))

    def speedup(self) -> float | None:
        """The winner's samples a second over the baseline's."""
        best, baseline = measurement(self.best), measurement(self.baseline)
        return best.samples_per_second / baseline.samples_per_second if best and baseline else None


def measurement(trial: TrialRecord | None) -> Measurement | None:
    """A trial's measurement, where it completed."""
    return trial.outcome.measurement if trial and isinstance(trial.outcome, Completed) else None


def load_report(store: Store, name: str) -> Report:
    """The report of the study of this name; ``UnknownStudyError`` where there is none."""
    study = store.study(name)
    if study is None:
        known = [summary.study.name for summary in store.studies()[:5]]
        raise UnknownStudyError(
            f"there is no study {name!r} in {store.label}",
            f"the newest are {', '.join(known)}" if known else "run autotune search first",
        )
    try:
        return Report(
            study,
            store.workload(study.workload_id),
            store.environment(study.environment_id),
            Ceiling.from_document(study.ceiling),
            tuple(store.trials(study.id)),
        )
    except ValueError as error:
        raise damaged(store.label) from error


def verdict(report: Report, trial: TrialRecord) -> str:
    """What came of a trial in a few words: why it has no result, or how it compares with the baseline."""
    measured, source = measurement(trial), source_of(trial.outcome)
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
            return "low headroom"
    if trial.id == report.study.baseline_trial_id:
        words = ["baseline"]
    else:
        baseline = measurement(report.baseline)
        words = [times(measured.samples_per_second / baseline.samples_per_second)] if measured and baseline else []
    if trial.id == report.study.best_trial_id:
        words.append("best")
    return " ".join([*words, f"({source.describe()})"] if source else words)


def times(ratio: float) -> str:
    """``7.45×``, ``12.4×``."""
    return f"{ratio:.2f}×" if ratio < 9.995 else f"{ratio:,.1f}×"


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
        "tokens_per_second": _tokens_per_second(report, measured),
        "step_seconds": measured.step_seconds if measured else None,
        "relative_spread": measured.relative_spread if measured else None,
        "micro_steps_run": measured.micro_steps_run if measured else None,
        "peak_allocated_bytes": peaks.peak_allocated_bytes if peaks else None,
        "peak_reserved_bytes": reserved,
        "headroom_bytes": _headroom_bytes(report, trial),
        "device_used_bytes": measured.device_used_bytes if measured else None,
        "compile_seconds": measured.compile_seconds if measured else None,
        "allocation_retries": measured.allocation_retries if measured else None,
        "skipped_steps": measured.skipped_steps if measured else None,
        "joules_per_sample": measured.joules_per_sample if measured else None,
        "data_seconds": measured.data_seconds if measured else None,
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


def _tokens_per_second(report: Report, measured: Measurement | None) -> float | None:
    if measured is None or not report.is_text:
        return None
    lengths = _lengths(report.workload)
    return measured.samples_per_second * (lengths.mean if lengths else int(report.workload["seq_len"]))


def _facts(workload: Document) -> DataFacts | None:
    """What is known of the user's own data, where there is some."""
    data = workload.get("data") or {}
    return facts_from_document(data["facts"]) if data.get("facts") else None


def _lengths(workload: Document) -> Lengths | None:
    facts = _facts(workload)
    return facts.lengths if facts else None


def report_document(report: Report) -> Document:
    """The whole study as ``--json`` prints it."""
    study = report.study

    def of(trial: TrialRecord | None) -> Document | None:
        return trial_document(report, trial) if trial else None

    environment = {k: v for k, v in report.environment.items() if k != "training_arguments_fields"}
    return {
        "study": study.name,
        "state": study.state,
        "stopped_because": study.stopped_because,
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
        "best": of(report.best),
        "baseline": of(report.baseline),
        "trials": [trial_document(report, trial) for trial in report.trials],
        "notes": notes(report),
    }


def notes(report: Report) -> list[str]:
    """What the reader should know of how far the numbers reach."""
    found: list[str] = []
    request = report.study.request
    best, measured = report.best, measurement(report.best)
    if best is not None and request["batch_multiple"] is None and best.candidate.per_device_train_batch_size % 8:
        found.append(
            f"the per-device batch is {best.candidate.per_device_train_batch_size}, no multiple of 8: "
            + _why_no_multiple_of_8(request)
        )
    if measured and best and measured.micro_steps_run < best.candidate.gradient_accumulation_steps:
        found.append(
            f"the winner's steps were measured with {measured.micro_steps_run} of its "
            f"{best.candidate.gradient_accumulation_steps} micro-steps and added up"
        )
    if measured and measured.relative_spread > _WIDE_SPREAD:
        found.append(f"the winner's step time is uncertain by ± {measured.relative_spread:.0%}: the machine was noisy")
    if best is not None and measured and request["objective"] == "throughput":
        found += _faster_ones(report, best, measured)
    found += compiled_notes(report)
    found += _own_batch_notes(report)
    found += _reused(report)
    if request["world_size"] > 1:
        found.append(f"measured on one device; {request['world_size']} of them also spend time on exchanging gradients")
    found += _disturbances(report)
    if report.study.state != "finished":
        found.append(f"the search is {report.study.state}: autotune resume {report.study.name} continues it")
    return found


def _disturbances(report: Report) -> list[str]:
    """How many trials others disturbed, and whether the winner is one of them."""
    marked = [t for t in report.trials if isinstance(t.outcome, Completed | OutOfMemory) and t.outcome.disturbed]
    if not marked:
        return []
    last = marked[-1].outcome
    why = "; ".join(last.disturbed) if isinstance(last, Completed | OutOfMemory) else ""
    found = [f"{len(marked)} trials were disturbed and run again as far as that helped; the last one: {why}"]
    if report.best in marked:
        found.append("the winner itself was measured under a disturbance: it may be faster than it looks")
    return found


def compiled_notes(report: Report) -> list[str]:
    """When the fastest compiled trial pays for its start-up, against the best that starts at once."""
    found = [(m, t) for t in report.trials if report.feasible(t) and (m := measurement(t))]
    compiled = [(m, t) for m, t in found if t.candidate.arm.torch_compile]
    plain = [(m, t) for m, t in found if not t.candidate.arm.torch_compile]
    if not compiled or not plain:
        return []
    (fast, trial), (usual, other) = (max(pairs, key=lambda p: p[0].samples_per_second) for pairs in (compiled, plain))
    start = fast.compile_seconds or 0.0
    name = f"{trial.candidate.describe()} takes {format_seconds(start)} to compile"
    # Both in seconds a sample, since their steps need not be of the same size.
    gain = 1 / usual.samples_per_second - 1 / fast.samples_per_second
    if gain <= 0:
        return [f"{name} and is then no faster than {other.candidate.describe()}"]
    steps = math.ceil(start / (gain * trial.candidate.samples_per_step))
    return [f"{name}, which pays after {steps:,} optimizer steps against {other.candidate.describe()}"]


def _own_batch_notes(report: Report) -> list[str]:
    """That the user's own settings train at another effective batch than the search."""
    baseline, request = report.baseline, report.study.request
    if baseline is None or report.workload["task"] != "own" or request["effective_batch"] is None:
        return []
    own = baseline.candidate.samples_per_step * request["world_size"]
    if own == request["effective_batch"]:
        return []
    return [f"your own settings train at effective batch {own}, not {request['effective_batch']}"]


def _reused(report: Report) -> list[str]:
    """How much was measured by earlier searches, and what of the answer was worked out from them."""
    sources = [source for trial in report.trials if (source := source_of(trial.outcome))]
    if not sources:
        return []
    names = sorted({source.study for source in sources})
    where = ", ".join(names[:3]) + (" …" if len(names) > 3 else "")
    found = [f"{_plural(len(sources), 'trial')} of earlier searches ({where}) reused; --fresh measures anew"]
    for name, trial in (("winner", report.best), ("baseline", report.baseline)):
        source = source_of(trial.outcome) if trial else None
        if source is not None and source.derived:
            found.append(f"the {name}'s speed is {source.describe()}, of another accumulation")
    return found


def _plural(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


def _faster_ones(report: Report, best: TrialRecord, measured: Measurement) -> list[str]:
    """Why a trial that measured more samples a second is not the winner."""
    feasible = [
        (found.samples_per_second, t) for t in report.trials if report.feasible(t) and (found := measurement(t))
    ]
    speed, fastest = max(feasible, key=lambda pair: pair[0])
    gain = speed / measured.samples_per_second - 1
    if fastest.candidate == best.candidate or gain <= 0:
        return []
    if fastest.id == report.study.baseline_trial_id:
        return [f"the baseline was faster, by {gain:.1%}, but the options leave it out of the search"]
    return [f"{fastest.candidate.describe()} was faster by {gain:.1%}, which is within the noise"]


def _why_no_multiple_of_8(request: dict[str, Any]) -> str:
    effective = request["effective_batch"]
    if effective and (effective // request["world_size"]) % 8:
        return "none divides the effective batch"
    return "those that divide the effective batch need too much memory" if effective else "none fits"


def describe_data(workload: Document) -> str:
    """The measured samples in words: ``512 tokens, full length``."""
    data = DataSpec.from_document(workload["data"]) if workload.get("data") else None
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
    """``train.jsonl, 4,000 samples, 12 to 512 tokens (median 180), padded to the longest``."""
    words = f"{data.label}, {facts.samples:,} samples"
    if facts.lengths is None:
        return words
    words += f", {facts.lengths.shortest} to {facts.lengths.longest} tokens (median {facts.lengths.median}), padded to "
    words += f"{seq_len}" if data.padding == "max_length" else "the longest of a batch"
    if data.pad_to_multiple_of:
        words += f" and a multiple of {data.pad_to_multiple_of}"
    return words + (", grouped by length" if data.group_by_length else "")


def summary_lines(report: Report) -> list[str]:
    """The answer in a few lines, for a terminal or a file."""
    best, measured = report.best, measurement(report.best)
    request = report.study.request
    if best is None or measured is None:
        return [f"No feasible trial in the study {report.study.name}: {_counts(report)}", *_note_lines(report)]
    lines = [
        f"Best: per-device batch {best.candidate.per_device_train_batch_size} × accumulation "
        f"{best.candidate.gradient_accumulation_steps}"
        + (f" × {request['world_size']} devices" if request["world_size"] > 1 else "")
        + f", {best.candidate.arm.describe()}"
    ]
    tokens = _tokens_per_second(report, measured)
    lines.append(
        f"  {format_rate(measured.samples_per_second)} samples/s ± {measured.relative_spread:.1%}"
        + (f", {format_rate(tokens)} tokens/s" if tokens else "")
        + f"; {format_seconds(measured.step_seconds)} an optimizer step"
    )
    speedup, baseline = report.speedup(), measurement(report.baseline)
    if speedup is not None and baseline is not None and report.baseline is not None:
        lines.append(
            f"  {speedup:.2f} × {report.baseline_name} "
            f"({report.baseline.candidate.describe()}: {format_rate(baseline.samples_per_second)} samples/s)"
        )
    elif request["measure_baseline"] and request["objective"] == "throughput":
        lines.append(f"  {report.baseline_name} did not complete, so there is no speed-up to tell")
    lines.append(_memory_line(report, best, measured))
    if measured.joules_per_sample is not None:
        watts = measured.joules_per_sample * measured.samples_per_second
        lines.append(f"  {measured.joules_per_sample:.3g} J a sample; the whole GPU drew {watts:.0f} W meanwhile")
    lines += _data_lines(measured)
    if request["objective"] == "max-batch":
        lines += _boundary_lines(report, best)
    return [*lines, f"  {_counts(report)}", *_note_lines(report)]


def _memory_line(report: Report, best: TrialRecord, measured: Measurement) -> str:
    """The winner's peak and headroom; where segments expand, what proves that it fits."""
    cap, spare = report.ceiling.cap_bytes, _headroom_bytes(report, best) or 0
    headroom = f"headroom {format_bytes(spare)} ({spare / cap:.0%})"
    if best.candidate.arm.expandable_segments:
        return (
            f"  {format_bytes(measured.peak_allocated_bytes)} allocated at the peak, in a trial that could reserve "
            f"{format_bytes(report.ceiling.line_bytes)} of {format_bytes(cap)}; {headroom}"
        )
    reserved = format_bytes(measured.peak_reserved_bytes)
    return f"  {reserved} of {format_bytes(cap)} reserved at the peak, measured; {headroom}"


def _data_lines(measured: Measurement) -> list[str]:
    """What the user's own data adds: the worst batches, and whether the loader keeps up."""
    if measured.worst_batch_peak_reserved_bytes is None:
        return []
    lines = []
    if measured.worst_batch_tokens is not None:
        seconds = measured.worst_batch_step_seconds
        lines.append(
            f"  after steps of the longest samples, padded to {measured.worst_batch_tokens} tokens: "
            f"{format_bytes(measured.worst_batch_peak_reserved_bytes)}"
            + (f", {format_seconds(seconds)} a step; " if seconds else "; ")
            + "the speed is that of an epoch's mean batch"
        )
    share = waits_for_data(measured)
    which = "the data loader" if share > LOADER_BOUND else "computing, not the data loader,"
    return [*lines, f"  {which} is the bottleneck: {share:.1%} of a step is spent waiting for data"]


def _counts(report: Report) -> str:
    """How many trials were run and what became of them, how long it took and why it ended."""
    study = report.study
    states = [trial.state for trial in report.trials]
    others = [
        f"{states.count(state)} {word}"
        for state, word in (("out_of_memory", "out of memory"), ("failed", "failed"), ("running", "running"))
        if state in states
    ]
    text = f"{len(states)} trial{'' if len(states) == 1 else 's'}"
    if others:
        text += f" ({', '.join(others)})"
    if study.ended_at is None:
        return text
    return f"{text} in {format_seconds(study.seconds)}; {study.stopped_because}"


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
        return ["  no larger batch was tried in this arm"]
    nearest = min(over, key=lambda trial: trial.candidate.per_device_train_batch_size)
    return [f"  batch {nearest.candidate.per_device_train_batch_size} does not fit: {verdict(report, nearest)}"]
