"""Feeding a trial with the user's data: the worst batches first, then steps that stand for a whole epoch."""

from __future__ import annotations

import io
import itertools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler
from transformers import (
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    default_data_collator,
)

from autotune.core.dataset_spec import DataSpec
from autotune.core.statistics import quantile
from autotune.core.workload import Workload
from autotune.worker.private.transformers import OrderedTrainer, length_grouped_order

# What reading the data leaves in its folder: a dataset of tokens and labels (or of undecoded images and
# labels), the tokens of each sample, those of each target of a seq2seq task, the tokenizer.
SAMPLES_FOLDER = "samples"
LENGTHS_FILE = "lengths.npy"
TARGET_LENGTHS_FILE = "target_lengths.npy"
TOKENIZER_FOLDER = "tokenizer"
IMAGE = "image"
"""The column of undecoded images: a struct of ``bytes`` and ``path``."""

# An epoch is drawn from so many samples at most: more take time to shuffle and change nothing.
_MOST_SAMPLES = 100_000
_MOST_TOKENS = 2**31


@dataclass(frozen=True)
class Schedule:
    """Which samples a trial sees in which order, and what the measured steps stand for."""

    order: tuple[int, ...]
    """Indices of samples, batch after batch."""
    worst_steps: int
    """Steps of worst batches; they come first."""
    costs: tuple[float, ...]
    """Padded tokens of each measured step, in the order of the steps; equal where lengths do not vary."""
    epoch_cost: float
    """Padded tokens of an epoch's mean step."""
    worst_tokens: int | None
    """Padded length of the worst batches; ``None`` for images."""
    new_lengths: tuple[int, ...] = ()
    """Of each step after the warm-up: padded lengths that no step before it had; 0 where it is measured.

    A step that has some is a rehearsal: it comes once more, and is measured then. Empty where there are none."""
    epoch_lengths: int = 1
    """Different padded lengths of an epoch's batches."""

    @property
    def rehearsals(self) -> int:
        """Steps after the warm-up that are not measured."""
        return sum(1 for new in self.new_lengths if new)

    def estimate(self, seconds: list[float]) -> tuple[float, float]:
        """Mean seconds of an epoch's steps, and half its 95 % interval over it; infinite below two steps.

        Steps differ because their batches do, which is known: what the padded tokens explain is no
        uncertainty, and where those of the measured steps are not the epoch's mean, it is set right.
        """
        mean = statistics.fmean(seconds)
        count = len(seconds)
        if count < 2:
            return mean, float("inf")
        costs = np.array(self.costs[:count]) / self.epoch_cost
        slope, residuals, unknowns = 0.0, np.array(seconds) - mean, 1
        if count > 3 and costs.std() > 1e-6:
            slope = max(0.0, float(np.polyfit(costs, seconds, 1)[0]))
            residuals, unknowns = residuals - slope * (costs - costs.mean()), 2
        mean += slope * (1 - float(costs.mean()))
        error = float(np.sqrt((residuals**2).sum() / (count - unknowns) / count))
        return mean, quantile(count - unknowns) * error / mean


def grouped_order(lengths: Any, step_samples: int, seed: int) -> list[int]:
    """Order an epoch as the Trainer's own sampler does for ``group_by_length``."""
    return length_grouped_order(lengths.tolist(), step_samples, seed)


def _spread_positions(count: int) -> Iterator[int]:
    """Positions among ``count`` of which every first few are spread evenly: the middle, then one below and one above.

    (The sequence of van der Corput, mirrored.)
    """
    yield count // 2
    for number in itertools.count(1):
        place, fraction, rest = 0.0, 0.25, number
        while rest:
            place += fraction * (rest & 1)
            rest, fraction = rest >> 1, fraction / 2
        yield int(place * count)
        yield count - 1 - int(place * count)


@dataclass(frozen=True)
class BatchShape:
    """How many samples go where in a trial's steps."""

    batch: int
    """Samples in a micro-step."""
    micro_steps: int
    """Micro-steps of the candidate's optimizer step."""
    micro_steps_run: int
    """Of which so many are run."""
    worst_steps: int
    ordinary_steps: int
    """Between the worst and the measured ones."""
    measured_steps: int
    rehearses: bool = False
    """Whether those of these that have padded lengths of their own are to come twice."""


