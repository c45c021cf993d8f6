"""Reading what was measured of a workload on any GPU, without opening the database for writing."""

from dataclasses import replace
from pathlib import Path

import pytest
from recorded import fault, measurement

from autotune.core.candidate import Arm, Candidate
from autotune.core.errors import StorageError
from autotune.core.outcome import Completed
from autotune.store.records import StudyRecord, TrialRecord
from autotune.store.repository import Store, measured_trials

CANDIDATE = Candidate(Arm("bf16"), 8, 2)
H200 = {"device_kind": "cuda", "device_name": "NVIDIA H200"}


def add(store: Store, name: str, environment: dict[str, str], workload: str = "w", **changes: object) -> TrialRecord:
    workload_id = store.intern_workload({"model": "m"}, workload)
    environment_id = store.intern_environment(environment, str(environment))
    study = StudyRecord(name, workload_id, environment_id, {}, {"cap_bytes": 2**34}, "0.1.0")
    store.create_study(study)
    outcome = Completed(measurement(CANDIDATE, 0.5, 2**30, 2**30, None))
    trial = TrialRecord(study.id, 0, CANDIDATE, workload_id, environment_id, outcome=outcome, seconds=1.0)
    trial = replace(trial, **changes)  # type: ignore[arg-type]
    store.start_trial(trial)
    return trial


def test_completed_trials_of_the_workload_on_gpus_are_found(store: Store, location: str) -> None:
    kept = add(store, "kept", H200)
    add(store, "reused", H200, stage="reused")
    add(store, "failed", H200, outcome=fault())
    add(store, "other", H200, workload="v")
    add(store, "cpu", {"device_kind": "cpu", "device_name": "EPYC"})
    (found,) = measured_trials(location, "w", 5.0)
    assert (found.id, found.device_name, found.candidate) == (kept.id, "NVIDIA H200", CANDIDATE)
    assert found.outcome == kept.outcome


def test_a_database_that_is_missing_has_none_and_one_that_is_no_database_says_so(tmp_path: Path) -> None:
    missing = tmp_path / "missing.db"
    assert measured_trials(str(missing), "w", 5.0) == []
    assert not missing.exists()
    (tmp_path / "text.db").write_text("no database" * 100)
    with pytest.raises(StorageError):
        measured_trials(str(tmp_path / "text.db"), "w", 5.0)
