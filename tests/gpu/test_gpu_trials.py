"""Test real trials on a real GPU; ``make test-gpu`` runs them."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import all_gone, children, processes_named
from tiny import AMPLE_BYTES, QUICK, tiny_workload

from autotune.core.candidate import PRECISIONS, Arm, Candidate
from autotune.core.candidate import Precision as PrecisionName
from autotune.core.device import Device
from autotune.core.inspection import Inspection
from autotune.core.outcome import Completed, Effort, Measurement, Outcome, OutOfMemory
from autotune.core.placement import Placement
from autotune.core.units import GIB, MIB
from autotune.devices.listing import list_devices
from autotune.devices.nvml import nvml_problem
from autotune.execution import TrialJob, TrialServer
from autotune.execution import run_trial as run_on
from autotune.execution.child_process import server_environment

# By NVML alone: this process must not hold a CUDA context beside the trials.
GPUS = [device for device in list_devices() if device.kind == "cuda"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not GPUS, reason=f"no NVIDIA GPU here ({nvml_problem() or 'none is visible'})"),
]

HERE = Path(__file__).parent
METER_CONTRACT = HERE.parent / "worker" / "meter_contract.py"
MATMUL = HERE / "print_matmul_error.py"
FITS = Candidate(Arm(), 16)
# Two layers of bert-tiny at 128 tokens took 5 MiB a sample on the CPU.
DOES_NOT_FIT = Candidate(Arm(), 512)
SMALL_CAP_BYTES = 256 * MIB


@pytest.fixture(scope="module")
def gpu() -> Device:
    """The first GPU."""
    return GPUS[0]


@pytest.fixture(scope="module")
def runner(gpu: Device, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrialServer]:
    """A warm runner on the first GPU, started where all GPUs are visible."""
    with TrialServer(gpu, tiny_workload("bert-tiny", seq_len=128), tmp_path_factory.mktemp("logs")) as started:
        yield started


@pytest.fixture(scope="module")
def facts(runner: TrialServer) -> Inspection:
    """What the trial process says of the machine and the model."""
    return runner.inspect()


def run_trial(
    runner: TrialServer, candidate: Candidate = FITS, cap_bytes: int = AMPLE_BYTES, effort: Effort = QUICK
) -> Outcome:
    log = runner.server_log.with_name("trial.log")
    return run_on(runner, TrialJob("trial", candidate, cap_bytes, effort, 42, 180.0, str(log)))


def measured(outcome: Outcome) -> Measurement:
    assert isinstance(outcome, Completed), outcome
    return outcome.measurement


@pytest.mark.parametrize("accumulation", [1, 2, 8])
def test_the_profiler_says_for_how_long_the_gpu_computes(runner: TrialServer, accumulation: int) -> None:
    effort = dataclasses.replace(QUICK, busy_steps=1)
    found = measured(run_trial(runner, Candidate(Arm(), 16, accumulation), effort=effort))
    assert 0 < found.gpu_busy_share <= 1


def test_a_pinned_trial_is_as_any_other(runner: TrialServer) -> None:
    found = measured(run_trial(runner, Candidate(Arm(cpu_affinity=True, dataloader_num_workers=2), 16)))
    assert found.cpu_core in os.sched_getaffinity(0)


def test_segments_expand_under_the_same_cap(runner: TrialServer, facts: Inspection) -> None:
    """A setting given after torch was imported and forked counts, and so does the cap."""
    expanding = Arm(expandable_segments=True)
    plain = measured(run_trial(runner))
    found = measured(run_trial(runner, Candidate(expanding, FITS.per_device_train_batch_size)))
    assert found.peak_allocated_bytes == pytest.approx(plain.peak_allocated_bytes, rel=0.02)
    # Segments of the default allocator are at least 2 MiB, one for small and one for large blocks each.
    assert found.peak_reserved_bytes != plain.peak_reserved_bytes
    outcome = run_trial(runner, Candidate(expanding, 512), SMALL_CAP_BYTES)
    assert isinstance(outcome, OutOfMemory), outcome


def in_trial_environment(gpu: Device, *command: str) -> str:
    """What a script prints that is started as a trial server is."""
    environment = server_environment(Placement.of(gpu), os.environ, offline=True)
    ended = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def products(gpu: Device) -> dict[str, dict[str, Any]]:
    """What ``print_matmul_error`` says under each precision that the GPU has, each in a process of its own."""
    return {
        precision: json.loads(in_trial_environment(gpu, str(MATMUL), precision).splitlines()[-1])
        for precision in ("fp32", "tf32")
        if precision in gpu.precisions
    }


def test_the_context_has_a_believable_size(facts: Inspection) -> None:
    assert 200 * MIB < facts.context_bytes < 1.5 * GIB


def test_the_context_is_that_of_a_process_that_trains(runner: TrialServer, gpu: Device, facts: Inspection) -> None:
    arm = Arm("bf16" if "bf16" in gpu.precisions else "fp32")
    found = measured(run_trial(runner, Candidate(arm, 16))).context_bytes
    assert abs(found - facts.context_bytes) < 64 * MIB


def test_the_environment_is_the_gpus(facts: Inspection, gpu: Device) -> None:
    assert facts.software.cuda
    assert facts.chip.capability == gpu.capability
    assert facts.model.class_name == "BertForSequenceClassification"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_trial_completes(runner: TrialServer, gpu: Device, precision: PrecisionName) -> None:
    if precision not in gpu.precisions:
        pytest.skip(f"{gpu.name} has no {precision}")
    outcome = run_trial(runner, Candidate(Arm(precision), 16, 4))
    found = measured(outcome)
    assert found.micro_steps_run == 3
    assert found.samples_per_second == pytest.approx(64 / found.step_seconds)
    assert found.peak_reserved_bytes >= found.peak_allocated_bytes > 16 * MIB
    assert found.device_used_bytes > found.peak_allocated_bytes
    assert found.allocation_retries == 0
    assert 0 < found.optimizer_seconds < found.step_seconds
    assert isinstance(outcome, Completed)
    assert list(outcome.phase_seconds) == ["device", "model", "trainer", "train"]


def test_checkpointing_saves_memory(runner: TrialServer) -> None:
    plain, checkpointed = (
        measured(run_trial(runner, Candidate(Arm(gradient_checkpointing=on), 128))).peak_allocated_bytes
        for on in (False, True)
    )
    assert checkpointed < 0.8 * plain


# The weights are 2.4 MB, in blocks of 2 MiB: the second block does not fit under the small cap.
@pytest.mark.parametrize(("cap_bytes", "phase"), [(3 * MIB, "model"), (SMALL_CAP_BYTES, "train")])
def test_cuda_really_runs_out_and_the_next_trial_is_fine(runner: TrialServer, cap_bytes: int, phase: str) -> None:
    outcome = run_trial(runner, DOES_NOT_FIT, cap_bytes)
    assert isinstance(outcome, OutOfMemory), outcome
    assert (outcome.during, outcome.where) == (phase, "device")
    assert "out of memory" in outcome.message.lower()
    assert 0 < outcome.peak_reserved_bytes <= cap_bytes
    assert measured(run_trial(runner)).peak_reserved_bytes > 0


def test_the_cap_holds(runner: TrialServer) -> None:
    free = measured(run_trial(runner, Candidate(Arm(), 64)))
    # Fragmentation and workspaces took up to a quarter more than is allocated.
    cap_bytes = free.peak_allocated_bytes * 3 // 2
    assert measured(run_trial(runner, Candidate(Arm(), 64), cap_bytes)).peak_reserved_bytes <= cap_bytes
    assert isinstance(run_trial(runner, Candidate(Arm(), 64), free.peak_allocated_bytes // 2), OutOfMemory)


def test_the_trial_sees_one_device_and_it_is_this_one(products: dict[str, dict[str, Any]], gpu: Device) -> None:
    seen = products["fp32"]
    assert (seen["devices"], seen["n_gpu"], seen["device"]) == (1, 1, "cuda:0")
    if gpu.uuid.startswith("GPU-") and seen["uuid"]:
        assert gpu.uuid.removeprefix("GPU-") == seen["uuid"].removeprefix("GPU-")


def test_the_server_was_started_for_this_device(runner: TrialServer, facts: Inspection, gpu: Device) -> None:
    found = [
        Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        for pid in processes_named("autotune.worker.server", children(os.getpid()))
    ]
    assert f"CUDA_VISIBLE_DEVICES={gpu.uuid}".encode() in [entry for environ in found for entry in environ]


def test_fp32_and_tf32_are_different_things(products: dict[str, dict[str, Any]], gpu: Device) -> None:
    if "tf32" not in products:
        pytest.skip(f"{gpu.name} has no tf32")
    # A mantissa of 23 bits against one of 10.
    assert products["fp32"]["relative_error"] < 1e-5
    assert 1e-4 < products["tf32"]["relative_error"] < 1e-2


def test_the_cuda_meter_keeps_the_contract(gpu: Device) -> None:
    assert in_trial_environment(gpu, str(METER_CONTRACT), "cuda", gpu.uuid).strip() == "kept"


def test_closing_leaves_no_process_on_the_gpu(gpu: Device, tmp_path: Path) -> None:
    before = processes_named("autotune.worker.server", children(os.getpid()))
    with TrialServer(gpu, tiny_workload("bert-tiny"), tmp_path) as other:
        assert measured(run_trial(other)).peak_reserved_bytes > 0
        started = [p for p in processes_named("autotune.worker.server", children(os.getpid())) if p not in before]
        assert len(started) == 1
    assert all_gone(started)
