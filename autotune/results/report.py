"""Load a study (a search with its trials) from the database as one value, and answer questions about its result."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from autotune.core.candidate import Candidate, Document
from autotune.core.ceiling import Ceiling
from autotune.core.dataset_spec import DataFacts
from autotune.core.errors import StorageError, TooNoisyError
from autotune.core.measured_steps import accepts_noise
from autotune.core.outcome import Completed, Measurement
from autotune.core.schema import decode
from autotune.core.training_source import TrainingSource, read_source
from autotune.core.workload import BYTES_PER_ELEMENT, TASKS
from autotune.estimate.history import History, ran_in_full
from autotune.estimate.noise import too_noisy
from autotune.estimate.pooling import Deviations, Kind, Pool, Speed, Tried, deviations
from autotune.store.engine import damaged
from autotune.store.records import Repeats, StudyRecord, StudySummary, TrialRecord
from autotune.store.repository import Store


@dataclass(frozen=True)
class Report:
    """Everything that is recorded of one study, and what follows from it."""

    study: StudyRecord
    workload: Document
    environment: Document
    ceiling: Ceiling
    trials: tuple[TrialRecord, ...]
    before: Mapping[Kind, Deviations] = field(default_factory=dict)
    """How much repeated processes of one candidate had differed in speed on this machine before the study."""

    def trial(self, trial_id: str | None) -> TrialRecord | None:
        """Return the trial with this id; ``None`` where there is none."""
        return None if trial_id is None else self._trials_by_id.get(trial_id)

    @functools.cached_property
    def _trials_by_id(self) -> dict[str, TrialRecord]:
        return {trial.id: trial for trial in self.trials}

    @property
    def best(self) -> TrialRecord | None:
        """The winner; ``None`` until the search ends or pauses with a winner."""
        return self.trial(self.study.best_trial_id)

    @property
    def baseline(self) -> TrialRecord | None:
        """The trial of the ``TrainingArguments`` defaults, or of the user's own settings."""
        return self.trial(self.study.baseline_trial_id)

    @property
    def is_text(self) -> bool:
        """Whether the model is given by name and its samples are text."""
        return self.workload["task"] not in ("image-classification", "speech-seq2seq", "own")

    @property
    def baseline_name(self) -> str:
        """The name of the baseline's settings in sentences."""
        if self.workload["task"] != "own":
            return "the TrainingArguments defaults"
        if self.source is not None and not self.source.interface.has_own_settings:
            batch = self.baseline.candidate.per_device_train_batch_size if self.baseline is not None else None
            return f"a per-device batch of {batch or 'at most 8'} without anything else"
        return "the LoopConfig defaults" if self.is_loop else "your own settings"

    @property
    def has_own_settings(self) -> bool:
        """Whether the baseline is the user's own code with its own settings, unmodified."""
        return self.source is not None and not self.is_loop and self.source.interface.has_own_settings

    @property
    def is_own_best(self) -> bool:
        """Whether the user's own settings won, since no candidate was distinguishably faster."""
        tried = [trial.candidate for trial in (self.best, self.baseline) if trial is not None]
        return self.has_own_settings and len(tried) == 2 and tried[0] == tried[1]

    @property
    def samples(self) -> int | None:
        """Number of samples of the user's own data; ``None`` without such data or where unknown."""
        if (facts := data_facts(self.workload)) is not None:
            return facts.samples
        return self.source.interface.samples if self.source is not None else None

    @property
    def is_loop(self) -> bool:
        """Whether the search was over a training loop of the user."""
        return self.source is not None and self.source.kind == "loop"

    @functools.cached_property
    def source(self) -> TrainingSource | None:
        """The user's own code, with secrets masked; ``None`` for a model by name."""
        document = self.workload.get("source")
        return read_source(document) if document else None

    def is_elsewhere(self, trial: TrialRecord) -> bool:
        """Return whether a trial ran on another machine than the study's current one."""
        return trial.environment_id != self.study.environment_id

    def feasible(self, trial: TrialRecord) -> bool:
        """Return whether a trial completed with its peak at or under the line."""
        measured = measurement(trial)
        return measured is not None and measured.fits(trial.candidate.arm, self.ceiling)

    @functools.cached_property
    def history(self) -> History:
        """The trials of the study's current machine that count, pooled as they were in the search."""
        own = self.baseline.candidate if self.baseline is not None and self.has_own_settings else None
        history, repeats = History(self.ceiling, own=own, before=self.before), Repeats()
        for trial in self.trials:
            if self.is_elsewhere(trial):
                continue
            # A disturbed trial does not count before its repetition, which then decides which of the two does.
            counted = repeats.take(trial) if trial.outcome is not None else None
            if counted is not None and counted.outcome is not None:
                in_full = ran_in_full(counted.candidate, counted.outcome)
                history.add(Tried(counted.id, counted.candidate, counted.outcome, in_full))
        return history

    def speed(self, trial: TrialRecord | None) -> Speed | None:
        """Return the pooled speed of a trial's candidate, with the interval of its next run.

        The winner was chosen by this speed, and every printed number of a candidate follows from it. ``None`` where the
        trial did not complete.
        """
        if trial is None or trial.outcome is None or measurement(trial) is None:
            return None
        alone = Tried(trial.id, trial.candidate, trial.outcome)
        # The history has no speed of candidates that do not fit: these have that of this trial alone.
        return self.history.speed(trial.candidate) or Pool([alone]).speed(trial.candidate)

    def pooled(self, trial: TrialRecord | None) -> Measurement | None:
        """Return a trial's measurement; if its candidate fits, with speed and peaks of all its processes."""
        if trial is None or measurement(trial) is None:
            return None
        feasible, speed = self.history.believed({trial.candidate}), self.speed(trial)
        if not feasible or feasible[0].measurement is None or speed is None:
            return measurement(trial)
        return feasible[0].measurement.at_speed(speed.samples_per_second)

    def tokens_per_second(self, measured: Measurement | None) -> float | None:
        """Return the mean tokens a second without padding; ``None`` where samples are not text."""
        if measured is not None and self.workload["task"] == "own" and measured.tokens_per_sample is not None:
            return measured.samples_per_second * measured.tokens_per_sample
        if measured is None or not self.is_text:
            return None
        facts = data_facts(self.workload)
        tokens: float = int(self.workload["seq_len"]) * (1 - self.workload["padding"])
        if facts is not None and facts.lengths is not None:
            tokens = facts.lengths.mean
        return measured.samples_per_second * tokens

    @property
    def is_speedup_a_bound(self) -> bool:
        """Whether the stated speed-up is an upper bound: the baseline was disturbed, the winner was not."""
        return self._was_disturbed(self.baseline) and not self._was_disturbed(self.best)

    def _was_disturbed(self, trial: TrialRecord | None) -> bool:
        """Return whether every counted trial of the same candidate was disturbed by other processes."""
        tried = self.history.outcomes_of(trial.candidate) if trial is not None else []
        return bool(tried) and all(getattr(each.outcome, "disturbed", False) for each in tried)

    @functools.cached_property
    def too_noisy(self) -> str | None:
        """Why noise hides whether the best is the fastest; ``None`` where it does not, or the user accepts noise."""
        best = self.best
        if best is None or accepts_noise() or self.study.request.get("objective", "throughput") != "throughput":
            return None
        speedup, baseline = self.speedup, self.baseline
        # A baseline that is faster than the best is excluded from the search by options, so it is no rival.
        is_excluded = speedup is not None and speedup < 1
        left_out = {baseline.candidate} if baseline is not None and is_excluded else set()
        return too_noisy(self.history, best.candidate, {t.candidate for t in self.history.believed()} - left_out)

    def check_is_told(self) -> None:
        """Raise ``TooNoisyError`` where noise hides whether the best is the fastest."""
        if self.too_noisy is not None:
            raise TooNoisyError(
                f"too noisy to tell which candidate is the fastest: {self.too_noisy}",
                "search again with --fresh when the machine is quiet; "
                f"autotune export {self.study.name} --anyway takes what led",
            )

    @functools.cached_property
    def speedup(self) -> float | None:
        """The winner's speed over the baseline's; ``None`` where either is missing."""
        best, baseline = self.speed(self.best), self.speed(self.baseline)
        return best.samples_per_second / baseline.samples_per_second if best and baseline else None


