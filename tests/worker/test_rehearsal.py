"""Steps of new shapes come twice, in a real ``Trainer`` as well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from autotune.worker.rehearsal import Rehearsing


def batch(*lengths: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.zeros(2, *lengths), "labels": torch.zeros(2)}


def test_only_steps_of_new_shapes_come_twice() -> None:
    rehearsing = Rehearsing(2)
    loader = [batch(3), batch(4), batch(4), batch(3), batch(3), batch(5), batch(6)]
    seen = [(rehearsing.new_shapes, given["input_ids"].shape[1]) for given in rehearsing.batches(loader)]
    assert seen == [(2, 3), (2, 4), (0, 3), (0, 4), (0, 4), (0, 3), (1, 3), (1, 5), (0, 3), (0, 5), (1, 6), (0, 6)]


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
    # Five steps of four samples an epoch: two of 3, two of 4, one of 5. The epoch ends where the Trainer expects it to.
    assert note.new == [1, 0, 0, 1, 0, 0, 0, 0]
    assert model.lengths == [3] * 6 + [4] * 4 + [3] * 4 + [4] * 2
