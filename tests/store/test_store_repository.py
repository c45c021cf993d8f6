"""Test reading and writing records: unchanged, and fast."""

import dataclasses
import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from arbitrary import candidates, outcomes
from frozen_databases import run_sql
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from postgres import sqlite_alone
from sqlalchemy import event

from autotune.core.candidate import Arm, Candidate
from autotune.core.errors import StorageError
from autotune.core.outcome import Completed, Failed, Measurement, Outcome, OutOfMemory
from autotune.store.opening import open_store
from autotune.store.records import NOTHING_LEFT, LeftOut, StudyRecord, TrialRecord, new_id
from autotune.store.repository import Store

NewStudy = Callable[[str], StudyRecord]
NewTrial = Callable[[StudyRecord, int], TrialRecord]

MEASURED = Completed(
    Measurement(
        step_seconds=0.21,
        step_seconds_each=(0.2, 0.21, 0.22),
        relative_spread=0.02,
        samples_per_second=304.5,
        peak_allocated_bytes=2**34,
        peak_reserved_bytes=2**34 + 2**21,
        warmup_step_seconds=(0.9,),
    ),
    phase_seconds={"model": 0.1, "train": 3.5},
)
RAN_OUT = OutOfMemory("CUDA out of memory", peak_reserved_bytes=2**35, phase_seconds={"train": 1.0})
FAILED = Failed("error", "wörse \U0001f4a5 \udcff", traceback="line\nline")


def test_a_study_comes_back_as_it_was(store: Store, new_study: NewStudy) -> None:
    study = new_study("first")
    assert store.study("first") == study
    assert store.study("second") is None
    ended = dataclasses.replace(
        study,
        state="finished",
        stop_reason=NOTHING_LEFT.reason,
        stopped_because=NOTHING_LEFT.sentence,
        left_out=(LeftOut(("all fp16", "tf32, checkpointing"), "never: faster"),),
        best_trial_id=new_id(),
        baseline_trial_id=new_id(),
        ended_at=study.started_at + timedelta(seconds=41.5),
        seconds=41.5,
        request={"effective_batch": 64, "trials": 12},
    )
    store.update_study(ended)
    assert store.study("first") == ended


@sqlite_alone
@given(candidates(), outcomes(), st.floats(0, 1e9))
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
def test_any_trial_comes_back_as_it_was(
    store: Store, new_study: NewStudy, candidate: Candidate, outcome: Outcome, seconds: float
) -> None:
    """Whatever its words hold: quotes, NULs, halves of characters."""
    study = new_study(new_id())
    trial = TrialRecord(study.id, 0, candidate, study.workload_id, study.environment_id)
    store.start_trial(trial)
    assert store.trial(trial.id) == trial
    store.finish_trial(trial.id, outcome, seconds)
    ended = store.trial(trial.id)
    assert (ended.candidate, ended.outcome, ended.seconds) == (candidate, outcome, seconds)
    assert store.trials(study.id) == [ended]


def test_name_and_start_of_a_study_are_not_overwritten(store: Store, new_study: NewStudy) -> None:
    study = new_study("first")
    store.update_study(dataclasses.replace(study, name="other", started_at=datetime(2020, 1, 1, tzinfo=UTC)))
    assert store.study("first") == study


def test_a_name_is_taken_once(store: Store, new_study: NewStudy) -> None:
    new_study("first")
    with pytest.raises(StorageError, match="'first' already") as caught:
        new_study("first")
    assert "--study" in caught.value.hint


@pytest.mark.parametrize("outcome", [MEASURED, RAN_OUT, FAILED], ids=lambda outcome: outcome.state)
def test_a_trial_comes_back_as_it_was(store: Store, new_study: NewStudy, new_trial: NewTrial, outcome: Outcome) -> None:
    trial = new_trial(new_study("first"), 0)
    assert store.trial(trial.id) == trial
    assert trial.state == "running"
    store.finish_trial(trial.id, outcome, 4.2)
    ended = dataclasses.replace(trial, outcome=outcome, seconds=4.2)
    assert store.trial(trial.id) == ended
    assert ended.state == outcome.state
    assert store.trials(trial.study_id) == [ended]


def test_a_trial_may_be_recorded_with_its_outcome_at_once(store: Store, new_study: NewStudy) -> None:
    study = new_study("first")
    trial = TrialRecord(
        study.id,
        3,
        Candidate(Arm("tf32", True, "eager", "adafactor"), 16, 4),
        study.workload_id,
        study.environment_id,
        stage="baseline",
        outcome=MEASURED,
        log_path="/tmp/odd\udcff/name.log",
        seconds=2.0,
    )
    with pytest.raises(StorageError, match="cannot be stored"):
        store.start_trial(trial)
    stored = dataclasses.replace(trial, log_path="/tmp/name.log")
    store.start_trial(stored)
    assert store.trials(study.id) == [stored]


