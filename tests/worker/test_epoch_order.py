"""Test that the steps of a trial of one's own stand for an epoch of the training's own order."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_meter import unwatched
from tiny import AMPLE_BYTES
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from transformers import Trainer, TrainingArguments

from autotune.core.candidate import Arm, Candidate
from autotune.core.lengths import SampleLengths
from autotune.core.messages import TrialWork
from autotune.core.outcome import Completed, Effort, Measurement, Outcome
from autotune.core.placement import RankDevices
from autotune.core.scratch import Scratch
from autotune.core.training_source import find_trainer
from autotune.core.workload import Workload
from autotune.worker.trial.batch_shapes import BatchShapes
from autotune.worker.trial.meter import CpuMeter
from autotune.worker.user.samples import SpreadSampler, can_spread, spread_loader
from autotune.worker.user.trainer_code import TrialFields
from autotune.worker.user.trainer_trial import TrainerTrial


def test_any_number_of_steps_is_spread_over_the_epoch() -> None:
    order = list(SpreadSampler(SequentialSampler(range(400)), 2, 4))
    steps = [order[at : at + 4] for at in range(0, len(order), 4)]
    assert all(step == list(range(step[0], step[0] + 4)) for step in steps), "steps stay as they are"
    for count in (3, 6, 12, 24):
        assert sum(step[0] for step in steps[:count]) / count == pytest.approx(198, rel=0.15)


class Ended(BatchShapes):
    """Steps that end as told."""

    def end(self, *, had_new: bool) -> None:
        self.new = float(had_new)
        self.end_step()


def test_the_longest_come_first_and_a_step_with_new_shapes_comes_again() -> None:
    """A step is drawn before the one before it ends."""
    shapes = Ended(settles=2)
    sampler = SpreadSampler(SequentialSampler(range(20)), 2, 4, longest=(17, 3), longest_steps=2, shapes=shapes)
    drawn: list[list[int]] = []
    samples = itertools.chain.from_iterable(sampler for _ in range(3))

    def draw() -> list[int]:
        drawn.append(list(itertools.islice(samples, 4)))
        return drawn[-1]

    assert len(sampler) == 20
    assert [draw()[::2], draw()[::2]] == [[17, 3], [17, 3]], "one in each micro-batch"
    shapes.end(had_new=True)
    first = draw()
    shapes.end(had_new=True)
    second = draw()
    shapes.end(had_new=True)
    assert draw() == first
    shapes.end(had_new=False)
    third = draw()
    shapes.end(had_new=True)
    assert draw() == first
    shapes.end(had_new=True)
    assert draw() == third
    shapes.end(had_new=True)
    fourth, fifth = draw(), draw()
    assert sorted(step[0] for step in (first, second, third, fourth, fifth)) == [0, 4, 8, 12, 16], "not a third time"


def test_a_step_comes_again_in_the_next_epoch_too() -> None:
    """Two samples are left over after the whole steps of an epoch."""
    shapes = Ended(settles=1)
    sampler = SpreadSampler(SequentialSampler(range(10)), 2, 4, shapes=shapes)
    epoch = list(sampler)
    assert [step[0] for step in (epoch[:4], epoch[4:8], epoch[8:])] == [4, 0, 0]
    for had_new in (False, False, True):
        shapes.end(had_new=had_new)
    again = iter(sampler)
    first, second = list(itertools.islice(again, 4)), list(itertools.islice(again, 4))
    assert {first[0], second[0]} == {0, 4}, "not what was left over"
    shapes.end(had_new=True)
    assert list(itertools.islice(sampler, 4)) == first


def test_several_of_the_longest_come_together_where_a_row_takes_them_all() -> None:
    sampler = SpreadSampler(
        SequentialSampler(range(20)), 4, 8, longest=(17, 3, 9), longest_steps=1, longest_per_batch=3
    )
    assert list(sampler)[:8] == [17, 3, 9, 11, 17, 3, 9, 15]


def test_an_order_that_may_mean_something_is_left_as_it_is() -> None:
    class Pairs(SequentialSampler):
        """Samples that belong together."""

    assert not can_spread(Pairs(range(4)))
    own = BatchSampler(Pairs(range(9)), 2, drop_last=False)
    loader = DataLoader(list(range(9)), batch_sampler=own)
    spread_loader(loader, 1)
    assert type(own.sampler) is Pairs
    plain = DataLoader(list(range(40)), batch_size=2)
    spread_loader(plain, 2)
    assert [batch.tolist() for batch in plain][:2] == [[20, 21], [22, 23]]
    assert len(plain) == 20


class Model(torch.nn.Module):
    """Notes the lengths that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.lengths: list[int] = []

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.lengths.append(input_ids.shape[1])
        return {"loss": ((input_ids.float().mean() * self.weight - labels.mean()) ** 2).sum()}


