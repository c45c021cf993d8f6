"""Test that two GPUs that share each sample train as one does; ``make test-gpu`` runs it where there are two."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny import AMPLE_BYTES, QUICK, tiny_workload

from autotune.core.candidate import Arm, Candidate
from autotune.core.outcome import Completed, Failed, Outcome
from autotune.core.placement import Placement
from autotune.devices.listing import list_devices
from autotune.execution import TrialJob, TrialServer, run_trial

GPUS = [device for device in list_devices() if device.kind == "cuda"]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(len(GPUS) < 2, reason="there are no two NVIDIA GPUs here")]

PROGRAM = Path(__file__).with_name("share_samples.py")
SHARED = Arm("bf16", strategy="fsdp", ranks=2, context_parallel=2, transformer_layer_cls_to_wrap="LlamaDecoderLayer")
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointed with a fused loss": {"gradient_checkpointing": True, "fused_loss": True},
    "compiled by layer": {"torch_compile": True, "regional_compilation": True, "unpadded": True},
}


def losses_of(arm: Arm, folder: Path) -> list[float]:
    """The loss of each step of a training with an arm, in processes as users start them."""
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(arm.ranks)] if arm.ranks > 1 else []
    visible = ",".join(gpu.uuid for gpu in GPUS[: arm.ranks])
    done = subprocess.run(
        [sys.executable, *words, str(PROGRAM), json.dumps(dataclasses.asdict(arm))], cwd=folder, check=False,
        capture_output=True, text=True, timeout=300, env={**os.environ, "CUDA_VISIBLE_DEVICES": visible},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [float(loss) for loss in json.loads(done.stdout.rpartition("losses ")[2])]


def trial(model: str, arm: Arm, folder: Path) -> Outcome:
    """The outcome of a trial on the first two GPUs."""
    workload = tiny_workload(model, seq_len=256, config={"num_hidden_layers": 2})
    with TrialServer(Placement.of(*GPUS[:2]), workload, folder) as server:
        job = TrialJob("trial", Candidate(arm, 4, 2), AMPLE_BYTES, QUICK, 42, 180.0, str(folder / "trial.log"))
        return run_trial(server, job)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_the_same_losses_as_on_one_gpu(settings: dict[str, Any], tmp_path: Path) -> None:
    alone = losses_of(Arm("bf16"), tmp_path)
    shared = losses_of(dataclasses.replace(SHARED, **settings), tmp_path)
    assert shared[:10] == pytest.approx(alone[:10], rel=0.02)
    # Learnt from tokens that the other rank has.
    assert max(alone[-1], shared[-1]) < 0.1 * alone[0]


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_trial_counts_each_sample_once(settings: dict[str, Any], tmp_path: Path) -> None:
    outcome = trial("llama-tiny", dataclasses.replace(SHARED, **settings), tmp_path)
    assert isinstance(outcome, Completed), outcome
    measured = outcome.measurement
    assert measured.samples_per_second * measured.step_seconds == pytest.approx(8)


def test_a_model_with_windows_is_refused(tmp_path: Path) -> None:
    arm = dataclasses.replace(SHARED, transformer_layer_cls_to_wrap="Gemma3DecoderLayer")
    outcome = trial("gemma-3-270m", arm, tmp_path)
    assert isinstance(outcome, Failed)
    assert outcome.reason == "unavailable"
    assert "sliding_attention" in outcome.message
