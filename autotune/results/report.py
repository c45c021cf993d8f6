"""A study as one value: its trials, what came of each, what was trained."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from autotune.core.candidate import PRECISIONS, Document
from autotune.core.dataset_spec import DataFacts, DataSpec, Lengths, facts_from_document
from autotune.core.errors import StorageError
from autotune.core.outcome import Completed, Failed, Measurement, OutOfMemory, source_of
from autotune.core.workload import BYTES_PER_ELEMENT, TASKS
from autotune.devices import Ceiling
from autotune.estimate.history import History, ran_in_full
from autotune.estimate.pooling import Pool, Speed, Tried
from autotune.store import Store, StudyRecord, TrialRecord, damaged
from autotune.store.repeats import Repeats


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
        return measured is not None and measured.fits(trial.candidate.arm, self.ceiling)

    @functools.cached_property
    def history(self) -> History:
        """The trials that count, combined as the search combined them."""
        history, repeats = History(self.ceiling), Repeats()
        for trial in self.trials:
            counts = repeats.take(trial) if trial.outcome is not None else None
            if counts is not None and counts.outcome is not None:
                in_full = ran_in_full(counts.candidate, counts.outcome)
                history.add(Tried(counts.id, counts.candidate, counts.outcome, in_full))
        return history

    def speed(self, trial: TrialRecord | None) -> Speed | None:
        """Return how fast a trial's candidate is over all its processes, and what its next run will reach.

        ``None`` where the trial did not complete.
        """
        if trial is None or trial.outcome is None or measurement(trial) is None:
            return None
        alone = Tried(trial.id, trial.candidate, trial.outcome)
        # The history leaves out what does not fit.
        return self.history.speed(trial.candidate) or Pool([alone]).speed(trial.candidate)

    def pooled(self, trial: TrialRecord | None) -> Measurement | None:
        """Return a trial's measurement with the speed and the peaks of all processes of its candidate."""
        if trial is None or measurement(trial) is None:
            return None
        found = self.history.believed({trial.candidate})
        return found[0].measurement if found else measurement(trial)

    def speedup(self) -> float | None:
        """Return the winner's samples a second over the baseline's."""
        best, baseline = self.speed(self.best), self.speed(self.baseline)
        return best.samples_per_second / baseline.samples_per_second if best and baseline else None


def measurement(trial: TrialRecord | None) -> Measurement | None:
    """A trial's measurement, where it completed."""
    return trial.outcome.measurement if trial and isinstance(trial.outcome, Completed) else None


def load_report(store: Store, name: str) -> Report:
    """Return the report of the study of this name.

    Raises ``UnknownStudyError`` where there is none and ``StorageError`` where its record lacks what a report shows.
    """
    study = store.existing_study(name)
    try:
        report = Report(
            study,
            store.workload_of(study),
            store.environment(study.environment_id),
            Ceiling.from_document(study.ceiling),
            tuple(store.trials(study.id)),
        )
    except ValueError as error:
        raise damaged(store.label) from error
    problem = _problem(report)
    if problem is not None:
        raise StorageError(
            f"the study {name!r} in {store.label} is damaged: {problem}",
            "restore the database from a copy, upgrade autotune if a newer one wrote it, or search again",
        )
    return report


# What is read of the recorded documents without asking whether it is there, with its type.
_ENVIRONMENT = {"packages": dict, "training_arguments_fields": list, "device_kind": str, "device_name": str}
_WORKLOAD = {"model": str, "task": str, "seq_len": int, "dtype": str}
_REQUEST = ("effective_batch", "world_size", "objective", "batch_multiple", "measure_baseline", "seed")


def _problem(report: Report) -> str | None:
    """Return what is wrong with a record, in words; ``None`` where it is whole."""
    request = report.study.request
    for what, document, parts in (
        ("environment", report.environment, _ENVIRONMENT),
        ("workload", report.workload, _WORKLOAD),
    ):
        for name, kind in parts.items():
            if not isinstance(document.get(name), kind):
                return f"its {what} has no {name}"
    missing = next((name for name in _REQUEST if name not in request), None)
    if missing is not None:
        return f"its request has no {missing}"
    if not {"torch", "transformers"}.issubset(report.environment["packages"]):
        return "its environment has no versions of torch and transformers"
    for name, known in (("task", (*TASKS, "own")), ("dtype", BYTES_PER_ELEMENT)):
        if report.workload[name] not in known:
            return f"its {name} {report.workload[name]!r} is not known"
    for trial in report.trials:
        measured = measurement(trial)
        if min(trial.candidate.per_device_train_batch_size, trial.candidate.gradient_accumulation_steps) < 1:
            return f"trial {trial.number} has the batch {trial.candidate.describe()}"
        if trial.candidate.arm.precision not in PRECISIONS:
            return f"trial {trial.number} has the precision {trial.candidate.arm.precision!r}, which is not known"
        if measured is not None and not _is_rate(measured.samples_per_second, measured.step_seconds):
            return f"trial {trial.number} is completed without a step time and a speed above zero"
    return None


def _is_rate(*values: object) -> bool:
    return all(isinstance(value, int | float) and 0 < value < math.inf for value in values)


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
            peak = measured.judged_bytes(trial.candidate.arm) if measured else 0
            return "low headroom" if peak <= report.ceiling.cap_bytes else "does not fit"
    if trial.id == report.study.baseline_trial_id:
        words = ["baseline"]
    else:
        baseline = report.speed(report.baseline)
        words = [times(measured.samples_per_second / baseline.samples_per_second)] if measured and baseline else []
    if trial.id == report.study.best_trial_id:
        words.append("best")
    return " ".join([*words, f"({source.describe()})"] if source else words)


def times(ratio: float) -> str:
    """``7.45×``, ``12.4×``."""
    return f"{ratio:.2f}×" if ratio < 9.995 else f"{ratio:,.1f}×"


def data_facts(workload: Document) -> DataFacts | None:
    """What is known of the user's own data, where there is some."""
    data = workload.get("data") or {}
    return facts_from_document(data["facts"]) if data.get("facts") else None


def lengths_of(workload: Document) -> Lengths | None:
    """How long the samples of the user's own data are, where they have lengths."""
    facts = data_facts(workload)
    return facts.lengths if facts else None


def is_script(task: str, model: str) -> bool:
    """Whether a script of the user's own trained, which takes options, and no function that builds a Trainer."""
    return task == "own" and ":" not in model


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
