"""Test resumed searches: nothing is repeated, mixed up or lost; the second of two GPUs may be lost meanwhile."""

import dataclasses
import os
import re
import select
import signal
import sqlite3
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from machine import Machine, uuid_of
from messages import check_refusals
from recorded import EFFECTIVE_64, ComputedRunner, RecordedRunner
from searching import (
    BERT_LARGE,
    FACTS,
    H200,
    RecordingObserver,
    Run,
    interrupt_after,
    new_store,
    prepared,
    request,
    search,
    with_environment,
)

from autotune.core.candidate import Arm, Candidate
from autotune.core.errors import StorageError
from autotune.core.outcome import Completed, Failed
from autotune.core.units import GIB, MIB
from autotune.results.report import load_report
from autotune.results.wording import verdict
from autotune.store.opening import open_store
from autotune.store.repository import Store
from autotune.tuning.optuna_study import OptunaStudy
from autotune.tuning.prepare import Prepared, prepare


def interrupted_search(store: Store, after: int, **options: Any) -> Run:
    observer, interruption = interrupt_after(after)
    return search(store, RecordedRunner(EFFECTIVE_64), observer, interruption, **options)


class TestBudgets:
    def test_a_budget_that_was_spent_before_is_told_as_such(self, store: Store) -> None:
        first = search(store, RecordedRunner(EFFECTIVE_64), trials=2)
        assert first.study.stopped_because == "the budget of 2 trials is spent"
        again = search(store, RecordedRunner(EFFECTIVE_64), trials=1)
        assert again.study.stopped_because == "the budget of 1 trial was spent before: nothing was run"
        third = search(store, RecordedRunner(EFFECTIVE_64), time_budget_seconds=1.0)
        assert third.study.stopped_because.startswith("the time budget of 1.0 s was spent before, in ")
        more = search(store, RecordedRunner(EFFECTIVE_64), trials=3)
        assert more.study.stopped_because == "the budget of 3 trials is spent"


class TestGoingOn:
    @pytest.mark.parametrize("trials", [1, 2])
    def test_repeats_nothing_and_ends_where_it_would_have(self, store: Store, trials: int) -> None:
        whole = RecordedRunner(EFFECTIVE_64)
        winner = search(store, whole, study="whole").best
        first = interrupted_search(store, trials, fresh=True)
        rest = RecordedRunner(EFFECTIVE_64)
        second = search(store, rest, fresh=True)
        assert [t.candidate for t in first.trials] + rest.candidates == whole.candidates
        assert second.best.candidate == winner.candidate
        assert second.study.state == "finished"
        assert second.study.id == first.study.id
        assert second.study.started_at == first.study.started_at
        assert second.study.seconds == pytest.approx(whole.seconds)
        assert second.observer.notes == [
            f"continuing the study bert, {trials} trial{'' if trials == 1 else 's'} recorded"
        ]

    @pytest.mark.parametrize("sampler", ["grid", "tpe", "random"])
    def test_with_any_sampler_repeats_nothing(self, store: Store, sampler: str) -> None:
        first = interrupted_search(store, 3, sampler=sampler, trials=8)
        second = search(store, RecordedRunner(EFFECTIVE_64), sampler=sampler, trials=8)
        # The winner alone may be run again, in full.
        searched = {candidate for _, candidate, stage in second.observer.started if stage == "search"}
        assert not {trial.candidate for trial in first.trials} & searched
        assert len(second.trials) == 8

    def test_of_a_finished_study_runs_nothing_and_changes_nothing(self, store: Store) -> None:
        first = search(store, RecordedRunner(EFFECTIVE_64))
        rest = RecordedRunner(EFFECTIVE_64)
        second = search(store, rest)
        assert rest.jobs == []
        assert second.trials == first.trials
        assert second.study.best_trial_id == first.study.best_trial_id
        assert second.study.baseline_trial_id == first.study.baseline_trial_id


