"""Test that steps with new shapes are run twice, also in a real ``Trainer``."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fake_meter import unwatched
from tiny import AMPLE_BYTES
from transformers import Trainer, TrainerCallback, TrainingArguments

from autotune.core.candidate import Arm, Candidate
from autotune.core.jobs import TrialWork
from autotune.core.outcome import Completed, Effort, Outcome
from autotune.core.placement import RankDevices
from autotune.core.scratch import Scratch
from autotune.core.training_source import find_trainer
from autotune.core.workload import Workload
from autotune.worker.trial.meter import CpuMeter
from autotune.worker.trial.rehearsal import Rehearsing
from autotune.worker.user.trainer_code import Overlay
from autotune.worker.user.trainer_trial import TrainerTrial


def batch(*lengths: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.zeros(2, *lengths), "labels": torch.zeros(2)}


def test_only_steps_of_new_shapes_come_twice() -> None:
    rehearsing = Rehearsing(2)
    loader = [batch(3), batch(4), batch(4), batch(3), batch(3), batch(5), batch(6)]
    seen = [(rehearsing.new_shapes, given["input_ids"].shape[1]) for given in rehearsing.batches(loader)]
    assert seen == [(2, 3), (2, 4), (0, 3), (0, 4), (0, 4), (0, 3), (1, 3), (1, 5), (0, 3), (0, 5), (0, 6)]


def test_a_step_that_an_epoch_s_end_parts_comes_again_in_the_next() -> None:
    rehearsing = Rehearsing(2)
    first = rehearsing.batches([batch(3), batch(4)])
    assert [next(first)["input_ids"].shape[1] for _ in range(2)] == [3, 4]
    assert rehearsing.new_shapes == 2
    # The Trainer has had what its epoch has, and begins another.
    second = rehearsing.batches([batch(5), batch(5)])
    seen = [(rehearsing.new_shapes, given["input_ids"].shape[1]) for given in second]
    assert seen == [(0, 3), (0, 4), (1, 5), (1, 5), (0, 5), (0, 5)]


def test_a_rehearsal_that_is_cut_short_shows_no_shapes() -> None:
    rehearsing = Rehearsing(2)
    next(rehearsing.batches([batch(3), batch(4)]))
    again = rehearsing.batches([batch(3), batch(4)])
    assert [(rehearsing.new_shapes, given["input_ids"].shape[1]) for given in again][:2] == [(2, 3), (2, 4)]


def test_one_step_is_taken_for_each_that_is_given() -> None:
    """So that a data loader that is slower than the training is waited for as long as ever."""
    taken: list[int] = []

    def load() -> Any:
        for length in (3, 4, 5, 5):
            taken.append(length)
            yield batch(length)

    given = Rehearsing(1).batches(load())
    counts = []
    for _ in given:
        counts.append(len(taken))
    assert counts == [1, 2, 3, 4, 4, 4, 4], "3, 3, 4, 4, 5, 5, 5"


def test_what_is_taken_out_of_a_batch_is_there_the_second_time() -> None:
    given = Rehearsing(1).batches([batch(3)])
    next(given).pop("labels")
    assert set(next(given)) == {"input_ids", "labels"}


def test_it_is_the_loader_in_all_else() -> None:
    data = torch.utils.data.DataLoader([1, 2, 3], batch_size=2)
    stand_in = Rehearsing(1).over(data)
    assert len(stand_in) == 2
    assert stand_in.dataset is data.dataset
    assert not hasattr(stand_in, "set_epoch")


class Model(torch.nn.Module):
    """Notes the lengths that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.lengths: list[int] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.lengths.append(x.shape[1])
        return {"loss": ((x.mean() * self.weight - labels.mean()) ** 2).sum()}


class Note(TrainerCallback):
    """Notes at each step's end whether it was a rehearsal."""

    def __init__(self, rehearsing: Rehearsing) -> None:
        self.rehearsing = rehearsing
        self.new: list[int] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.new.append(self.rehearsing.new_shapes)


def test_a_real_trainer_takes_each_step_as_it_is_given(tmp_path: Path) -> None:
    samples = [{"x": torch.ones(3 + number // 8), "labels": torch.zeros(1)} for number in range(20)]
    arguments = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=8, report_to="none",
        disable_tqdm=True, use_cpu=True, save_strategy="no", train_sampling_strategy="sequential",
    )  # fmt: skip
    rehearsing = Rehearsing(2)
    note, model = Note(rehearsing), Model()
    trainer = Trainer(model, arguments, train_dataset=samples, callbacks=[note])
    original = trainer.get_train_dataloader
    trainer.get_train_dataloader = lambda: rehearsing.over(original())
    trainer.train()
    # Five steps of four samples an epoch: two of 3, two of 4, one of 5. The epoch ends where the Trainer expects it to,
    # and what had no turn in it comes first in the next.
    assert note.new == [1, 0, 0, 1, 0, 0, 1, 0]
    assert model.lengths == [3] * 6 + [4] * 6 + [5] * 4


class EndedError(Exception):
    """In place of the end of the process."""


def test_a_trial_of_one_s_own_rehearses_on_a_gpu(tmp_path: Path) -> None:
    """All of it but the GPU: the meter is the CPU's."""
    file = tmp_path / "train.py"
    file.write_text("def build(overrides): ...")
    effort = Effort(warmup_steps=1, min_steps=4, max_steps=4, target_spread=0.0, max_seconds=1000.0)
    workload = Workload.of_source(find_trainer(f"{file}:build"))
    work = TrialWork(Candidate(Arm("fp32"), 2, 2), RankDevices("cuda", ("",)), AMPLE_BYTES, effort, 0)
    ended: list[Outcome] = []

    def finish(outcome: Outcome) -> Any:
        ended.append(outcome)
        raise EndedError

    samples = [{"x": torch.ones(3 + number // 8), "labels": torch.zeros(1)} for number in range(64)]
    arguments = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=2, gradient_accumulation_steps=2, report_to="none",
        disable_tqdm=True, use_cpu=True, save_strategy="no", train_sampling_strategy="sequential",
    )  # fmt: skip
    trial = TrainerTrial(workload, work, Scratch(str(tmp_path)), lambda progress: None, finish)
    trial._meter, trial._checks = CpuMeter(), unwatched()
    trial._overlay = Overlay(str(tmp_path), tuned={}, shortened=None, on_cpu=True)
    model = Model()
    trainer = Trainer(model, arguments, train_dataset=samples)
    trial._prepare(trainer)
    with pytest.raises(EndedError):
        trainer.train()
    assert isinstance(ended[0], Completed)
    measured = ended[0].measurement
    # Two steps of each length, the first of which comes twice; with 3 tokens its first coming is the warm-up.
    assert model.lengths == [3] * 6 + [4] * 6
    assert len(measured.step_seconds_each) == 4
    assert measured.new_length_seconds is not None