def test_what_is_no_number_survives(store: Store, new_study: NewStudy, new_trial: NewTrial) -> None:
    trial = new_trial(new_study("first"), 0)
    measurement = dataclasses.replace(MEASURED.measurement, train_loss=math.nan, relative_spread=math.inf)
    store.finish_trial(trial.id, Completed(measurement), 1.0)
    (stored,) = store.trials(trial.study_id)
    assert stored.outcome.measurement.train_loss is not None
    assert math.isnan(stored.outcome.measurement.train_loss)
    assert stored.outcome.measurement.relative_spread == math.inf


def test_a_trial_ends_once(store: Store, new_study: NewStudy, new_trial: NewTrial) -> None:
    trial = new_trial(new_study("first"), 0)
    store.finish_trial(trial.id, RAN_OUT, 1.0)
    for trial_id in (trial.id, new_id()):
        with pytest.raises(StorageError, match=trial_id) as raised:
            store.finish_trial(trial_id, MEASURED, 2.0)
        assert "autotune resume" in raised.value.hint
    stored = store.trial(trial.id)
    assert stored.outcome == RAN_OUT


def test_unknown_ids(store: Store, new_study: NewStudy) -> None:
    assert store.trial(new_id()) is None
    assert store.trials(new_id()) == []
    with pytest.raises(ValueError, match="no row"):
        store.environment(new_id())
    with pytest.raises(StorageError, match="no longer in"):
        store.update_study(dataclasses.replace(new_study("first"), id=new_id()))


def test_a_trial_of_no_study_is_refused(store: Store, new_study: NewStudy, new_trial: NewTrial) -> None:
    study = new_study("first")
    with pytest.raises(StorageError, match=r"(?i)foreign key"):
        new_trial(dataclasses.replace(study, id=new_id()), 0)


@sqlite_alone
def test_a_trial_of_a_later_autotune_is_told_apart(
    store: Store, database: Path, new_study: NewStudy, new_trial: NewTrial
) -> None:
    trial = new_trial(new_study("first"), 0)
    run_sql(database, """UPDATE autotune_trials SET state = 'paused', outcome = '{"state": "paused"}'""")
    with pytest.raises(StorageError, match="cannot read"):
        store.trials(trial.study_id)


def test_running_trials_of_a_killed_search_are_lost(store: Store, new_study: NewStudy, new_trial: NewTrial) -> None:
    study, other = new_study("first"), new_study("second")
    ended, running, elsewhere = new_trial(study, 0), new_trial(study, 1), new_trial(other, 0)
    store.finish_trial(ended.id, MEASURED, 1.0)
    assert store.lose_running_trials(study.id) == 1
    assert store.lose_running_trials(study.id) == 0
    lost = store.trial(running.id)
    assert (lost.state, lost.outcome.reason, lost.seconds) == ("failed", "interrupted", None)
    assert [trial.state for trial in store.trials(study.id)] == ["completed", "failed"]
    assert [trial.state for trial in store.trials(elsewhere.study_id)] == ["running"]


def test_equal_fingerprints_are_one_row(store: Store, new_study: NewStudy) -> None:
    first = store.intern_workload({"model": "a"}, "same")
    assert store.intern_workload({"model": "b"}, "same") == first
    assert store.intern_workload({"model": "b"}, "other") != first
    assert store.workload_of(dataclasses.replace(new_study("first"), workload_id=first)) == {"model": "a"}
    environment = store.intern_environment({"driver": "1"}, "same")
    assert store.intern_environment({}, "same") == environment
    assert store.environment(environment) == {"driver": "1"}


def test_studies_are_summed_up_newest_first(store: Store, new_study: NewStudy, new_trial: NewTrial) -> None:
    old, new = new_study("old"), new_study("new")
    best, oom, failed, _running = (new_trial(old, number) for number in range(4))
    store.finish_trial(best.id, MEASURED, 3.0)
    store.finish_trial(oom.id, RAN_OUT, 1.0)
    store.finish_trial(failed.id, FAILED, 1.0)
    store.update_study(dataclasses.replace(old, best_trial_id=best.id))
    first, second = store.studies()
    assert (first.study.name, first.trials, first.best) == (new.name, 0, None)
    assert (second.completed, second.out_of_memory, second.failed, second.running) == (1, 1, 1, 1)
    assert second.best == store.trial(best.id)
    assert second.workload == {"model": "bert-tiny"}
    assert second.environment == {"device": "cpu"}