class TestRefused:
    def test_messages_of_other_studies(self, store: Store) -> None:
        first = interrupted_search(store, 2)
        runner = RecordedRunner(EFFECTIVE_64)
        fewer_layers = {"config": {**BERT_LARGE.config, "num_hidden_layers": 12}}
        packages = {"torch": "2.14.0", "transformers": "5.23.0"}
        cases: dict[str, dict[str, Any]] = {
            "another batch": {"effective_batch": 128},
            "a precision": {"precisions": ("bf16",)},
            **{
                name: {"given": prepare(request(workload=dataclasses.replace(BERT_LARGE, **changes)), FACTS)}
                for name, changes in {"another length": {"seq_len": 128}, "fewer layers": fewer_layers}.items()
            },
            "another driver": {"given": with_environment(prepared(), driver="600.1")},
            "another GPU": {"given": with_environment(prepared(), device_name="NVIDIA A100")},
            "another torch": {"given": with_environment(prepared(), packages=packages)},
        }
        calls = {name: partial(search, store, runner, **options) for name, options in cases.items()}
        check_refusals("other-studies", calls, store.path.parent)
        assert runner.jobs == []
        assert store.study("bert") == first.study
        assert store.trials(first.study.id) == first.trials

    def test_on_another_card_of_the_model_everything_is_measured_again(self, store: Store) -> None:
        """What the first card measured stays in the record, and counts for nothing but the order."""
        before = interrupted_search(store, 2)
        other = with_environment(prepared(), device_uuid="GPU-1", device_label="cuda:1")
        runner = RecordedRunner(EFFECTIVE_64)
        run = search(store, runner, given=other)
        assert run.study.state == "finished"
        assert any("2 trials of it ran on another machine" in note for note in run.observer.notes)
        assert {trial.candidate for trial in before.trials} <= set(runner.candidates)
        assert run.trials[:2] == before.trials[:2]
        report = load_report(store, "bert")
        assert report.environment["device_uuid"] == "GPU-1"
        assert [verdict(report, trial) for trial in run.trials[:2]] == ["on another machine"] * 2
        assert {tried.trial_id for tried in report.history.tried} == {trial.id for trial in run.trials[2:]}
        # Gone on with once more, nothing is left to do.
        again = RecordedRunner(EFFECTIVE_64)
        search(store, again, given=other)
        assert again.jobs == []

    def test_the_same_card_in_another_slot_will_do(self, store: Store) -> None:
        before = interrupted_search(store, 2)
        runner = RecordedRunner(EFFECTIVE_64)
        run = search(store, runner, given=with_environment(prepared(), device_label="cuda:1"))
        assert run.study.state == "finished"
        assert not {trial.candidate for trial in before.trials} & set(runner.candidates[:2])

    def test_weights_do_not_matter(self, store: Store) -> None:
        interrupted_search(store, 2)
        loaded = dataclasses.replace(BERT_LARGE, weights="google-bert/bert-large-uncased")
        other = prepare(request(workload=loaded), FACTS)
        assert search(store, RecordedRunner(EFFECTIVE_64), given=other).study.state == "finished"


class TestCeiling:
    def with_free(self, free_bytes: int) -> Prepared:
        device = dataclasses.replace(H200, memory_free_bytes=free_bytes)
        return prepare(dataclasses.replace(request(memory_limit_bytes=None), device=device), FACTS)

    def test_stays_what_it_was_when_the_study_began(self, store: Store) -> None:
        interrupted_search(store, 2, given=self.with_free(24 * GIB))
        rest = RecordedRunner(EFFECTIVE_64)
        run = search(store, rest, given=self.with_free(20 * GIB))
        assert {job.cap_bytes for job in rest.jobs} == {23956 * MIB}
        assert run.best.candidate.describe() == "32 × 2  bf16"
        assert any("only 19.4 GiB" in note and "23.4 GiB" in note for note in run.observer.notes)

    def test_a_little_less_within_the_headroom_is_not_worth_a_word(self, store: Store) -> None:
        interrupted_search(store, 3, given=self.with_free(24 * GIB))
        run = search(store, RecordedRunner(EFFECTIVE_64), given=self.with_free(24 * GIB - 500 * MIB))
        assert run.observer.notes == ["continuing the study bert, 3 trials recorded"]

    def test_more_that_is_free_now_is_not_used(self, store: Store) -> None:
        interrupted_search(store, 3, given=self.with_free(20 * GIB))
        rest = RecordedRunner(EFFECTIVE_64)
        run = search(store, rest, given=self.with_free(100 * GIB))
        assert {job.cap_bytes for job in rest.jobs} == {20 * GIB - 620 * MIB}
        assert len(run.observer.notes) == 1


class _KilledError(BaseException):
    """Stands for SIGKILL: nothing after it is done."""


