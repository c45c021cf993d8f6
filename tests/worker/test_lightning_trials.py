"""Trials of unmodified scripts that train with Lightning, each in a process of its own, on the CPU."""

import importlib
import importlib.util
from pathlib import Path

import pytest
from server_client import ServerClient, of_command
from test_rehearsal import rehearsed_source
from tiny import QUICK

from autotune.core.candidate import OWN_OPTIM, Arm, Candidate
from autotune.core.training_source import find_script
from autotune.core.units import MIB
from autotune.core.workload import Workload

SCRIPT = Path(__file__).resolve().parents[1] / "own_code" / "lightning_loop.py"


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_a_lightning_script_is_measured_unmodified(trial_server: ServerClient, folder: Path, package: str) -> None:
    if importlib.util.find_spec(package.partition(".")[0]) is None:
        pytest.skip(f"{package} is not installed: make test-clients")
    source = find_script(["python", str(SCRIPT), "--package", package, "--accumulate_grad_batches", "2"])
    workload, model = trial_server.prepared(Workload.of_source(source))
    assert (model.class_name, model.samples) == ("Classifier", 40)
    interface = model.interface
    assert interface.searched == ("batch", "accumulation", "precision", "checkpointing")
    assert interface.loader.startswith("lightning_loop.py:")
    assert interface.flags == {"batch": "--batch_size", "accumulation": "--accumulate_grad_batches"}
    assert (model.own.per_device_train_batch_size, model.own.gradient_accumulation_steps) == (4, 2)

    # 40 samples are five batches of 8: the last step of each epoch is cut short.
    tried = Candidate(Arm("bf16", gradient_checkpointing=True, optim=OWN_OPTIM), 8, 2)
    answer = trial_server.trial(workload, tried)
    measured = answer.completed.measurement
    assert (measured.micro_steps_run, len(measured.step_seconds_each)) == (2, QUICK.max_steps)
    assert measured.samples_per_second == pytest.approx(16 / measured.step_seconds)
    assert 0 < measured.optimizer_seconds < measured.step_seconds  # type: ignore[operator]
    assert "trains with bf16-mixed, 2" in answer.log
    assert "checkpoints: True" in answer.log
    assert "validates" not in answer.log
    answer = trial_server.trial(workload, Candidate(Arm(optim=OWN_OPTIM), 4, 2), unmodified=True)
    assert "trains with 32-true, 2" in answer.log
    assert answer.completed.measurement.micro_steps_run == 2
    assert list(folder.iterdir()) == []


def test_tf32_is_seen_as_the_precision_of_a_script_that_allows_it(trial_server: ServerClient, tmp_path: Path) -> None:
    pytest.importorskip("lightning.pytorch", reason="make test-clients")
    script = tmp_path / "train.py"
    told = 'import torch\ntorch.set_float32_matmul_precision("high")\nimport argparse\n'
    script.write_text(SCRIPT.read_text().replace("import argparse\n", told))
    _, model = trial_server.prepared(of_command("python", str(script)))
    assert model.own.arm.precision == "tf32"


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_validation_of_two_batches_is_rehearsed_to_its_end(
    trial_server: ServerClient, tmp_path: Path, accumulation: int
) -> None:
    """Lightning takes as many batches as there are: parts of the first must leave room for a whole one."""
    pytest.importorskip("lightning.pytorch", reason="make test-clients")
    script = tmp_path / "train.py"
    text = (
        SCRIPT.read_text()
        .replace("range(40)", "range(400)")
        .replace("self.samples, batch_size=2,", "self.samples[:], 200,")
    )
    script.write_text(text.replace('print("validates")', 'torch.ones(len(batch["labels"]), 2**19)  # 2 MiB each'))
    candidate = Candidate(Arm(optim=OWN_OPTIM), 4, accumulation)
    found = rehearsed_source(trial_server, find_script(["python", str(script)]), candidate, 300 * MIB)
    assert found.unknown == ()
    assert (found.evaluation.batch, found.evaluation.samples, found.evaluation.fits) == (200, 400, False)
    assert found.evaluation.settings == {"batch_size": 25}


def test_what_writes_in_place_of_a_logger_is_left_out() -> None:
    callbacks = pytest.importorskip("lightning.pytorch.callbacks", reason="make test-clients")
    pytest.importorskip("jsonargparse", reason="make test-clients")
    cli = importlib.import_module("lightning.pytorch.cli")
    from autotune.worker.user.frameworks.lightning import kept

    own = callbacks.LambdaCallback()
    given = [cli.SaveConfigCallback(None, None), callbacks.ModelCheckpoint(), own]
    assert kept("lightning.pytorch", given) == [own]