def measurement(trial: TrialRecord | None) -> Measurement | None:
    """Return a trial's measurement; ``None`` where it did not complete."""
    return trial.outcome.measurement if trial and isinstance(trial.outcome, Completed) else None


def deviations_before(trials: Iterable[TrialRecord], study: StudyRecord) -> dict[Kind, Deviations]:
    """Return how much repeated processes of one candidate differed in speed on a study's machine before the study.

    ``trials`` are of ``Store.repeated_trials``. Later trials are left out, so that a study's numbers never change.
    Trials of the same workload are left out, since the study may have reused them.
    """
    repeated: dict[tuple[str, Candidate], list[Tried]] = {}
    for trial in trials:
        outcome = trial.outcome
        is_before = trial.environment_id == study.environment_id and trial.started_at < study.started_at
        is_undisturbed = isinstance(outcome, Completed) and not outcome.disturbed
        if outcome is not None and is_undisturbed and is_before and trial.workload_id != study.workload_id:
            tried = Tried(trial.id, trial.candidate, outcome)
            repeated.setdefault((trial.workload_id, trial.candidate), []).append(tried)
    return deviations(repeated.values())


def winners_speeds(store: Store, summaries: Sequence[StudySummary]) -> dict[str, Speed]:
    """Return the pooled speed of each study's winner by the study's id. Studies without a winner are left out."""
    found, trials = {}, store.trials_of_winners()
    repeated = store.repeated_trials({summary.study.environment_id for summary in summaries})
    for summary in summaries:
        study = summary.study
        # A damaged study is listed without a speed; showing it tells what is wrong.
        with contextlib.suppress(ValueError, KeyError, TypeError):
            ceiling = decode(study.ceiling, Ceiling)
            own, before = tuple(trials.get(study.id, ())), deviations_before(repeated, study)
            report = Report(study, summary.workload, summary.environment, ceiling, own, before)
            speed = report.speed(report.best)
            if speed is not None:
                found[study.id] = speed
    return found


