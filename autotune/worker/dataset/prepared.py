"""Open a prepared dataset, and make the ``Trainer`` arguments for it: samples, tokenizer and collator."""

from __future__ import annotations

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

from autotune.core.workload import Workload
from autotune.training.rows import PackedRows
from autotune.worker.dataset.schedule import BatchShape, Schedule, make_schedule
from autotune.worker.dataset.tokenizer import ImageTextCollator, open_stored

# Files of a prepared dataset in its folder: the samples (tokens and labels, or undecoded images with labels or texts),
# the number of tokens of each sample, of each target of a seq2seq task and of each sample's images, and the tokenizer
# or processor.
SAMPLES_FOLDER = "samples"
LENGTHS_FILE = "lengths.npy"
TARGET_LENGTHS_FILE = "target_lengths.npy"
IMAGE_TOKENS_FILE = "image_tokens.npy"
ROWS_FILE = "rows.npy"
"""The row of each sample, where they are packed; lengths are then those of the rows."""
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
            of_sample = np.load(self._folder / ROWS_FILE)
            by_row = np.argsort(of_sample, kind="stable")
            ends = np.searchsorted(of_sample[by_row], np.arange(1, of_sample.max() + 1))
            self.dataset = PackedRows(self.dataset, [row.tolist() for row in np.split(by_row, ends)])
        self._lengths = self._array(LENGTHS_FILE)
        self._targets = self._array(TARGET_LENGTHS_FILE)
        self._image_tokens = self._array(IMAGE_TOKENS_FILE)
        self.is_text = self._lengths is not None and self._image_tokens is None
        self.varies = bool(self._lengths is not None and self._lengths.min() < self._lengths.max())

    @property
    def makes_new_shapes(self) -> bool:
        """Whether batches are padded to lengths that may not have occurred before."""
        of_targets = self._targets is not None and self._targets.min() < self._targets.max()
        return bool(self.varies or of_targets) and self._spec.padding != "max_length"

    @property
    def arguments(self) -> dict[str, Any]:
        """Fields of ``TrainingArguments`` that the dataset requires."""
        # The model takes no column of undecoded images, nor of text; its inputs are made as samples are loaded.
        return {} if self.is_text else {"remove_unused_columns": False}

    def _array(self, name: str) -> Any:
        """Return an array saved beside the dataset; ``None`` where it is missing."""
        path = self._folder / name
        return np.load(path) if path.exists() else None

    def schedule(self, shape: BatchShape, seed: int) -> Schedule:
        """Return the order of the samples for a trial of this shape."""
        return make_schedule(
            len(self.dataset), self._lengths, self._targets, self._spec, self._workload.seq_len, shape, seed,
            self._image_tokens,
        )  # fmt: skip

    def ingredients(self, model: Any, evaluated: int | None = None) -> dict[str, Any]:
        """Return dataset, tokenizer and collator as ``Trainer`` arguments.

        The first ``evaluated`` samples become the evaluation dataset; ``None`` gives none.
        """
        datasets = {"train_dataset": self.dataset}
        if evaluated is not None:
            some = range(min(evaluated, len(self.dataset)))
            datasets["eval_dataset"] = self.dataset.select(some)
        if self._spec.packing:
            return {**datasets, "data_collator": PackedRows.collate}
        if self.is_text:
            tokenizer = AutoTokenizer.from_pretrained(str(self._folder / TOKENIZER_FOLDER))
            return {**datasets, "processing_class": tokenizer, "data_collator": self._collator(tokenizer, model)}
        if self._image_tokens is not None:
            processor = AutoProcessor.from_pretrained(str(self._folder / PROCESSOR_FOLDER))
            named = dict(zip(("padding", "max_length", "pad_to_multiple_of"), self._padding(), strict=True))
            given = {name: value for name, value in named.items() if value is not None}
            return {**datasets, "data_collator": ImageTextCollator(processor, model.config.image_token_id, given)}
        transform = _ImageTransform(model.config)
        pictures = {name: dataset.with_transform(transform) for name, dataset in datasets.items()}
        return {**pictures, "data_collator": default_data_collator}

    def _padding(self) -> tuple[str, int | None, int | None]:
        """Return padding mode, length and multiple, as arguments of tokenizers."""
        spec = self._spec
        max_length = self._workload.seq_len if spec.padding == "max_length" else None
        return spec.padding, max_length, spec.pad_to_multiple_of

    def _collator(self, tokenizer: Any, model: Any) -> Any:
        """Return the data collator for the task."""
        padding, max_length, multiple = self._padding()
        if self._workload.task == "sequence-classification":
            return DataCollatorWithPadding(tokenizer, padding, max_length, multiple)
        if self._workload.task == "seq2seq-lm":
            return DataCollatorForSeq2Seq(tokenizer, model, padding, max_length, pad_to_multiple_of=multiple)
        is_masked = self._workload.task == "masked-lm"
        if not is_masked and "labels" in self.dataset.column_names:
            # Another collator would make labels of the tokens.
            return DataCollatorForSeq2Seq(tokenizer, None, padding, max_length, pad_to_multiple_of=multiple)
        collator = DataCollatorForLanguageModeling(tokenizer, mlm=is_masked, pad_to_multiple_of=multiple)
        return _PaddedToLength(collator, tokenizer, max_length) if max_length else collator


class _PaddedToLength:
    """Pads samples to one length, for a collator that can only pad to the longest."""

    def __init__(self, collator: Any, tokenizer: Any, length: int) -> None:
        self._collator = collator
        self._tokenizer = tokenizer
        self._length = length

    def __call__(self, samples: list[dict[str, Any]]) -> Any:
        padded = [self._tokenizer.pad(sample, padding="max_length", max_length=self._length) for sample in samples]
        return self._collator([dict(sample) for sample in padded])


class _ImageTransform:
    """Decodes and scales images to the model's input size as they are loaded."""

    def __init__(self, config: Any) -> None:
        size: Any = config.image_size
        self._height: int
        self._width: int
        self._height, self._width = (size, size) if isinstance(size, int) else size
        self._mode = "L" if getattr(config, "num_channels", 3) == 1 else "RGB"

    def _pixels(self, stored: dict[str, Any]) -> torch.Tensor:
        from PIL import Image

        with open_stored(stored) as image:
            scaled = image.convert(self._mode).resize((self._width, self._height), Image.Resampling.BILINEAR)
        pixels = torch.from_numpy(np.asarray(scaled).copy()).reshape(self._height, self._width, -1)
        # From bytes to -1 … 1, as most image processors do.
        return pixels.permute(2, 0, 1).float() / 127.5 - 1

    def __call__(self, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return {"pixel_values": [self._pixels(stored) for stored in batch[IMAGE]], "labels": batch["labels"]}
