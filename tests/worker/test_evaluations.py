"""Test that steps with a validation in them are told from those that only train, whatever the code is written with."""

from pathlib import Path

import pytest
from server_client import ServerClient

from autotune.core.candidate import OWN_OPTIM, Arm, Candidate
from autotune.core.outcome import Effort
from autotune.core.training_source import find_loop, find_script
from autotune.core.workload import Workload
from autotune.worker.trial.measure import Evaluations

EFFORT = Effort(warmup_steps=2, min_steps=7, max_steps=7, max_seconds=1000.0)
MODELS = """
import copy, torch, autotune
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
encoder, model = torch.nn.Linear(4, 4).requires_grad_(False), torch.nn.Linear(4, 1)
average = copy.deepcopy(model).requires_grad_(False)
def validate(done):
    print("trained", done)
    if done % 5 == 0:
        print("validates")
        with torch.no_grad():
            average(torch.randn(64, 4))
        torch.save(average, "average.pt")
"""
ACCELERATE = """
from accelerate import Accelerator
accelerator = Accelerator(gradient_accumulation_steps=1, cpu=True)
optimizer, loader = torch.optim.AdamW(model.parameters()), DataLoader(TensorDataset(torch.randn(512, 4)), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
done = 0
for epoch in range(9):
    for (batch,) in loader:
        with accelerator.accumulate(model):
            with torch.no_grad():
                seen = encoder(batch)
            accelerator.backward(model(seen).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            done += 1
            validate(done)
"""
LOOP = """
def train(config):
    optimizer, done = torch.optim.AdamW(model.parameters()), 0
    loader = DataLoader(TensorDataset(torch.randn(512, 4)), batch_size=config.per_device_batch_size)
    for (batch,) in autotune.steps(loader):
        with torch.no_grad():
            seen = encoder(batch)
        model(seen).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        validate(done)
"""
TRAINER = """
from transformers import Trainer, TrainerCallback, TrainingArguments
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = model
    def forward(self, x):
        return {"loss": self.layer(x).square().mean()}
class Validates(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        validate(state.global_step)
data = [{"x": torch.randn(4)} for _ in range(512)]
arguments = TrainingArguments("out", use_cpu=True, per_device_train_batch_size=4, report_to=[], save_strategy="no")
Trainer(Net(), arguments, train_dataset=data, callbacks=[Validates()]).train()
"""


@pytest.mark.parametrize("text", [ACCELERATE, LOOP, TRAINER], ids=["accelerate", "loop", "trainer"])
def test_a_validation_in_the_loop_is_no_part_of_the_steps(trial_server: ServerClient, folder: Path, text: str) -> None:
    """Of eleven steps or more two are of warm-up, the fifth and the tenth validate."""
    (folder / "run.py").write_text(MODELS + text)
    source = find_loop("run.py:train") if text is LOOP else find_script(["run.py"])
    workload, _ = trial_server.prepared(Workload.of_source(source))
    optim = "adamw_torch_fused" if text is TRAINER else OWN_OPTIM
    answer = trial_server.trial(workload, Candidate(Arm(optim=optim), 8), EFFORT)
    measured = answer.completed.measurement
    trained, validations, timed = *map(answer.log.count, ("trained", "validates")), len(measured.step_seconds_each)
    assert timed >= 7
    assert trained == 2 + timed + validations
    assert measured.evaluates_every == 5
    assert measured.evaluation_seconds is not None


@pytest.mark.parametrize(
    ("counts", "found"),
    [
        # None, a teacher's in each step, one in the first step.
        ([0, 0, 0, 3, 0, 0, 3], [3, 6]),
        ([1, 1, 1, 1, 2, 1], [4]),
        ([3, 0, 0, 3, 0], [3]),
        ([0, 9, 0, 9, 0, 9], [1, 3, 5]),
        # Each step has one, and each samples as long as it likes.
        ([4, 4, 4, 4], []),
        ([30, 37, 52, 41, 47, 33, 120], [1, 2, 6]),
    ],
)
def test_the_usual_calls_without_gradients_are_learnt(counts: list[int], found: list[int]) -> None:
    evaluations = Evaluations()
    assert [at for at, count in enumerate(counts) if evaluations.has_evaluation(count)] == found
