"""Test that the user's own code is inspected on all of its ranks: real processes on the CPU."""

from pathlib import Path

import pytest
from server_client import Answer, ServerClient

from autotune.core.candidate import Arm, Candidate
from autotune.core.messages import InspectionWork
from autotune.core.placement import RankDevices
from autotune.core.training_source import find_script, find_trainer
from autotune.core.workload import Workload

TWO = RankDevices("cpu", ("cpu", "cpu"))

BEGINS = """
import os
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, Trainer, TrainingArguments
rank, world = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
config = AutoConfig.for_model("bert", hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
samples = [{"input_ids": torch.arange(12), "labels": torch.tensor(n % 2)} for n in range(64)]
def build(overrides={}):
    own = {"output_dir": "out", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 8 // world}
    arguments = TrainingArguments(**{**own, **overrides})
    return Trainer(AutoModelForSequenceClassification.from_config(config), arguments, train_dataset=samples)
"""

EXCHANGES = """
torch.distributed.init_process_group("gloo")
ranks = torch.tensor([rank])
torch.distributed.all_reduce(ranks)
assert ranks.item() == 1
build().train()
"""

# Rank 0 waits for rank 1, which cannot train with another batch than its own.
CANNOT_BE_PROBED = """
trainer = build()
if rank == 1 and trainer.args.per_device_train_batch_size != 4:
    raise ValueError("no other batch")
torch.distributed.barrier()
trainer.train()
"""

ROLLOUTS = """
from dataclasses import dataclass
@dataclass
class RolloutArguments(TrainingArguments):
    num_generations: int = 8
    generation_batch_size: int | None = None
    def __post_init__(self):
        super().__post_init__()
        step = self.per_device_train_batch_size * self.gradient_accumulation_steps
        self.generation_batch_size = step * self.world_size
TrainingArguments = RolloutArguments
build().train()
"""

FAILS_ON_ONE = """
if rank == 1:
    raise ValueError("no data here")
build().train()
"""


def inspected(server: ServerClient, folder: Path, text: str, *, is_function: bool = False) -> Answer:
    """The answer of an inspection of a script, or of its function, on two ranks."""
    (folder / "train.py").write_text(BEGINS + text)
    source = find_trainer(f"{folder / 'train.py'}:build") if is_function else find_script(["train.py"], 2)
    return server.run(Workload.of_source(source), InspectionWork(TWO))


@pytest.mark.parametrize("kind", ["exchanges", "cannot be probed", "function"])
def test_code_that_depends_on_its_rank_is_inspected(trial_server: ServerClient, folder: Path, kind: str) -> None:
    text = {"exchanges": EXCHANGES, "cannot be probed": CANNOT_BE_PROBED, "function": ""}[kind]
    answer = inspected(trial_server, folder, text, is_function=kind == "function")
    own = answer.inspected.model.own
    # As the code itself makes it of the number of ranks.
    assert (own.per_device_train_batch_size, own.gradient_accumulation_steps) == (4, 4)


def test_completions_of_a_prompt_may_be_on_several_ranks(trial_server: ServerClient, folder: Path) -> None:
    answer = inspected(trial_server, folder, ROLLOUTS)
    assert answer.inspected.model.interface.samples_a_prompt == 8


def test_a_rank_that_fails_is_named(trial_server: ServerClient, folder: Path) -> None:
    problem = inspected(trial_server, folder, FAILS_ON_ONE).problem
    assert problem.message == "rank 1: train.py raised ValueError: no data here"


def test_samples_are_not_counted_that_own_settings_do_not_train(trial_server: ServerClient, folder: Path) -> None:
    """As where the code chooses its batch by what it finds when it runs."""
    (folder / "train.py").write_text(
        BEGINS.replace('int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])', "0, 1")
    )
    workload = Workload.of_source(find_trainer(f"{folder / 'train.py'}:build"))
    outcome = trial_server.trial(workload, Candidate(Arm(), 4, 16), unmodified=True).failed
    assert outcome.message == (
        "train.py:build trains with 4 × 8 samples here, and trained with 4 × 16 when it was looked at"
    )