def test_trials_are_found_by_machine_and_model(store: Store, new_study: NewStudy, new_trial: NewTrial) -> None:
    study = new_study("first")
    ended, _running = new_trial(study, 0), new_trial(study, 1)
    store.finish_trial(ended.id, MEASURED, 3.0)
    elsewhere = dataclasses.replace(
        ended, id=new_id(), environment_id=store.intern_environment({}, "environment-2"), outcome=RAN_OUT
    )
    store.start_trial(elsewhere)
    reused = dataclasses.replace(elsewhere, id=new_id(), environment_id=ended.environment_id, stage="reused")
    store.start_trial(reused)
    other = new_study("second")
    (past,) = store.past_trials(other)
    assert (past.trial.id, past.study, past.ceiling) == (ended.id, "first", study.ceiling)
    (past,) = store.past_trials(dataclasses.replace(other, environment_id=elsewhere.environment_id))
    assert past.trial == elsewhere
    assert store.past_trials(dataclasses.replace(other, workload_id="another")) == []
    # A study's own trials are in its history.
    assert store.past_trials(study) == []


@sqlite_alone
def test_a_trial_that_cannot_be_read_is_not_reused(store: Store, new_study: NewStudy, new_trial: NewTrial) -> None:
    study = new_study("first")
    kept, broken = new_trial(study, 0), new_trial(study, 1)
    store.finish_trial(kept.id, MEASURED, 3.0)
    store.finish_trial(broken.id, MEASURED, 3.0)
    run_sql(store.path, 'UPDATE autotune_trials SET outcome = \'{"state": "other"}\' WHERE id = ?', (broken.id,))
    assert [past.trial.id for past in store.past_trials(new_study("second"))] == [kept.id]


def test_times_are_in_utc(store: Store, new_study: NewStudy) -> None:
    east = timezone(timedelta(hours=9))
    study = new_study("first")
    ended = datetime(2026, 1, 1, 8, 30, 0, 123456, tzinfo=east)
    store.update_study(dataclasses.replace(study, ended_at=ended))
    stored = store.study("first")
    assert stored.ended_at == ended
    assert stored.ended_at.tzinfo is UTC
    with pytest.raises(StorageError, match="no time zone"):
        store.update_study(dataclasses.replace(study, ended_at=datetime(2026, 1, 1)))


def test_a_file_damaged_meanwhile_is_reported(database: Path) -> None:
    with open_store(str(database)) as store:
        store.close()
        database.write_bytes(database.read_bytes()[:4096] + b"\xff" * 40000)
        with pytest.raises(StorageError, match="is damaged"):
            store.studies()


MANY = 2_000
MULTIPLY = f"""
    WITH RECURSIVE counter(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM counter WHERE n < {MANY} - 1)
    INSERT INTO autotune_trials
        (id, study_id, number, stage, candidate, state, outcome, started_at, seconds, workload_id, environment_id)
    SELECT lower(hex(randomblob(16))), study_id, n, stage, candidate, state, outcome, started_at, seconds,
        workload_id, environment_id
    FROM autotune_trials, counter
"""


@sqlite_alone
def test_thousands_of_trials_are_found_by_an_index(
    store: Store, database: Path, new_study: NewStudy, new_trial: NewTrial
) -> None:
    study = new_study("first")
    trial = new_trial(study, 0)
    steps = tuple(0.2 + step / 1000 for step in range(20))
    measurement = dataclasses.replace(MEASURED.measurement, step_seconds_each=steps)
    store.finish_trial(trial.id, Completed(measurement), 3.0)
    run_sql(database, MULTIPLY)
    other_study = new_study("second")
    reads: tuple[Callable[[], list[TrialRecord]], ...] = (
        lambda: store.trials(study.id),
        lambda: [past.trial for past in store.past_trials(other_study)],
    )
    for read in reads:
        assert len(read()) == MANY
    assert store.studies()[1].trials == MANY
    for columns in ("study_id = ''", "environment_id = '' AND workload_id = ''"):
        plan = run_sql(database, f"EXPLAIN QUERY PLAN SELECT * FROM autotune_trials WHERE {columns}")
        assert "USING INDEX ix_autotune_trials_" in plan[0][3]


@sqlite_alone
def test_a_trial_costs_little_to_record(store: Store, new_study: NewStudy, new_trial: NewTrial) -> None:
    """Two commits, which wait for the disk, and few statements, however many trials there are."""
    study = new_study("first")
    happened: list[str] = []
    event.listen(store.engine, "commit", lambda _: happened.append("commit"))
    event.listen(store.engine, "before_cursor_execute", lambda _, __, statement, *___: happened.append(statement))
    costs = []
    for number in range(20):
        happened.clear()
        trial = new_trial(study, number)
        store.finish_trial(trial.id, MEASURED, 3.0)
        costs.append((happened.count("commit"), len(happened)))
    assert costs[0][0] == 2
    assert costs[0][1] <= 10
    assert set(costs) == {costs[0]}
