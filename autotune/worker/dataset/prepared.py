"""Open a prepared dataset, choose the samples of a trial, and make the ``Trainer`` arguments for them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoProcessor,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    default_data_collator,
)

from autotune.core.dataset_spec import DataSpec
from autotune.core.lengths import MOST_SAMPLES, PlannedRun, new_in_steps
from autotune.core.workload import Workload
from autotune.training.rows import PackedRows
from autotune.worker.dataset.tokenizer import ImageTextCollator, open_stored
from autotune.worker.private.transformers import length_grouped_order

_MOST_TOKENS = 2**31
GROUP = 3
"""Number of steps in a group: a fast, a slow and a medium one. Then its steps with new shapes come again. A choice."""


@dataclass(frozen=True)
class Schedule:
    """The order of a trial's samples, and the training run that the trial stands for."""

    order: tuple[int, ...]
    """Indices of samples, batch after batch."""
    worst_steps: int
    """Number of steps on the largest batches, which come first."""
    repeats: int
    """Number of added steps, in which those with new shapes come again: then their kernels are chosen and compiled."""
    run: PlannedRun


def spread_positions(count: int) -> Iterator[int]:
    """Yield positions below ``count`` endlessly; the first ones are spread evenly, however many are taken.

    The middle comes first, then alternately a position below and one above (van der Corput's sequence, mirrored).
    """
    yield count // 2
    for number in itertools.count(1):
        # The bits of the number, mirrored at the binary point: a fraction below 1/2.
        place, fraction, rest = 0.0, 0.25, number
        while rest:
            place += fraction * (rest & 1)
            rest, fraction = rest >> 1, fraction / 2
        yield int(place * count)
        yield count - 1 - int(place * count)


@dataclass(frozen=True)
class BatchShape:
    """How many samples and steps of each kind a trial has."""

    batch: int
    """Samples in a micro-step."""
    micro_steps: int
    """Micro-steps of the candidate's optimizer step."""
    micro_steps_run: int
    """Number of these micro-steps that a trial runs; the time of a whole step is computed from them."""
    worst_steps: int
    ordinary_steps: int
    """Steps between those on the largest batches and the measured ones."""
    measured_steps: int
    visits: int = 1
    """How often a measured step whose padded lengths are new is run."""
    ranks: int = 1
    """Processes that train together; accelerate gives them the batches in turn."""
    joins: bool = False
    """Whether the samples of a micro-step come in one row, without padding."""
    groups: bool = False
    """Whether samples of similar lengths come together, even where the ``DataSpec`` does not group them."""
    multiple: int = 1
    """Rows or padded batches are extended to a multiple of so many tokens, after the dataset's own padding."""