def make_schedule(
    samples: int, lengths: Any, targets: Any, spec: DataSpec, seq_len: int, shape: BatchShape, seed: int
) -> Schedule:
    """The worst batches, then steps drawn evenly from those of a shuffled (or grouped) epoch.

    ``lengths`` and ``targets`` are arrays (samples,) of tokens, or ``None``.
    """
    sizes = np.ones(samples, dtype=np.int64) if lengths is None else np.asarray(lengths)
    worst = _worst_steps(sizes, targets, spec, shape)
    random = np.random.default_rng(seed)
    epoch = random.permutation(samples)[:_MOST_SAMPLES]
    step_samples = shape.batch * shape.micro_steps
    if spec.group_by_length and lengths is not None:
        epoch = epoch[grouped_order(sizes[epoch], step_samples, seed)]
    epoch = np.resize(epoch, max(1, len(epoch) // step_samples) * step_samples)
    # Axes: step, micro-step, sample.
    steps = epoch.reshape(-1, shape.micro_steps, shape.batch)
    padded = _padded(sizes[steps].max(axis=2), spec, seq_len, is_text=lengths is not None)
    # Targets are padded on their own: one number for both lengths.
    shapes = padded
    if targets is not None:
        shapes = padded * _MOST_TOKENS + _padded(np.asarray(targets)[steps].max(axis=2), spec, seq_len, is_text=True)
    micro_costs = shape.batch * padded
    costs = micro_costs.sum(axis=1)
    by_cost = np.argsort(costs, kind="stable")
    order, measured_costs, new_lengths = list(worst), [], []
    positions = _spread_positions(len(by_cost))
    worst_tokens = None if lengths is None else spec.padded(int(sizes.max()), seq_len)
    # A worst batch without a mask is of another shape than one of an epoch that happens to be as long.
    seen: set[int] = set()
    for step in random.choice(len(steps), shape.ordinary_steps):
        order += steps[step, : shape.micro_steps_run].reshape(-1).tolist()
        seen.update(shapes[step, : shape.micro_steps_run].tolist())
    for _ in range(shape.measured_steps):
        step = by_cost[next(positions)]
        run = random.choice(shape.micro_steps, shape.micro_steps_run, replace=False)
        new = set(shapes[step, run].tolist()) - seen if shape.rehearses else set()
        seen |= new
        order += steps[step, run].reshape(-1).tolist() * (2 if new else 1)
        measured_costs.append(float(micro_costs[step, run].mean()) * shape.micro_steps)
        new_lengths += [len(new), 0] if new else [0]
    return Schedule(
        tuple(order),
        shape.worst_steps,
        tuple(measured_costs),
        float(costs.mean()),
        worst_tokens,
        tuple(new_lengths) if shape.rehearses else (),
        len(np.unique(shapes)),
    )


def _padded(longest: Any, spec: DataSpec, seq_len: int, *, is_text: bool) -> Any:
    """``DataSpec.padded`` of an array."""
    if not is_text:
        return longest
    multiple = spec.pad_to_multiple_of or 1
    tokens = np.full_like(longest, seq_len) if spec.padding == "max_length" else longest
    return -(-tokens // multiple) * multiple


def _worst_steps(sizes: Any, targets: Any, spec: DataSpec, shape: BatchShape) -> list[int]:
    """Every micro-step of the warm-up the longest samples; in the last step the longest among the shortest.

    The latter has as many tokens and a mask besides, which may send attention through another kernel.
    """
    descending = np.argsort(-sizes, kind="stable")
    longest = descending
    if targets is not None:
        # Half of the longest inputs, half of the longest targets: a batch is as large in both.
        by_target = np.argsort(-np.asarray(targets), kind="stable")
        longest = np.column_stack((descending, by_target)).reshape(-1)
    full = np.resize(longest, shape.batch)
    heads = longest[: 1 if targets is None else 2]
    mixed = np.concatenate((heads, descending[::-1]))
    mixed = np.resize(mixed, shape.batch)
    micro_steps = [full] * shape.micro_steps_run * (shape.worst_steps - 1) + [mixed] * shape.micro_steps_run
    if shape.worst_steps < 3:
        micro_steps = [full] * shape.micro_steps_run * shape.worst_steps
    return [int(index) for micro_step in micro_steps for index in micro_step]


class _Ordered(Sampler[int]):
    """Indices as they were decided."""

    def __init__(self, order: tuple[int, ...]) -> None:
        self._order = order

    def __iter__(self) -> Iterator[int]:
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)


class Feed:
    """What a trial's ``Trainer`` is given of the data that was read into a folder."""

    def __init__(self, workload: Workload, folder: str) -> None:
        assert workload.data is not None
        self._workload = workload
        self._spec = workload.data
        self._folder = Path(folder)
        # Seconds, which nothing else in this module costs.
        from datasets import load_from_disk

        self.dataset = load_from_disk(str(self._folder / SAMPLES_FOLDER))
        self._lengths = self._array(LENGTHS_FILE)
        self._targets = self._array(TARGET_LENGTHS_FILE)
        self.is_text = self._lengths is not None
        self.varies = bool(self.is_text and self._lengths.min() < self._lengths.max())

    @property
    def makes_new_shapes(self) -> bool:
        """Whether batches are padded to lengths that may not have come before."""
        of_targets = self._targets is not None and self._targets.min() < self._targets.max()
        return bool(self.varies or of_targets) and self._spec.padding != "max_length"

    @property
    def arguments(self) -> dict[str, Any]:
        """Fields of ``TrainingArguments`` that the data asks for."""
        # The columns of undecoded images mean nothing to the model; its inputs are made as they are loaded.
        return {} if self.is_text else {"remove_unused_columns": False}

    def _array(self, name: str) -> Any:
        path = self._folder / name
        return np.load(path) if path.exists() else None

    def schedule(self, shape: BatchShape, seed: int) -> Schedule:
        """The order of the samples for a trial of this shape."""
        return make_schedule(
            len(self.dataset), self._lengths, self._targets, self._spec, self._workload.seq_len, shape, seed
        )

    def trainer(self, model: Any, arguments: Any, callback: Any, schedule: Schedule) -> OrderedTrainer:
        """A real ``Trainer`` with the user's collator."""
        trainer = OrderedTrainer(model=model, args=arguments, callbacks=[callback], **self.ingredients(model))
        trainer.train_order = _Ordered(schedule.order)
        return trainer

    def ingredients(self, model: Any, evaluated: int | None = None) -> dict[str, Any]:
        """What a ``Trainer`` is made of besides model and arguments; the first so many samples to evaluate on."""
        datasets = {"train_dataset": self.dataset}
        if evaluated is not None:
            datasets["eval_dataset"] = self.dataset.select(range(min(evaluated, len(self.dataset))))
        if self.is_text:
            tokenizer = AutoTokenizer.from_pretrained(str(self._folder / TOKENIZER_FOLDER))
            return {**datasets, "processing_class": tokenizer, "data_collator": self._collator(tokenizer, model)}
        transform = _ImageTransform(model.config)
        pictures = {name: dataset.with_transform(transform) for name, dataset in datasets.items()}
        return {**pictures, "data_collator": default_data_collator}

    def _collator(self, tokenizer: Any, model: Any) -> Any:
        spec = self._spec
        multiple = spec.pad_to_multiple_of
        padding = "max_length" if spec.padding == "max_length" else "longest"
        max_length = self._workload.seq_len if padding == "max_length" else None
        if self._workload.task == "sequence-classification":
            return DataCollatorWithPadding(tokenizer, padding, max_length, multiple)
        if self._workload.task == "seq2seq-lm":
            return DataCollatorForSeq2Seq(tokenizer, model, padding, max_length, pad_to_multiple_of=multiple)
        is_masked = self._workload.task == "masked-lm"
        collator = DataCollatorForLanguageModeling(tokenizer, mlm=is_masked, pad_to_multiple_of=multiple)
        return _PaddedToLength(collator, tokenizer, max_length) if max_length else collator


class _PaddedToLength:
    """A collator that pads to the longest, given samples that are all of one length."""

    def __init__(self, collator: Any, tokenizer: Any, length: int) -> None:
        self._collator = collator
        self._tokenizer = tokenizer
        self._length = length

    def __call__(self, samples: list[dict[str, Any]]) -> Any:
        padded = [self._tokenizer.pad(sample, padding="max_length", max_length=self._length) for sample in samples]
        return self._collator([dict(sample) for sample in padded])


class _ImageTransform:
    """Decodes and scales the images of a batch to what the model takes, as they are loaded."""

    def __init__(self, config: Any) -> None:
        size: Any = config.image_size
        self._height: int
        self._width: int
        self._height, self._width = (size, size) if isinstance(size, int) else size
        self._mode = "L" if getattr(config, "num_channels", 3) == 1 else "RGB"

    def _pixels(self, stored: dict[str, Any]) -> torch.Tensor:
        from PIL import Image

        with Image.open(io.BytesIO(stored["bytes"]) if stored["bytes"] else stored["path"]) as image:
            scaled = image.convert(self._mode).resize((self._width, self._height), Image.Resampling.BILINEAR)
        pixels = torch.from_numpy(np.asarray(scaled).copy()).reshape(self._height, self._width, -1)
        # From bytes to -1 … 1, as most image processors do.
        return pixels.permute(2, 0, 1).float() / 127.5 - 1

    def __call__(self, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return {"pixel_values": [self._pixels(stored) for stored in batch[IMAGE]], "labels": batch["labels"]}