class TestKilled:
    """Ended between any two writes, a study can be continued and loses no finished trial."""

    BEST = Candidate(Arm("bf16"), 32, 2)

    def kill(self, store: Store, monkeypatch: pytest.MonkeyPatch, owner: Any, method: str, times: int) -> None:
        """Run a search that is killed on the given call of a method; nothing is written from then on."""
        calls = 0
        original = getattr(owner, method)

        def die(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls < times:
                return original(*arguments, **options)
            for name in ("finish_trial", "update_study"):
                patch.setattr(Store, name, lambda *_: None)
            raise _KilledError

        with monkeypatch.context() as patch:
            patch.setattr(owner, method, die)
            with pytest.raises(_KilledError):
                search(store, RecordedRunner(EFFECTIVE_64))

    @pytest.mark.parametrize(
        ("owner", "method", "times", "repeats"),
        [
            (OptunaStudy, "ask", 3, 0),
            (Store, "start_trial", 3, 0),
            (RecordedRunner, "submit", 3, 1),
            (Store, "finish_trial", 3, 1),
            (OptunaStudy, "tell", 3, 0),
            (RecordingObserver, "trial_ends", 3, 0),
            *(
                # The same of the first trial, before which there is nothing to lose.
                pytest.param(*killed, marks=pytest.mark.whole)
                for killed in (
                    (Store, "start_trial", 1, 0),
                    (RecordedRunner, "submit", 1, 1),
                    (OptunaStudy, "tell", 1, 0),
                )
            ),
        ],
    )
    def test_and_continued(
        self, store: Store, monkeypatch: pytest.MonkeyPatch, owner: Any, method: str, times: int, repeats: int
    ) -> None:
        self.kill(store, monkeypatch, owner, method, times)
        run = search(store, RecordedRunner(EFFECTIVE_64))
        assert run.best.candidate == self.BEST
        assert run.study.state == "finished"
        lost = [t for t in run.trials if isinstance(t.outcome, Failed)]
        assert len(lost) == repeats
        tried = [t.candidate for t in run.trials if t not in lost]
        assert len(tried) == len(set(tried))
        assert all(trial.outcome is not None for trial in run.trials)


@pytest.mark.parametrize(
    "delay_seconds", [0.05, *(pytest.param(delay, marks=pytest.mark.whole) for delay in (0.02, 0.1, 0.15))]
)
def test_killed_for_good_at_any_moment(tmp_path: Path, delay_seconds: float) -> None:
    new_store(tmp_path).close()
    path = str(tmp_path / "autotune.db")
    ready, begun = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with open_store(path) as store:
                os.write(begun, b".")
                search(store, RecordedRunner(EFFECTIVE_64))
                signal.pause()
        finally:
            os._exit(1)
    try:
        assert select.select([ready], [], [], 60)[0]
        time.sleep(delay_seconds)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    os.close(ready)
    os.close(begun)
    with open_store(path) as store:
        study = store.study("bert")
        before = store.trials(study.id) if study else []
        run = search(store, RecordedRunner(EFFECTIVE_64))
        assert run.best.candidate == Candidate(Arm("bf16"), 32, 2)
        lost = [trial for trial in run.trials if isinstance(trial.outcome, Failed)]
        assert len(lost) <= 1
        tried = [trial.candidate for trial in run.trials if trial not in lost]
        assert len(tried) == len(set(tried))
        assert [trial.id for trial in run.trials[: len(before)]] == [trial.id for trial in before]


def test_a_locked_database_is_an_error_and_the_rest_is_kept(tmp_path: Path) -> None:
    """Another program holds the file for longer than is waited for."""
    new_store(tmp_path).close()
    path = tmp_path / "autotune.db"
    with open_store(str(path), lock_timeout_seconds=0.1) as store:
        blocker = sqlite3.connect(path, isolation_level=None)
        observer = RecordingObserver()

        def block(_: int, record: object) -> None:
            if len(observer.ended) == 2:
                blocker.execute("BEGIN IMMEDIATE")

        observer.progress = block  # type: ignore[method-assign]
        with pytest.raises(StorageError, match="is locked by another process"):
            search(store, ComputedRunner(lambda _: GIB), observer)
        blocker.execute("ROLLBACK")
        blocker.close()
    with open_store(str(path)) as store:
        study = store.study("bert")
        assert len([t for t in store.trials(study.id) if isinstance(t.outcome, Completed)]) == 2
        assert search(store, ComputedRunner(lambda _: GIB)).study.state == "finished"


SEARCH = """
import contextlib, dataclasses, sys
sys.path.insert(0, {tests!r})
from recorded import ComputedRunner
from searching import BERT_LARGE, FACTS, RecordingObserver
from autotune.core.errors import AutotuneError, DeviceError
from autotune.core.rehearsal import Rehearsal
from autotune.core.outcome import Failed
from autotune.devices.lock import Lock
from autotune.execution import gpu_monitor
from autotune.store.opening import open_store
from autotune.store.leases import name_of_study
from autotune.tuning import run
from autotune.tuning.request import SearchRequest
from autotune.tuning.studies import recorded_request

gpu_monitor._INTERVAL_SECONDS = gpu_monitor._RETURN_SECONDS = 0.01
LOST = "nvmlDeviceGetMemoryInfo:1=15,nvmlDeviceGetMemoryInfo_v2:1=15"

class Trials(ComputedRunner):
    # Trials of two ranks, the second of which dies with its GPU in the third trial.
    def __init__(self, request, loses):
        super().__init__(lambda candidate: 2**30 * candidate.per_device_train_batch_size)
        self.slots, self.loses = request.slots, loses
    def answer(self, job):
        if self.loses and len(self.jobs) == 3:
            os.environ["STAND_IN_ERRORS"] = LOST
            return Failed("killed", "rank 1: killed by SIGKILL"), 1.0
        return super().answer(job)
    def pids_of(self, trial_id):
        return frozenset()

class Server:
    workload, data_folder = BERT_LARGE, None
    def __init__(self, placement):
        self.placement = placement
    def start(self, *, inspects=False):
        pass
    def inspect(self, *_):
        return FACTS
    def run_as_inspected(self, workload):
        pass
    def look(self, work, timeout_seconds):
        return "a stand-in"
    def rehearse(self, work, timeout_seconds):
        return Rehearsal(problem="a stand-in")

def search(request, loses):
    trials = Trials(request, loses)
    @contextlib.contextmanager
    def place(request, folder, note, warm):
        watched = lambda context, _: gpu_monitor.WatchedExecutor(trials, context, note)
        yield run.Place([Server(request.placement)], watched)
    run.on_this_machine = place
    observer, error = RecordingObserver(), None
    try:
        run.run_search(request, {storage!r}, observer)
    except AutotuneError as caught:
        error = [type(caught).__name__, caught.message, caught.hint]
    return error, observer.notes, trials.candidates

def resumed():
    with open_store({storage!r}) as store:
        return recorded_request(store, "two")

first, second = find_gpus("2")
error, notes, tried = search(
    SearchRequest(BERT_LARGE, first, others=(second,), world_size=2, effective_batch=64, study="two", trials=6), True
)
locks = []
for uuid in (first.uuid, second.uuid):
    with Lock(uuid) as lock:
        locks.append(lock.acquire("another"))
with open_store({storage!r}) as store:
    study = store.existing_study("two")
    holder = store.leases.holder(name_of_study("two"))
    outcomes = [trial.outcome for trial in store.trials(study.id)]
failed = [[outcome.reason, outcome.message] for outcome in outcomes if isinstance(outcome, Failed)]
try:
    resumed()
except DeviceError as caught:
    refused = [caught.message, caught.hint]
try:
    find_gpus("2")
except DeviceError as caught:
    not_here = [caught.message, caught.hint]
del os.environ["STAND_IN_ERRORS"]
lost, again = tried[2], search(resumed(), False)
with open_store({storage!r}) as store:
    state = store.existing_study("two").state
answer = {{
    "error": error, "notes": notes, "locks": locks, "holder": holder, "ended": [study.state, study.stopped_because],
    "failed": failed, "refused": refused, "not_here": not_here, "again": again[0], "state": state,
    "repeats": lost in again[2],
}}
"""


@pytest.fixture(scope="module")
def told(library_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What was seen of the search, while the GPU was lost and once it was back."""
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    folder = tmp_path_factory.mktemp("lost")
    code = SEARCH.format(tests=str(Path(__file__).parents[1]), storage=str(folder / "studies.db"))
    machine = Machine(library_folder, None)
    return machine.ask(code, STAND_IN_GPUS="2", AUTOTUNE_LOCKS=str(folder / "locks"))


def test_the_search_ends_with_a_line_that_names_the_gpu(told: dict[str, Any]) -> None:
    kind, message, hint = told["error"]
    assert (kind, message) == ("DeviceError", f"cuda:1 (Stand-in GPU, {uuid_of(1)}) is lost")
    assert "autotune resume goes on" in hint
    assert told["notes"][-1] == "every trial is recorded in the study two; autotune resume two goes on with it"
    assert told["ended"] == ["interrupted", message]
    lost, (reason, why) = told["failed"]
    assert lost == ["device_lost", "NVML says that cuda:1 is lost; rank 1: killed by SIGKILL"]
    # What was to repeat it.
    assert reason == "interrupted"
    assert re.fullmatch(r"the search was stopped after .* of this trial \(starting its process\)", why)


def test_nothing_is_held_any_more(told: dict[str, Any]) -> None:
    assert told["locks"] == [None, None]
    assert told["holder"] is None


def test_the_study_is_not_resumed_on_the_gpu_that_is_left(told: dict[str, Any]) -> None:
    message, hint = told["refused"]
    assert message == f"the study 'two' was searched on 2 of Stand-in GPU, and 1 is here: {uuid_of(1)} is missing"
    assert hint == "go on where they are, or search anew under another --study; cuda:1: GPU is lost"
    assert told["not_here"] == ["--gpus 2: there is 1 GPU here", "use --gpus 1 or fewer; cuda:1: GPU is lost"]


def test_the_study_goes_on_once_both_are_back(told: dict[str, Any]) -> None:
    assert told["again"] is None
    assert told["state"] == "finished"
    assert told["repeats"]
