"""Searches with two trials at a time: what runs together is useful together, and nothing is lost or doubled."""

import dataclasses
import itertools
from pathlib import Path

import pytest
from bench import _Silent
from recorded import EFFECTIVE_64, RecordedRunner
from replay import RecordedPredictions, landscapes, predictions_path, prepared_for
from reported import completed
from searching import RecordingObserver, interrupt_after, prepared, search

from autotune.core.candidate import Arm, Candidate
from autotune.core.errors import StorageError
from autotune.core.outcome import Completed, Failed
from autotune.estimate.history import History
from autotune.store.records import TrialRecord
from autotune.store.repository import Store
from autotune.tuning.forecast import forecast_of
from autotune.tuning.loop import Search
from autotune.tuning.plan import Plan
from autotune.tuning.policy import make_policy


def best_speed(runner: RecordedRunner) -> float:
    return max(float(cell["samples_per_second"]) for _, cell in runner.recorded if cell["state"] == "ok")


@pytest.mark.parametrize("with_predictions", [False, True])
def test_recorded_grids_get_their_answer_and_not_later_on_the_whole(with_predictions: bool, store: Store) -> None:
    seconds = {1: 0.0, 2: 0.0}
    for path, slots in itertools.product(landscapes(), seconds):
        runner = RecordedRunner(path, slots=slots)
        given = prepared_for(runner, f"{path.stem}-{slots}")
        answers = RecordedPredictions(predictions_path(path), runner, 2.0)
        forecast = forecast_of(given, answers, cores=16) if with_predictions else None
        study = Search(given, runner, store, _Silent(), Path("logs"), clock=runner.clock, forecast=forecast).run()
        winner = store.trial(study.best_trial_id or "")
        assert winner.outcome.measurement.samples_per_second >= 0.99 * best_speed(runner)
        assert runner.most_under_way == slots
        seconds[slots] += runner.seconds
    # With predicted speeds one slot needs a trial or two beside the baseline, so that a second slot saves little.
    assert seconds[2] < (1.05 if with_predictions else 1.0) * seconds[1]


@pytest.mark.parametrize("sampler", ["autotune", "grid", "tpe", "random"])
def test_no_two_trials_under_way_are_of_one_candidate(store: Store, sampler: str) -> None:
    runner = RecordedRunner(EFFECTIVE_64, slots=2)
    together: list[tuple[Candidate, ...]] = []

    class Noting(RecordingObserver):
        def trial_begins(self, number: int, candidate: Candidate, stage: object) -> None:
            super().trial_begins(number, candidate, stage)  # type: ignore[arg-type]
            ended = {trial.number for trial in self.ended}
            together.append(tuple(c for n, c, _ in self.started if n not in ended))

    run = search(store, runner, Noting(), sampler=sampler)
    assert max(map(len, together)) == 2
    assert all(len(set(candidates)) == len(candidates) for candidates in together)
    searched = [trial.candidate for trial in run.trials if trial.stage == "search"]
    assert len(set(searched)) == len(searched)
    assert run.study.state == "finished"


@pytest.mark.parametrize("trials", [2, 3])
def test_a_budget_of_trials_is_kept(store: Store, trials: int) -> None:
    runner = RecordedRunner(EFFECTIVE_64, slots=2)
    run = search(store, runner, trials=trials)
    assert len(runner.jobs) == trials
    assert run.study.stopped_because == f"the budget of {trials} trials is spent"


def test_the_first_ctrl_c_lets_both_trials_end(store: Store) -> None:
    runner = RecordedRunner(EFFECTIVE_64, slots=2)
    observer, interruption = interrupt_after(1)
    run = search(store, runner, observer, interruption)
    assert run.study.state == "interrupted"
    assert len(run.trials) == 2
    assert all(trial.outcome is not None for trial in run.trials)


class TestLost:
    """What was under way when a search was killed is run again, and nothing else."""

    def test_a_second_ctrl_c_loses_at_most_what_is_under_way(self, store: Store) -> None:
        runner = RecordedRunner(EFFECTIVE_64, slots=2)
        runner.faults[Candidate(Arm("bf16"), 32, 2)] = [KeyboardInterrupt()]
        with pytest.raises(KeyboardInterrupt):
            search(store, runner)
        study = store.study("bert")
        lost = [trial for trial in store.trials(study.id) if isinstance(trial.outcome, Failed)]
        assert {trial.outcome.reason for trial in lost if isinstance(trial.outcome, Failed)} == {"interrupted"}
        assert 1 <= len(lost) <= 2
        rest = RecordedRunner(EFFECTIVE_64, slots=2)
        run = search(store, rest)
        assert run.best.candidate.describe() == "32 × 2  bf16"
        assert {trial.candidate for trial in lost} <= set(rest.candidates)
        completed = [t.candidate for t in run.trials if t.stage == "search" and isinstance(t.outcome, Completed)]
        assert len(set(completed)) == len(completed)

    def test_an_error_of_the_database_does_not_hide_ctrl_c(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        runner = RecordedRunner(EFFECTIVE_64)
        runner.faults[Candidate(Arm("bf16"), 32, 2)] = [KeyboardInterrupt()]
        observer = RecordingObserver()

        def refuse(*_: object) -> None:
            raise StorageError("autotune.db is locked by another process", "wait")

        monkeypatch.setattr(Store, "finish_trial", lambda self, i, o, s, real=Store.finish_trial: (
            refuse() if isinstance(o, Failed) else real(self, i, o, s)
        ))  # fmt: skip
        with pytest.raises(KeyboardInterrupt):
            search(store, runner, observer)
        assert observer.notes[-1] == "the end of the search is not recorded: autotune.db is locked by another process"


class TestPlan:
    """The plan with a trial under way."""

    def plan(self) -> Plan:
        given = prepared()
        policy = make_policy("autotune", "throughput", given.space)
        return Plan(given, History(given.ceiling), policy, lambda: 0.0)

    def begin(self, plan: Plan, number: int) -> TrialRecord:
        step = plan.next()
        record = TrialRecord("study", number, step.candidate, "w", "e", step.stage)
        plan.begin(record)
        return record

    def test_a_candidate_under_way_is_not_proposed_again(self) -> None:
        plan = self.plan()
        first, second, third = (self.begin(plan, number) for number in range(3))
        assert first.stage == "baseline"
        assert len({first.candidate, second.candidate, third.candidate}) == 3

    def test_it_is_not_done_while_a_trial_may_change_what_is_worth_one(self) -> None:
        plan = self.plan()
        records: list[TrialRecord] = []
        while plan.next() is not None:
            records.append(self.begin(plan, len(records)))
            assert len(records) < 100
        assert plan.done() is None
        levels = {record.candidate.per_device_train_batch_size % 8 for record in records}
        assert levels == {0}, "no level is left before its trials have ended"

    def test_nothing_runs_beside_a_final_trial(self) -> None:
        plan = self.plan()
        first = self.begin(plan, 0)
        plan.take(dataclasses.replace(first, outcome=completed(100.0)))
        second = self.begin(plan, 1)
        plan.take(dataclasses.replace(second, outcome=completed(200.0)))
        assert plan.next() is not None
        plan.begin(dataclasses.replace(second, id="again", number=2, stage="final"))
        assert plan.next() is None
