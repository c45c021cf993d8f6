"""Test that jobs are read as they were sent, and that what is no job is named."""

import json
from typing import Any

import pytest
from tiny import QUICK, tiny_workload

from autotune.core.candidate import Arm, Candidate
from autotune.core.device import Chip
from autotune.core.look import LookWork
from autotune.core.messages import DataWork, InspectionWork, Job, TrialWork, Work, server_line
from autotune.core.placement import RankDevices
from autotune.core.prediction import PredictionWork
from autotune.core.rehearsal import RehearsalWork

DEVICES = RankDevices("cuda", ("GPU-1", "GPU-2"))
TRIAL = TrialWork(Candidate(Arm("bf16", ranks=2), 8, 2), DEVICES, 2**30, QUICK, 42, data_folder="/data")
WORKS: tuple[Work, ...] = (
    TRIAL,
    LookWork((TRIAL.candidate,), DEVICES, 2**30, 42, noise=1),
    RehearsalWork(TRIAL.candidate, DEVICES, 2**30, 2**29, 42, host_bytes=2**34, seconds=2.0),
    InspectionWork(DEVICES),
    DataWork("/data"),
    PredictionWork(Arm(), Chip(), 2, 1, ((8, 1),), 8),
)


def document_as_read(what: Work, **changes: Any) -> Any:
    """The document of a job as the server reads it."""
    job = Job("one", tiny_workload("bert-tiny"), what, 60.0, "/logs/one.log")
    return json.loads(json.dumps({**job.document(), **changes}))


@pytest.mark.parametrize("work", WORKS)
def test_a_job_is_read_as_it_was_sent(work: Work) -> None:
    read = Job.from_document(document_as_read(work))
    assert read.work == work
    assert read.workload == tiny_workload("bert-tiny")
    assert (read.id, read.timeout_seconds, read.log_path) == ("one", 60.0, "/logs/one.log")
    assert read.ranks == (2 if isinstance(work, TrialWork | RehearsalWork) else 1)


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"kind": "dance"}, "its kind is 'dance', not one of trial, look, rehearse, inspect, read_data, predict"),
        ({"work": {}}, "malformed TrialWork: Object missing required field `candidate`"),
        ({"work": {**document_as_read(TRIAL)["work"], "seed": "x"}}, r"Expected `int`, got `str` - at `\$.seed`"),
        ({"work": {**document_as_read(TRIAL)["work"], "speed": 1}}, "does not know its fields speed"),
        ({"workload": {}}, "malformed Workload"),
        ({"timeout_seconds": None}, "malformed JobMessage"),
    ],
)
def test_what_is_no_job_is_named(changes: Any, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        Job.from_document(document_as_read(TRIAL, **changes))


def test_a_line_of_no_known_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="it has none of the fields ready, adopted"):
        server_line({"dances": True})