def load_report(store: Store, name: str) -> Report:
    """Load the report of a study by its name.

    Raises ``UnknownStudyError`` for an unknown name, and ``StorageError`` where the record is incomplete.
    """
    study = store.existing_study(name)
    try:
        report = Report(
            study,
            store.workload_of(study),
            store.environment(study.environment_id),
            decode(study.ceiling, Ceiling),
            tuple(store.trials(study.id)),
            deviations_before(store.repeated_trials([study.environment_id]), study),
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


# Fields of the recorded documents that every reader uses without checking, with their types.
_ENVIRONMENT = {"packages": dict, "training_arguments_fields": list, "device_kind": str, "device_name": str}
_WORKLOAD = {"model": str, "task": str, "seq_len": int, "dtype": str}
_REQUEST = ("effective_batch", "world_size", "objective", "batch_multiple", "measure_baseline", "seed")


def _problem(report: Report) -> str | None:
    """Return what is missing or wrong in the record of a study, in words; ``None`` for a sound record."""
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
        if measured is not None and not 0 < min(measured.samples_per_second, measured.step_seconds) < math.inf:
            return f"trial {trial.number} is completed without a step time and a speed above zero"
    return None


def data_facts(workload: Document) -> DataFacts | None:
    """Return the facts of the user's own dataset; ``None`` without a dataset."""
    data = workload.get("data") or {}
    return decode(data["facts"], DataFacts) if data.get("facts") else None