def pad(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    tokens = torch.nn.utils.rnn.pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
    return {"input_ids": tokens, "labels": torch.stack([sample["labels"] for sample in samples])}


class EndedError(Exception):
    """In place of the end of the process."""


def measured_on(folder: Path, device: str, **settings: Any) -> tuple[Measurement, list[int]]:
    """Measure a Trainer on 320 samples, whose batches are longer the earlier they come: from 42 tokens down to 3."""
    (folder / "train.py").write_text("def build(overrides): ...")
    effort = Effort(warmup_steps=1, min_steps=4, max_steps=4, target_spread=0.0, max_seconds=1000.0)
    source = find_trainer(f"{folder / 'train.py'}:build")
    lengths = [42 - number // 8 for number in range(320)]
    found = SampleLengths.of(lengths, samples=320, longest_samples=(0, 1))
    object.__setattr__(source.interface, "lengths", found)
    devices = RankDevices(device, ("",))
    work = TrialWork(Candidate(Arm("fp32"), 2, 2), devices, AMPLE_BYTES, effort, 0, unmodified=True)  # type: ignore[arg-type]
    ended: list[Outcome] = []

    def finish(outcome: Outcome) -> Any:
        ended.append(outcome)
        raise EndedError

    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=2, gradient_accumulation_steps=2, report_to="none", use_cpu=True,
        disable_tqdm=True, save_strategy="no", train_sampling_strategy="sequential", **settings,
    )  # fmt: skip
    trial = TrainerTrial(Workload.of_source(source), work, Scratch(str(folder)), lambda progress: None, finish)
    trial._meter, trial._checks = CpuMeter(), unwatched()
    trial._fields = TrialFields(str(folder), tuned={}, shortened_accumulation=None, on_cpu=True)
    model = Model()
    samples = [{"input_ids": torch.ones(length, dtype=torch.long), "labels": torch.zeros(1)} for length in lengths]
    trainer = Trainer(model, arguments, train_dataset=samples, data_collator=pad)
    trial._prepare(trainer)
    with pytest.raises(EndedError):
        trainer.train()
    assert isinstance(ended[0], Completed)
    return ended[0].measurement, model.lengths


def test_a_trial_of_ones_own_is_of_the_whole_epoch(tmp_path: Path) -> None:
    """The longest first, for the peak; then the middle of the epoch, its begin and its end, not the longest alone."""
    measured, lengths = measured_on(tmp_path, "cpu", num_train_epochs=3)
    assert lengths[:2] == [42, 42]
    assert lengths[2::2] == [22, 32, 13, 37]
    assert (measured.run_steps, measured.run_epochs) == (240, 3.0)
    assert measured.new_shape_seconds is None
    assert measured.samples_per_second == measured.steady_samples_per_second


def test_what_new_shapes_take_is_part_of_the_promise_on_a_gpu(tmp_path: Path) -> None:
    """All of it but the GPU: the meter is the CPU's."""
    measured, lengths = measured_on(tmp_path, "cuda", max_steps=7)
    assert lengths[2::2] == [22, 32, 22, 32, 13, 37, 13, 37]
    assert len(measured.step_seconds_each) == 4
    assert (measured.run_steps, measured.run_epochs) == (7, None)
    assert measured.shapes_seen == 5
    assert 7 <= measured.run_shapes <= 14, "two micro-steps in each of seven steps, of 40 lengths"
    of_run = measured.steady_share * measured.step_seconds + measured.new_shape_seconds * measured.run_shapes / 7
    assert measured.step_seconds == pytest.approx(of_run)
