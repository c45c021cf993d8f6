"""Searches with two trials at a time, each on a device: what runs together is useful together, nothing is lost or
doubled."""

import dataclasses
import itertools
from pathlib import Path

import pytest
from recorded import EFFECTIVE_64, RecordedRunner
from replay import RecordedPredictions, landscapes, predictions_path, prepared_for
from reported import completed
from searching import BERT_LARGE, FACTS, H200, RecordingObserver, interrupt_after, new_store, prepared, search
from tiny import tiny_workload

from autotune.core.candidate import Arm, Candidate
from autotune.core.device import Device
from autotune.core.errors import DeviceError, StorageError
from autotune.core.outcome import Completed, Failed
from autotune.core.units import GIB
from autotune.estimate.history import History
from autotune.store.records import TrialRecord
from autotune.store.repository import Store
from autotune.tuning import options as tuning_options
from autotune.tuning.forecast import forecast_of
from autotune.tuning.loop import Search
from autotune.tuning.narrator import Narrator
from autotune.tuning.options import request_of
from autotune.tuning.plan import Plan
from autotune.tuning.policy import make_policy
from autotune.tuning.prepare import prepare
from autotune.tuning.request import SearchRequest
from autotune.tuning.run import run_search
from autotune.tuning.studies import recorded_request


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
        silent = Narrator(lambda text, style: None)
        study = Search(given, runner, store, silent, Path("logs"), clock=runner.clock, forecast=forecast).run()
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


SECOND = dataclasses.replace(H200, uuid="GPU-1", index=1, memory_free_bytes=90 * GIB)


class _Company(RecordingObserver):
    """Notes which trials are under way when one begins."""

    def __init__(self) -> None:
        super().__init__()
        self.together: list[set[int]] = []

    def trial_begins(self, number: int, candidate: object, stage: object) -> None:
        super().trial_begins(number, candidate, stage)  # type: ignore[arg-type]
        self.together.append({n for n, _, _ in self.started} - {trial.number for trial in self.ended})


def test_a_grid_on_two_devices(cpu: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = tmp_path / "started"
    monkeypatch.setenv("WARM_REPORT", str(started))
    request = SearchRequest(
        tiny_workload("bert-tiny"), cpu, beside=(cpu,), effective_batch=16, sampler="grid", study="two",
        precisions=("fp32",), gradient_checkpointing="off", trials=4,
    )  # fmt: skip
    observer = _Company()
    study, report = run_search(request, str(tmp_path / "studies.db"), observer)
    assert study.state == "finished"
    assert report.best is not None
    # A trial is of one rank, with the whole effective batch.
    assert {(trial.candidate.samples_per_step, trial.candidate.arm.ranks) for trial in report.trials} == {(16, 1)}
    assert all(isinstance(trial.outcome, Completed) for trial in report.trials)
    assert max(map(len, observer.together)) == 2
    assert (tmp_path / "logs" / "two" / "server-1" / "server.log").exists()
    assert not any("cannot" in note for note in observer.notes)
    # Forked, both of them: a variable that searches set and tests/warm.py does not know costs each of them its imports.
    assert [line.partition("\t")[0] for line in started.read_text().splitlines()] == ["warm", "warm"]


def test_the_ceiling_and_the_devices_are_those_of_all() -> None:
    request = SearchRequest(BERT_LARGE, H200, beside=(SECOND,), effective_batch=64)
    assert request.least_free_bytes == 90 * GIB
    assert [slot.uuids for slot in request.slots] == [(H200.uuid,), ("GPU-1",)]
    assert (request.ranks, request.world_size, request.pins) == (1, 1, "off")
    assert request.document() == SearchRequest(BERT_LARGE, H200, effective_batch=64).document()


def test_the_option_makes_slots_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning_options, "find_gpus", lambda text: (H200, SECOND))
    request = request_of({"model": "bert-tiny", "effective_batch": 64, "parallel": True, "gpus": "2"})
    assert (request.others, request.beside, request.world_size) == ((), (SECOND,), 1)


def test_a_study_goes_on_with_trials_on_more_devices(tmp_path: Path) -> None:
    with new_store(tmp_path) as store:
        begun = search(store, RecordedRunner(EFFECTIVE_64), trials=4, sampler="grid")
        assert len(begun.trials) == 4
        request = recorded_request(store, "bert", limits={"trials": 9}, devices=(H200, SECOND), parallel=True)
        assert (request.device, request.others, request.beside) == (H200, (), (SECOND,))
        runner = RecordedRunner(EFFECTIVE_64, slots=2)
        resumed = search(store, runner, given=prepare(request, FACTS))
    assert runner.most_under_way == 2
    assert [trial.id for trial in resumed.trials[:4]] == [trial.id for trial in begun.trials]
    assert len({trial.candidate for trial in resumed.trials if trial.stage == "search"}) == len(
        [trial for trial in resumed.trials if trial.stage == "search"]
    )
    assert len(resumed.trials) == 9


def test_devices_that_a_study_cannot_go_on_with_are_one_clear_line(tmp_path: Path) -> None:
    with new_store(tmp_path) as store:
        search(store, RecordedRunner(EFFECTIVE_64), trials=1)
        with pytest.raises(DeviceError, match="has trials of one device, and --gpus names 2") as caught:
            recorded_request(store, "bert", devices=(H200, SECOND))
        assert "--parallel" in caught.value.hint
        assert recorded_request(store, "bert", devices=(SECOND,)).device == SECOND
        other = dataclasses.replace(SECOND, name="NVIDIA L4")
        with pytest.raises(DeviceError, match="NVIDIA H200 and NVIDIA L4 are not equal"):
            recorded_request(store, "bert", devices=(H200, other), parallel=True)
