"""Test what is told before a run of what would end it after its first steps, with real trainings under real limits."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import warm
from server_client import ServerClient, of_command
from test_real_training import run

from autotune.core.candidate import OWN_OPTIM, Arm, Candidate
from autotune.core.device import Device
from autotune.core.placement import Placement
from autotune.core.real_training import RealTraining
from autotune.core.rehearsal import HostUse, LastStep, Part, Rehearsal, RehearsalWork, extrapolated
from autotune.core.schema import decode
from autotune.core.training_source import TrainingSource, find_loop, find_script
from autotune.core.units import MIB
from autotune.core.workload import Workload

RUNS = Path(__file__).resolve().parents[1] / "own_code" / "long_runs.py"
LOOPS = RUNS.with_name("loop_runs.py")
LAST_STEPS = RUNS.with_name("last_steps.py")


@pytest.fixture(scope="module")
def lone_server(cpu: Device, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerClient]:
    """A server as users have it: a fork of the tests' process has other shares of its pages when other forks end."""
    server = ServerClient(cpu, tmp_path_factory.mktemp("server"))
    # Only its start: what follows in this module is forked as elsewhere.
    with warm.cold():
        server.__enter__()
    yield server
    server.__exit__()


def rehearsed(
    server: ServerClient, name: str, cap_bytes: int, seconds: float = 2.0, *, script: Path = RUNS, batch: int = 8
) -> Rehearsal:
    """What is found of one of the trainings of a script under a limit."""
    source = find_script(("python", str(script), name))
    return rehearsed_source(server, source, Candidate(Arm(), batch, 8 // batch), cap_bytes, seconds)


def rehearsed_source(
    server: ServerClient,
    source: TrainingSource,
    candidate: Candidate,
    cap_bytes: int = 1000 * MIB,
    seconds: float = 2.0,
) -> Rehearsal:
    """What is found of a training with some settings under a limit."""
    workload = Workload.of_source(source)
    if source.name.partition(":")[0] != RUNS.name:
        workload, _ = server.prepared(workload)
    devices = Placement.of(server.device).rank_devices
    work = RehearsalWork(candidate, devices, cap_bytes, int(cap_bytes * 0.97), 42, seconds=seconds)
    answer = server.run(workload, work)
    return decode(answer.result, Rehearsal)


# What is told, and under which limit.
ENDINGS = {
    "logits": ("of which .* are outputs, where .*preprocess_logits_for_metrics", 400),
    "batch": ("batches of 512 are out of memory, .*; per_device_eval_batch_size=256 does", 200),
    "losses": ("memory grows by .* a step", 400),
    "longest": (r"the longest samples \(8 of up to 3,000 tokens\) is out of memory", 150),
    "saving": ("to write a checkpoint is out of memory", 330),
    "workers": ("more in each step: .* steps of an epoch; .* use fewer dataloader_num_workers", 325),
    "generation": ("the evaluation does not fit: .*; per_device_eval_batch_size=[1-9]+ does", 150),
    "average": ("copy of the weights|copies of the weights", 302),
    "metrics": ("memory grows by .* a step", 400),
    "each-worker": ("5 processes of the training hold .* use fewer dataloader_num_workers", 330),
}


# Of those that are told alike, the one whose training takes less.
_WIDER = ("metrics", "each-worker")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.whole if name in _WIDER else ()) for name in ENDINGS]
)
def test_what_ends_a_run_after_its_first_steps_is_told_before_it(
    request: pytest.FixtureRequest, folder: Path, name: str
) -> None:
    words, cap_mib = ENDINGS[name]
    server = request.getfixturevalue("lone_server" if "worker" in name else "trial_server")
    # Loader processes may take seconds to start on a busy machine, before the steps whose growth is looked at.
    seconds = 4.0 if "worker" in name else 2.0
    assert re.search(words, "\n".join(rehearsed(server, name, cap_mib * MIB, seconds).alarms))
    healthy = rehearsed(server, f"healthy-{name}", cap_mib * MIB, seconds)
    assert healthy.alarms == []


# What is told of a loop on accelerate, and under which limit.
LOOP_ENDINGS = {
    "batch": (
        "512 are out of memory, where .*; batch_size=(64|128|256) of its DataLoader does, and autotune run sets it",
        150,
    ),
    "logits": ("of which .* are outputs, where .*compute the metrics batch by batch", 400),
    "longest": (r"the longest samples \(8 of up to 3,000 tokens\) is out of memory", 150),
}


def test_the_longest_batch_of_a_smaller_one_survives(trial_server: ServerClient, folder: Path) -> None:
    assert rehearsed(trial_server, "longest", 600 * MIB).needs_less is not None
    smaller = rehearsed(trial_server, "longest", 600 * MIB, batch=1)
    assert (smaller.needs_less, smaller.alarms) == (None, [])
    assert smaller.longest is not None