def make_schedule(
    samples: int, lengths: Any, targets: Any, spec: DataSpec, seq_len: int, shape: BatchShape, seed: int,
    image_tokens: Any = None,
) -> Schedule:  # fmt: skip
    """Return the samples of a trial: those of the largest batches, then of steps spread evenly over an epoch.

    ``samples`` is the dataset's number of samples. ``lengths``, ``targets`` and ``image_tokens`` are arrays (samples,)
    of token counts, or ``None``; lengths include the tokens of images.
    """
    sizes = np.ones(samples, dtype=np.int64) if lengths is None else np.asarray(lengths)
    order = _worst_steps(sizes, targets, image_tokens, shape)
    random = np.random.default_rng(seed)
    epoch = random.permutation(samples)[:MOST_SAMPLES]
    step_samples = shape.batch * shape.micro_steps
    if (spec.group_by_length or shape.groups) and lengths is not None:
        epoch = epoch[length_grouped_order(sizes[epoch].tolist(), step_samples, seed)]
    step_samples *= shape.ranks
    epoch = np.resize(epoch, max(1, len(epoch) // step_samples) * step_samples)
    # Axes: step, micro-step, rank, sample.
    steps = epoch.reshape(-1, shape.micro_steps, shape.ranks, shape.batch)
    padded = sizes[steps].sum(axis=3) if shape.joins else sizes[steps].max(axis=3)
    if lengths is not None:
        own = padded if shape.joins else np.broadcast_to(spec.padded(padded, seq_len), padded.shape)
        padded = -(-own // shape.multiple) * shape.multiple
    # Inputs and targets are padded separately: both lengths in one number.
    shapes = padded
    if targets is not None:
        shapes = padded * _MOST_TOKENS + spec.padded(np.asarray(targets)[steps].max(axis=3), seq_len)
    micro_costs = padded * (1 if shape.joins else shape.batch)
    # Ranks wait for each other once a step, so the rank with the highest cost decides.
    costs = micro_costs.sum(axis=1).max(axis=1)
    # Without the shapes of the largest batches: where these have no attention mask, a padded batch as long is another.
    seen: set[int] = set()
    for step in random.choice(len(steps), shape.ordinary_steps):
        order += steps[step, : shape.micro_steps_run].reshape(-1).tolist()
        seen.update(shapes[step, : shape.micro_steps_run].reshape(-1).tolist())
    measured, repeats = _measured_steps(steps, shapes, np.argsort(costs, kind="stable"), seen, shape, random)
    order += measured
    epoch_steps = max(1, samples // step_samples)
    new = new_in_steps(shapes.reshape(-1, shape.ranks), shape.micro_steps, epoch_steps)
    # The run takes one epoch, so that all of its new shapes are in the first.
    return Schedule(
        tuple(order),
        shape.worst_steps,
        repeats,
        PlannedRun(epoch_steps, 1.0, new[-1][1], new[-1][1], new, float(costs.mean()), lengths is not None),
    )


def _measured_steps(
    steps: Any, shapes: Any, by_cost: Any, seen: set[int], shape: BatchShape, random: np.random.Generator
) -> tuple[list[int], int]:
    """Return the samples of the measured steps, and how many of these steps are repeats.

    ``steps`` has the samples of an epoch's steps, ``shapes`` the padded lengths of their batches, and ``by_cost`` the
    indices of steps from the cheapest on, over which the measured ones are spread. A step with shapes that were not
    ``seen`` before comes again after its group.
    """
    order: list[int] = []
    repeats = 0
    positions = spread_positions(len(by_cost))
    for begin in range(0, shape.measured_steps, GROUP):
        again: list[int] = []
        for _ in range(begin, min(begin + GROUP, shape.measured_steps)):
            step = by_cost[next(positions)]
            chosen = random.choice(shape.micro_steps, shape.micro_steps_run, replace=False)
            samples = steps[step, chosen].reshape(-1).tolist()
            shapes_of_step = set(shapes[step, chosen].reshape(-1).tolist())
            order += samples
            if not shapes_of_step <= seen:
                again += samples
                repeats += shape.visits - 1
            seen |= shapes_of_step
        order += again * (shape.visits - 1)
    return order, repeats


def _worst_steps(sizes: Any, targets: Any, image_tokens: Any, shape: BatchShape) -> list[int]:
    """Return the samples of the first steps: the longest samples in every micro-step, but a mixture in the last step.

    The mixture has one longest sample among the shortest: equally many padded tokens, but with an attention mask, which
    may select another attention kernel. With fewer than three steps there is no mixture.
    """
    descending = np.argsort(-sizes, kind="stable")
    longest = descending
    if targets is not None:
        # Alternate the longest inputs and the longest targets, so that a batch is as large in both.
        by_target = np.argsort(-np.asarray(targets), kind="stable")
        longest = np.column_stack((descending, by_target)).reshape(-1)
    if image_tokens is not None:
        # One longest sample: text is padded to its length. Images are not padded, so those with most tokens follow.
        longest = np.concatenate((descending[:1], np.argsort(-np.asarray(image_tokens), kind="stable")))
    full = np.resize(longest, shape.batch)
    batches = [full] * shape.worst_steps
    if shape.worst_steps >= 3:
        first = longest[: 1 if targets is None else 2]
        batches[-1] = np.resize(np.concatenate((first, descending[::-1])), shape.batch)
    micro_steps = [batch for batch in batches for _ in range(shape.micro_steps_run)]
    return [int(index) for micro_step in micro_steps for index in np.tile(micro_step, shape.ranks)]


# Files of a prepared dataset in its folder: the samples (tokens and labels, or undecoded images with labels or texts),
# the number of tokens of each sample, of each target of a seq2seq task and of each sample's images, and the tokenizer
# or processor.
SAMPLES_FOLDER = "samples"
LENGTHS_FILE = "lengths.npy"
TARGET_LENGTHS_FILE = "target_lengths.npy"
IMAGE_TOKENS_FILE = "image_tokens.npy"
ROWS_FILE = "rows.npy"
"""The row of each sample, where samples are packed; ``LENGTHS_FILE`` then has the lengths of the rows."""
TOKENIZER_FOLDER = "tokenizer"
PROCESSOR_FOLDER = "processor"
IMAGE = "image"
"""The column of undecoded images: a struct of ``bytes`` and ``path``."""


class PreparedDataset:
    """A prepared dataset in its folder, and the ``Trainer`` arguments made from it."""

    def __init__(self, workload: Workload, folder: str) -> None:
        assert workload.data is not None
        self._workload = workload
        self._spec = workload.data
        self._folder = Path(folder)
        # Imported here since it takes seconds, which nothing else in this module does.
        from datasets import load_from_disk

        self.dataset: Any = load_from_disk(str(self._folder / SAMPLES_FOLDER))
        if self._spec.packing:
            row_of_sample = np.load(self._folder / ROWS_FILE)
            by_row = np.argsort(row_of_sample, kind="stable")
            ends = np.searchsorted(row_of_sample[by_row], np.arange(1, row_of_sample.max() + 1))
            self.dataset = PackedRows(self.dataset, [row.tolist() for row in np.split(by_row, ends)])
        self._lengths = self._array(LENGTHS_FILE)
        self._targets = self._array(TARGET_LENGTHS_FILE)
        self._image_tokens = self._array(IMAGE_TOKENS_FILE)
        self.is_text = self._lengths is not None and self._image_tokens is None
        # Whether samples differ in length.
        self.varies = bool(self._lengths is not None and self._lengths.min() < self._lengths.max())

    @property
    def makes_new_shapes(self) -> bool:
        """Whether batches are padded to lengths that may not have occurred before."""
        of_targets = self._targets is not None and self._targets.min() < self._targets.max()
        return bool(self.varies or of_targets) and self._spec.padding != "max_length"

    @property
    def arguments(self) -> dict[str, Any]:
        """Fields of ``TrainingArguments`` that the dataset requires."""
        # No model has arguments named as columns of undecoded images or text: inputs are made as samples are loaded.
        return {} if self.is_text else {"remove_unused_columns": False}

    def _array(self, name: str) -> Any:
        """Return an array saved beside the dataset; ``None`` where it is missing."""
        path = self._folder / name
        return np.load(path) if path.exists() else None

    def schedule(self, shape: BatchShape, seed: int) -> Schedule:
        """Return the schedule of the samples for a trial of this shape."""
        return make_schedule(
            len(self.dataset), self._lengths, self._targets, self._spec, self._workload.seq_len, shape, seed,
            self._image_tokens,
        )  # fmt: skip

    def ingredients(self, model: Any, evaluated: int | None = None) -> dict[str, Any]:
        """Return dataset, tokenizer and collator as arguments of the ``Trainer``.

        The first ``evaluated`` samples become the evaluation dataset, too; with ``None`` there is none.
        """
        datasets = {"train_dataset": self.dataset}
        if evaluated is not None:
            datasets["eval_dataset"] = self.dataset.select(range(min(evaluated, len(self.dataset))))
        if self._spec.packing:
            return {**datasets, "data_collator": PackedRows.collate}
        if self.is_text:
            tokenizer = AutoTokenizer.from_pretrained(str(self._folder / TOKENIZER_FOLDER))
            return {**datasets, "processing_class": tokenizer, "data_collator": self._collator(tokenizer, model)}
        if self._image_tokens is not None:
            processor = AutoProcessor.from_pretrained(str(self._folder / PROCESSOR_FOLDER))
            given = {name: value for name, value in self._padding().items() if value is not None}
            return {**datasets, "data_collator": ImageTextCollator(processor, model.config.image_token_id, given)}
        transform = _ImageTransform(model.config)
        pictures = {name: dataset.with_transform(transform) for name, dataset in datasets.items()}
        return {**pictures, "data_collator": default_data_collator}

    def _padding(self) -> dict[str, Any]:
        """Return how batches are padded, as arguments of tokenizers and collators."""
        max_length = self._workload.seq_len if self._spec.padding == "max_length" else None
        multiple = self._spec.pad_to_multiple_of
        return {"padding": self._spec.padding, "max_length": max_length, "pad_to_multiple_of": multiple}

    def _collator(self, tokenizer: Any, model: Any) -> Any:
        """Return the data collator for a task of text, which pads as the ``DataSpec`` says."""
        padding = self._padding()
        if self._workload.task == "sequence-classification":
            return DataCollatorWithPadding(tokenizer, **padding)
        if self._workload.task == "seq2seq-lm":
            return DataCollatorForSeq2Seq(tokenizer, model, **padding)
        is_masked = self._workload.task == "masked-lm"
        if not is_masked and "labels" in self.dataset.column_names:
            # It keeps the dataset's own labels; the collator below would make labels of all tokens.
            return DataCollatorForSeq2Seq(tokenizer, None, **padding)
        collator = DataCollatorForLanguageModeling(
            tokenizer, mlm=is_masked, pad_to_multiple_of=self._spec.pad_to_multiple_of
        )
        length = padding["max_length"]
        return _PaddedToLength(collator, tokenizer, length) if length else collator


@dataclass(frozen=True)
class _PaddedToLength:
    """Pads samples to one length, for a collator that can only pad to the longest."""

    collator: Any
    tokenizer: Any
    length: int

    def __call__(self, samples: list[dict[str, Any]]) -> Any:
        padded = [self.tokenizer.pad(sample, padding="max_length", max_length=self.length) for sample in samples]
        return self.collator([dict(sample) for sample in padded])


class _ImageTransform:
    """Decodes and scales images to the model's input size as they are loaded."""

    def __init__(self, config: Any) -> None:
        size: Any = config.image_size
        self._height: int
        self._width: int
        self._height, self._width = (size, size) if isinstance(size, int) else size
        self._mode = "L" if getattr(config, "num_channels", 3) == 1 else "RGB"

    def _pixels(self, stored: dict[str, Any]) -> torch.Tensor:
        """Return a stored image as a tensor (channels, height, width)."""
        from PIL import Image

        with open_stored(stored) as image:
            scaled = image.convert(self._mode).resize((self._width, self._height), Image.Resampling.BILINEAR)
        pixels = torch.from_numpy(np.asarray(scaled).copy()).reshape(self._height, self._width, -1)
        # From bytes to -1 … 1, as most image processors do.
        return pixels.permute(2, 0, 1).float() / 127.5 - 1

    def __call__(self, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return {"pixel_values": [self._pixels(stored) for stored in batch[IMAGE]], "labels": batch["labels"]}
