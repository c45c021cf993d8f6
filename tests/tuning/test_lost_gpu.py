"""Test a search on two GPUs that loses the second one, with a stand-in NVML library, computed trials and real locks."""

import re
from pathlib import Path
from typing import Any

import pytest
from machine import Machine, uuid_of

SEARCH = """
import contextlib, dataclasses, sys
sys.path.insert(0, {tests!r})
from recorded import ComputedRunner
from searching import BERT_LARGE, FACTS, RecordingObserver
from autotune.core.errors import AutotuneError, DeviceError
from autotune.core.look import LookAnswer
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
        return LookAnswer(problem="a stand-in")

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
    found: dict[str, Any] = machine.ask(code, STAND_IN_GPUS="2", AUTOTUNE_LOCKS=str(folder / "locks"))
    return found


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
