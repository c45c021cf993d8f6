"""Describe the user's own data: its source, the columns that matter, how it is padded, its facts once it was read."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from autotune.core.units import in_one_line

DATA_OPTIONS = (
    "dataset",
    "split",
    "text_column",
    "label_column",
    "image_column",
    "tokenizer",
    "pad_to_max_length",
    "pad_to_multiple_of",
    "group_by_length",
)
"""The options about data, in the order in which help shows them."""

DataKind = Literal["json", "csv", "parquet", "arrow", "text", "imagefolder", "saved", "hub"]
PaddingRule = Literal["longest", "max_length"]

DEFAULT_SPLIT = "train"


@dataclass(frozen=True)
class Lengths:
    """How many tokens the samples have, special tokens included, after truncation."""

    shortest: int
    median: int
    percentile_95: int
    longest: int
    mean: float
    truncated: float
    """Share of the samples that were cut at ``--seq-len``."""
    padding: float
    """Share of the tokens of a batch of 8 that will be padding, in shuffled order or as grouped."""
    histogram: tuple[int, ...]
    """Samples in each of equally wide bins from 0 to ``longest``."""
    longest_target: int | None = None
    """Tokens of the longest target of a seq2seq task."""


@dataclass(frozen=True)
class DataFacts:
    """What reading the data once has shown."""

    samples: int
    num_labels: int | None = None
    """Classes of a classification; 1 where the labels are numbers to regress on."""
    lengths: Lengths | None = None
    """``None`` for images, which are all of one size."""


@dataclass(frozen=True)
class DataSpec:
    """A dataset and how it becomes batches."""

    source: str
    """Absolute path of a file or folder, or ``NAME`` or ``NAME:CONFIG`` on the hub."""
    kind: DataKind
    content: str
    """The same for two sources exactly when they hold the same, as far as can be told cheaply."""
    tokenizer_content: str | None = None
    """As ``content``, of the tokenizer."""
    split: str = DEFAULT_SPLIT
    text_columns: tuple[str, ...] | None = None
    """``None``: the one that there is."""
    label_column: str | None = None
    """Classes, numbers, or the target text of a seq2seq task; ``None``: the usual names."""
    image_column: str | None = None
    tokenizer: str | None = None
    """Folder or hub name of the tokenizer; ``None`` where images need none."""
    padding: PaddingRule = "longest"
    """To the longest sample of a batch, as ``DataCollatorWithPadding`` does, or to the sequence length."""
    pad_to_multiple_of: int | None = None
    group_by_length: bool = False
    facts: DataFacts | None = None
    """``None`` until the data was read."""

    def document(self) -> dict[str, Any]:
        """As JSON-ready data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> DataSpec:
        """The inverse of ``document``."""
        fields = dict(document)
        if fields.get("text_columns") is not None:
            fields["text_columns"] = tuple(fields["text_columns"])
        if fields.get("facts") is not None:
            fields["facts"] = facts_from_document(fields["facts"])
        return cls(**fields)

    def place(self) -> dict[str, Any]:
        """Where the data lies, which is each study's own: the same may lie in several places."""
        return {"source": self.source, "tokenizer": self.tokenizer}

    def identity(self) -> dict[str, Any]:
        """What decides the batches: not where the data lies, nor what follows from it."""
        left_out = {*self.place(), "facts"}
        return {name: value for name, value in self.document().items() if name not in left_out}

    def padded(self, tokens: int, seq_len: int) -> int:
        """Tokens a sample has in a batch whose longest has ``tokens``."""
        length = seq_len if self.padding == "max_length" else tokens
        multiple = self.pad_to_multiple_of or 1
        return -(-length // multiple) * multiple

    @property
    def label(self) -> str:
        """A short name for messages: the file's or folder's own, or the hub's."""
        return self.source if self.kind == "hub" else in_one_line(os.path.basename(self.source))


def facts_from_document(document: dict[str, Any]) -> DataFacts:
    """The inverse of ``dataclasses.asdict`` on ``DataFacts``."""
    fields = dict(document)
    if fields.get("lengths") is not None:
        fields["lengths"] = Lengths(**{**fields["lengths"], "histogram": tuple(fields["lengths"]["histogram"])})
    return DataFacts(**fields)


FACTS_FILE = "facts.json"
"""In a folder of data that was read: its facts."""


def facts_in(folder: Path) -> DataFacts | None:
    """What is known of data that was read into a folder; ``None`` where none was, or what is there makes no sense."""
    try:
        return facts_from_document(json.loads((folder / FACTS_FILE).read_text()))
    except (OSError, ValueError, TypeError, KeyError):
        return None


_BARS = " ▁▂▃▄▅▆▇█"


def describe_lengths(lengths: Lengths) -> str:
    """One line: a histogram, the quantiles, what is cut and what is padding."""
    most = max(lengths.histogram)
    bars = "".join(_BARS[-(-8 * count // most)] for count in lengths.histogram)
    return (
        f"0 {bars} {lengths.longest} tokens: min {lengths.shortest}, median {lengths.median}, "
        f"95 % below {lengths.percentile_95}, max {lengths.longest}; {lengths.truncated:.1%} truncated, "
        f"{lengths.padding:.0%} of a batch of 8 is padding"
    )
