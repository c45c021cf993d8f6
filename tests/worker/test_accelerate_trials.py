"""Trials of unmodified scripts that train with an ``Accelerator``, each in a process of its own, on the CPU."""

import dataclasses
from pathlib import Path

import pytest
from server_client import ServerClient, of_command
from tiny import QUICK

from autotune.core.candidate import OWN_OPTIM, Arm, Candidate, Document
from autotune.core.training_source import find_script
from autotune.core.workload import Workload

SCRIPT = Path(__file__).resolve().parents[1] / "own_code" / "accelerate_loop.py"


def inspected(server: ServerClient, *words: str) -> tuple[Workload, Document]:
    """The workload as trials get it, and the model's facts."""
    return server.prepared(of_command("python", str(SCRIPT), "--output_dir", "out", *words))


def candidate(batch: int, accumulation: int, precision: str = "fp32", *, checkpoints: bool = False) -> Candidate:
    """One that the script's own optimizer trains."""
    arm = Arm(precision, gradient_checkpointing=checkpoints, optim=OWN_OPTIM)  # type: ignore[arg-type]
    return Candidate(arm, batch, accumulation)


def test_a_loop_on_accelerate_is_measured_unmodified(trial_server: ServerClient, folder: Path) -> None:
    own = ("--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2")
    workload, model = inspected(trial_server, *own)
    assert model.class_name == "BertForSequenceClassification"
    assert model.samples == 96
    assert model.interface.searched == ("batch", "accumulation", "precision", "checkpointing")
    assert (model.interface.tunes_loader, model.interface.loader_workers) == (True, 0)
    assert model.interface.loader.startswith("accelerate_loop.py:")
    assert model.interface.flags == {
        "batch": "--per_device_train_batch_size", "accumulation": "--gradient_accumulation_steps",
    }  # fmt: skip
    assert (model.own.per_device_train_batch_size, model.own.gradient_accumulation_steps) == (4, 2)
    assert model.own.arm.precision == "fp32"
    assert model.interface.accelerator.startswith("accelerate_loop.py:")
    assert model.interface.passed == ("gradient_accumulation_steps",)

    tried = candidate(16, 2, "bf16", checkpoints=True)
    answer = trial_server.trial(workload, tried)
    measured = answer.completed.measurement
    assert (measured.micro_steps_run, len(measured.step_seconds_each)) == (2, QUICK.max_steps)
    assert "bf16, 2, 6 batches" in answer.log
    assert "evaluated" not in answer.log
    # 96 samples are 48 batches of 2; three micro-steps stand for all eight.
    waits = dataclasses.replace(candidate(2, 8, "tf32").arm, dataloader_num_workers=2)
    answer = trial_server.trial(workload, Candidate(waits, 2, 8))
    assert answer.completed.measurement.micro_steps_run == 3
    assert "loads with 2 processes" in answer.log
    assert "float32 products: high\n" in answer.log
    answer = trial_server.trial(workload, candidate(4, 2), unmodified=True)
    assert "no, 2, 24 batches" in answer.log
    assert "loads with 0 processes" in answer.log
    assert "float32 products: highest" in answer.log
    assert answer.completed.measurement.micro_steps_run == 2
    assert list(folder.iterdir()) == []


def test_a_loop_that_accumulates_by_its_own_option_is_given_another(trial_server: ServerClient, folder: Path) -> None:
    workload, model = inspected(trial_server, "--own_modulo", "--gradient_accumulation_steps", "3")
    assert model.interface.accumulates_by == "option"
    assert model.own.gradient_accumulation_steps == 3
    answer = trial_server.trial(workload, candidate(4, 2))
    assert answer.completed.measurement.micro_steps_run == 2
    assert list(folder.iterdir()) == []


# Its tensors have four channels, which are no four samples.
MAKES_BATCHES = """
import argparse, itertools, torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, IterableDataset
p = argparse.ArgumentParser()
p.add_argument("--OPTION", dest="rows", type=int, default=2)
batches = [torch.ones(p.parse_args().rows, 4, 2, 2) for _ in range(99)]
class Stream(IterableDataset):
    def __iter__(self):
        return itertools.cycle(batches)
net = torch.nn.Conv2d(4, 4, 1)
net, optimizer, loader = Accelerator().prepare(net, torch.optim.SGD(net.parameters(), 0.1), LOADER)
for batch in loader:
    net(batch).mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("option", "loader", "what", "hint"),
    [
        ("train_batch_size", "DataLoader(batches, collate_fn=lambda items: items[0])",
         "takes one item of its data at a time, whatever its batch_size is",
         "-- python run.py --train_batch_size '{batch}' (its options are --train_batch_size; see"),
        # Any option may make the batch.
        ("rows", "DataLoader(Stream(), batch_size=None)", "has no batch size", "its options are --rows; see"),
    ],
    ids=["whole batches", "no batch size"],
)  # fmt: skip
def test_a_loader_whose_data_make_the_batches_takes_no_other(
    trial_server: ServerClient, folder: Path, option: str, loader: str, what: str, hint: str
) -> None:
    (folder / "run.py").write_text(MAKES_BATCHES.replace("OPTION", option).replace("LOADER", loader))
    problem = trial_server.inspection(of_command("run.py")).problem
    assert problem.message == f"the DataLoader of run.py {what}: its data make the batches"
    assert hint in problem.hint
    pasted = find_script(["run.py", f"--{option}", "{batch}"])
    assert trial_server.model(Workload.of_source(pasted)).interface.searched == ("batch",)


def test_a_training_of_few_steps_is_measured_for_as_many_as_it_takes(trial_server: ServerClient, folder: Path) -> None:
    workload, _ = inspected(trial_server, "--max_train_steps", "1", "--num_train_epochs", "1")
    answer = trial_server.trial(workload, candidate(8, 1))
    assert len(answer.completed.measurement.step_seconds_each) == QUICK.max_steps
    assert "evaluated" not in answer.log
    assert list(folder.iterdir()) == []
