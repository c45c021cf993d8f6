"""Describe the user's own dataset (its place, what reading it showed), and share folders of prepared datasets."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from autotune.core.errors import StorageError
from autotune.core.schema import decode, encode
from autotune.core.units import in_one_line

DataKind = Literal["json", "csv", "parquet", "arrow", "text", "imagefolder", "saved", "hub"]
PaddingRule = Literal["longest", "max_length"]

DEFAULT_SPLIT = "train"


@dataclass(frozen=True)
class Lengths:
    """Token counts of the samples, special tokens included, after truncation."""

    shortest: int
    median: int
    percentile_95: int
    longest: int
    mean: float
    truncated: float
    """Share of the samples that were truncated to ``--seq-len``."""
    padding: float
    """Share of the tokens of batches of 8 that is padding, in the order that was asked for: random, or by length."""
    histogram: tuple[int, ...]
    """Number of samples in each of equally wide bins from 0 to ``longest``."""
    longest_target: int | None = None
    """Tokens of the longest target of a seq2seq task."""
    stored: tuple[int, int] | None = None
    """Fewest and most tokens of a sample with the padding that the dataset holds; ``None`` where it holds none."""
    counts: tuple[tuple[int, int], ...] = ()
    """See ``SampleLengths``; of samples as they are stored. Empty in records of versions that did not count them."""

    @property
    def in_batches(self) -> tuple[int, int]:
        """The fewest and the most tokens of a sample as it comes into a batch, with padding that the dataset holds."""
        return self.stored or (self.shortest, self.longest)


@dataclass(frozen=True)
class Packed:
    """The samples of a packed dataset before they were packed in rows."""

    samples: int
    lengths: Lengths


@dataclass(frozen=True)
class DataFacts:
    """What reading the user's dataset showed: the number of samples, their classes and their lengths."""

    samples: int
    """Number of samples; of rows, where samples are packed in rows."""
    num_labels: int | None = None
    """Number of classes; 1 where the labels are numbers to regress on."""
    lengths: Lengths | None = None
    """``None`` for images alone, which all have one size."""
    packed: Packed | None = None
    without_text: int = 0
    """Samples whose text is missing or empty."""


@dataclass(frozen=True)
class DataSpec:
    """The user's dataset, and how its samples become batches."""

    source: str
    """Absolute path of a file or folder, or ``NAME`` or ``NAME:CONFIG`` on the hub."""
    kind: DataKind
    content: str
    """A hash or revision that changes with the content of ``source``, as far as that can be told quickly."""
    tokenizer_content: str | None = None
    """The same for ``tokenizer``."""
    split: str = DEFAULT_SPLIT
    text_columns: tuple[str, ...] | None = None
    """``None`` means the only text column."""
    label_column: str | None = None
    """Column of classes, numbers, or the target text of a seq2seq task; ``None`` means the usual names."""
    image_column: str | None = None
    tokenizer: str | None = None
    """Folder or hub name of the tokenizer, or the processor of images and text; ``None`` for images alone."""
    padding: PaddingRule = "longest"
    """Pad to the longest sample of a batch, as ``DataCollatorWithPadding`` does, or to the sequence length."""
    pad_to_multiple_of: int | None = None
    group_by_length: bool = False
    packing: bool = False
    """Whether a sample of a batch is a row of several texts."""
    facts: DataFacts | None = None
    """``None`` until the dataset was read."""

    def place(self) -> dict[str, Any]:
        """Return the fields with paths, which ``identity`` lacks: equal data may be elsewhere in another study."""
        return {"source": self.source, "tokenizer": self.tokenizer}

    def identity(self) -> dict[str, Any]:
        """Return the fields that decide what the batches are, to see whether two studies have the same data."""
        # Packing is left out where there is none, as in studies from before it.
        left_out = {*self.place(), "facts", *(() if self.packing else ("packing",))}
        return {name: value for name, value in encode(self).items() if name not in left_out}

    def padded(self, tokens: int, seq_len: int) -> int:
        """Return the length to which the samples of a batch are padded whose longest sample has ``tokens``."""
        length = seq_len if self.padding == "max_length" else tokens
        multiple = self.pad_to_multiple_of or 1
        return -(-length // multiple) * multiple

    @property
    def label(self) -> str:
        """A short name for messages: the hub's name, or the last part of the path."""
        return self.source if self.kind == "hub" else in_one_line(os.path.basename(self.source))


FACTS_FILE = "facts.json"
"""Name of the file with the facts, in the folder of a dataset that was prepared."""


def facts_in(folder: Path) -> DataFacts | None:
    """Return the facts of a dataset prepared in a folder; ``None`` where there are none or they cannot be read."""
    try:
        return decode(json.loads((folder / FACTS_FILE).read_text()), DataFacts)
    except (OSError, ValueError):
        return None


_BARS = " ▁▂▃▄▅▆▇█"


def describe_lengths(lengths: Lengths) -> str:
    """Return one line: a histogram, the quantiles, and the shares of truncated samples and of padding."""
    largest_count = max(lengths.histogram)
    # Rounded up, so that a bin with any sample has a bar.
    bars = "".join(_BARS[-(-8 * count // largest_count)] for count in lengths.histogram)
    return (
        f"0 {bars} {lengths.longest} tokens: min {lengths.shortest}, median {lengths.median}, "
        f"95 % below {lengths.percentile_95}, max {lengths.longest}; {lengths.truncated:.1%} truncated, "
        f"{lengths.padding:.0%} of a batch of 8 is padding"
    )


def describe_packing(facts: DataFacts) -> str:
    """Return ``601 samples packed in 84 rows of at most 122 tokens, 99.2% full``, for a packed dataset."""
    assert facts.packed is not None
    assert facts.lengths is not None
    full = facts.lengths.mean / facts.lengths.longest
    return (
        f"{facts.packed.samples:,} samples packed in {facts.samples:,} rows of at most {facts.lengths.longest} tokens, "
        f"{full:.1%} full"
    )


def publish_data(partial: Path, folder: Path) -> None:
    """Move a prepared dataset to ``folder``, where all searches use it, unless another search was first.

    Nobody removes such a folder later, so it needs no lock. Raises ``StorageError`` where it cannot be moved.
    """
    if facts_in(folder) is not None:
        return
    # Another version may have left a folder whose facts cannot be read, which no search uses.
    shutil.rmtree(folder, ignore_errors=True)
    try:
        partial.rename(folder)
    except OSError as error:
        # Another search may have published its folder in between.
        if facts_in(folder) is None:
            raise StorageError(
                f"the data cannot be kept in {folder}: {error.strerror}",
                "see who changes that folder, then search again",
            ) from error
