"""Trials of unmodified scripts that train with Lightning's Fabric, each in a process of its own, on the CPU."""

import importlib.util
from pathlib import Path

import pytest
from server_client import ServerClient, of_command
from tiny import QUICK

from autotune.core.candidate import OWN_OPTIM, Arm, Candidate
from autotune.core.training_source import find_script
from autotune.core.workload import Workload
from autotune.results.own_arguments import hand_over, own_arguments

SCRIPT = Path(__file__).resolve().parents[1] / "own_code" / "fabric_loop.py"


@pytest.fixture(autouse=True)
def has_fabric() -> None:
    """Fabric is there."""
    if importlib.util.find_spec("lightning") is None:
        pytest.skip("lightning is not installed: make test-clients")


def test_a_script_with_fabric_is_measured_unmodified(trial_server: ServerClient, folder: Path) -> None:
    source = find_script(["python", str(SCRIPT)])
    workload, model = trial_server.prepared(Workload.of_source(source))
    assert (model.class_name, model.samples) == ("BertForSequenceClassification", 64)
    assert model.interface.searched == ("batch", "accumulation", "precision", "checkpointing")
    assert (model.own.per_device_train_batch_size, model.own.gradient_accumulation_steps) == (4, 2)
    candidate = Candidate(Arm("bf16", gradient_checkpointing=True, optim=OWN_OPTIM), 8, 3)
    answer = trial_server.trial(workload, candidate)
    measured = answer.completed.measurement
    assert (measured.micro_steps_run, len(measured.step_seconds_each)) == (3, QUICK.max_steps)
    assert measured.samples_per_second == pytest.approx(24 / measured.step_seconds)
    assert "trained" not in answer.log
    answer = trial_server.trial(workload, Candidate(Arm(optim=OWN_OPTIM), 4, 2), unmodified=True)
    assert answer.completed.measurement.micro_steps_run == 2
    assert list(folder.iterdir()) == []
    arguments = own_arguments(workload.source, candidate)
    assert arguments == {
        "batch_size": 8, "gradient_accumulation_steps": 3, "precision": "bf16-mixed", "gradient_checkpointing": True,
    }  # fmt: skip
    lines = hand_over(workload.source, arguments, candidate)
    assert lines == [
        "give them to fabric_loop.py after its other options (--format cli)",
        "call gradient_checkpointing_enable() of the model",
    ]


def test_an_accumulation_in_the_code_is_left(trial_server: ServerClient, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    text = SCRIPT.read_text().replace("args.gradient_accumulation_steps", "3")
    script.write_text(text.replace('parser.add_argument("--gradient-accumulation-steps", type=int, default=2)', ""))
    _, model = trial_server.prepared(of_command("python", str(script)))
    assert model.interface.searched == ("batch", "precision", "checkpointing")
    assert model.own.gradient_accumulation_steps == 3


def test_a_model_that_is_given_by_name_is_found(trial_server: ServerClient, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    together = "fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-4))"
    apart = "fabric.setup_module(module=model), fabric.setup_optimizers(torch.optim.AdamW(model.parameters()))"
    assert together in SCRIPT.read_text()
    script.write_text(SCRIPT.read_text().replace(together, apart))
    _, model = trial_server.prepared(of_command("python", str(script)))
    assert model.class_name == "BertForSequenceClassification"