# A validation in too large batches is told in the test of a run that makes them smaller, too.
@pytest.mark.parametrize("name", ["logits", "longest", pytest.param("batch", marks=pytest.mark.whole)])
def test_what_ends_a_loop_after_its_first_steps_is_told_before_it(
    trial_server: ServerClient, folder: Path, name: str
) -> None:
    words, cap_mib = LOOP_ENDINGS[name]
    assert re.search(words, "\n".join(rehearsed(trial_server, name, cap_mib * MIB, script=LOOPS).alarms))
    healthy = rehearsed(trial_server, f"healthy-{name}", cap_mib * MIB, script=LOOPS)
    assert (healthy.alarms, healthy.unknown) == ([], ())
    assert healthy.evaluation.batch == (16 if name == "batch" else 8)
    assert healthy.evaluation.samples == (4000 if name == "logits" else 512)


@pytest.mark.parametrize(
    ("name", "accumulation", "is_made"),
    [("right", 4, None), ("fixed", 4, True), ("left", 4, False), ("left", 5, None), (None, 4, True)],
)
def test_the_last_steps_of_an_epoch_are_told_where_they_are_trained_wrongly(
    trial_server: ServerClient, folder: Path, name: str | None, accumulation: int, is_made: bool | None
) -> None:
    source = find_script(("python", str(LAST_STEPS))) if name is None else find_loop(f"{LAST_STEPS}:{name}")
    found = rehearsed_source(trial_server, source, Candidate(Arm(), 8, accumulation))
    assert found.unknown == ()
    assert found.evaluation is not None
    assert found.last_step == (None if is_made is None else LastStep(375, accumulation, is_made))
    told = "about 3 / 4 as large" if is_made else "does not step"
    assert (is_made is not None) == any(told in each for each in found.sentences)


def test_a_run_makes_the_validation_batches_that_fit(trial_server: ServerClient, folder: Path) -> None:
    workload, _ = trial_server.prepared(of_command("python", str(LOOPS), "batch"))
    source, candidate = workload.source, Candidate(Arm(optim=OWN_OPTIM), 8, 1)
    batches = rehearsed_source(trial_server, source, candidate, 150 * MIB).loader_batches
    ((key, batch),) = batches.items()
    line = next(n for n, line in enumerate(LOOPS.read_text().splitlines(), 1) if "DataLoader(data" in line)
    assert Path(key).name == f"loop_runs.py:{line}#0"
    assert batch in (64, 128, 256)
    ran = run(RealTraining("s", source, candidate, {}, loader_batches=batches), folder)
    assert ran.stdout == f"most samples of a validation batch: {batch}\n", ran.stderr
    assert f"batch_size={batch} is set for the DataLoader at loop_runs.py:" in ran.stderr


def test_a_validation_on_the_samples_of_the_training_is_seen(trial_server: ServerClient, folder: Path) -> None:
    found = rehearsed(trial_server, "healthy-same", 400 * MIB, script=LOOPS)
    assert (found.unknown, found.evaluation.samples) == ((), 3000)


def test_a_validation_that_raises_is_told(trial_server: ServerClient, folder: Path) -> None:
    found = rehearsed(trial_server, "raises", 400 * MIB, script=LOOPS)
    assert found.alarms == []
    (told,) = found.unknown
    assert re.match("the validation: .* raised ZeroDivisionError: division by zero", told)


def test_a_run_that_is_no_more_than_its_steps_is_not_rehearsed(trial_server: ServerClient, folder: Path) -> None:
    goes_on = [
        trial_server.model(of_command("python", str(RUNS), name)).interface.goes_on for name in ("batch", "losses")
    ]
    assert goes_on == [True, False]


def test_metrics_that_raise_leave_the_rest_looked_at(trial_server: ServerClient, folder: Path) -> None:
    found = rehearsed(trial_server, "raises", 400 * MIB)
    assert found.peak_bytes is not None
    assert found.saving is not None
    assert found.unknown == ("the evaluation: ZeroDivisionError: division by zero",)


def test_a_whole_evaluation_follows_from_two_parts() -> None:
    small, large = Part(2, 100 * MIB, 1000 * MIB, 3.0), Part(10, 180 * MIB, 1040 * MIB, 7.0)
    whole = extrapolated(small, large, 100, None)
    assert (whole.device_bytes, whole.host_bytes, whole.seconds) == (1080 * MIB, 1490 * MIB, 52.0)
    assert whole.kept_bytes == 900 * MIB
    # What goes to the host after every 10 batches is on the device no longer; the host has all of it.
    assert extrapolated(small, large, 100, 10).device_bytes == 180 * MIB
    assert extrapolated(small, large, 100, 10).host_bytes == 1490 * MIB


def test_processes_that_copy_what_they_read_reach_the_limit_or_do_not() -> None:
    host = HostUse(800 * MIB, MIB, 3, 1000 * MIB, 500, 600 * MIB)
    assert host.steps_left == 200
    assert replace(host, steps=150).steps_left is None
    # There is no more to copy than this.
    assert replace(host, copied_bytes=100 * MIB).steps_left is None
