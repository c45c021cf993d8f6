"""The user's own data: where it is, which columns matter, how it is padded, what is known of it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from autotune.core.errors import InvalidRequestError
from autotune.core.units import MIB, in_one_line
from autotune.models.hub_revision import commit_of, hub_content

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

_KIND_OF_SUFFIX: dict[str, DataKind] = {
    ".jsonl": "json",
    ".json": "json",
    ".ndjson": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
}
_COMPRESSED = frozenset({".gz", ".bz2", ".xz", ".zst"})
# As datasets takes the names of files for those of splits.
_SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_MOST_NAMED = 8
_IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
# Written by datasets' save_to_disk, of one split and of several.
_SAVED_FILES = ("state.json", "dataset_dict.json")
_HUB_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)?(:[A-Za-z0-9_.-]+)?")
# Less than this is hashed whole; of more, names, sizes and times of change stand for the content.
_HASHED_BYTES = 256 * MIB

_NEXT_STEP = "give a jsonl, csv or parquet file, a folder of images, a folder from save_to_disk, or a name on the hub"


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

    def check_unchanged(self) -> None:
        """``InvalidRequestError`` where data or tokenizer are gone, or hold something else than they did."""
        today = locate(self.source, None if self.split == DEFAULT_SPLIT else self.split)[2]
        if self.kind == "hub" and not (commit_of(today) and commit_of(self.content)):
            # Which commit it was or is, is not known, so nothing says that it changed.
            today = self.content
        if today != self.content:
            raise InvalidRequestError(
                f"{in_one_line(self.source)} has changed since the search", "search again on what it is now"
            )
        if self.tokenizer is None or tokenizer_content(self.tokenizer) == self.tokenizer_content:
            return
        what = "has changed since the search" if os.path.isdir(os.path.expanduser(self.tokenizer)) else "is gone"
        raise InvalidRequestError(
            f"the tokenizer in {in_one_line(self.tokenizer)} {what}", "search again with --tokenizer"
        )

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


def locate(name: str, split: str | None) -> tuple[str, DataKind, str]:
    """Find source, kind and content of what ``name`` stands for; nothing of it is read but its bytes.

    Of a name on the hub, the hub is asked which commit it is at.

    ``split`` is ``None`` where nobody asked for one: ``train`` then, or all where nothing is named so. Raises
    ``InvalidRequestError`` where nothing is there, what is there is of no known kind, or has not the split.
    """
    path = Path(os.path.abspath(os.path.expanduser(name)))
    if path.is_dir():
        kind, files = _folder_kind(path, name, split)
    elif path.is_file():
        kind, files = _file_kind(path, name), [path]
        if split not in (None, DEFAULT_SPLIT):
            raise InvalidRequestError(
                f"--split {split}: --dataset {name} is a single file, which has no splits",
                "leave --split out, or name the file of that split",
            )
    elif _is_hub_name(name):
        return name, "hub", hub_content(name)
    else:
        raise InvalidRequestError(f"--dataset {name}: there is no such file or folder", _NEXT_STEP)
    return str(path), kind, _content(path, files)


def tokenizer_content(name: str) -> str:
    """The same for two tokenizers exactly when they are: a folder's files count, a hub name stands for itself."""
    folder = Path(os.path.expanduser(name))
    if not folder.is_dir():
        return name
    named = ("tokenizer", "vocab", "merges", "special_tokens", "spiece", "added_tokens")
    return _content(folder, sorted(file for file in folder.iterdir() if file.is_file() and file.name.startswith(named)))


def under_plain_names(files: list[str], folder: Path) -> list[str]:
    """Links to files in a new folder, with names that nothing takes for a pattern, a chain of URLs or an option."""
    folder.mkdir(parents=True)
    links = []
    for number, file in enumerate(files):
        link = folder / f"{number:06}{''.join(s for s in Path(file).suffixes[-2:] if s[1:].isalnum())}"
        link.symlink_to(file)
        links.append(str(link))
    return links


def data_files(source: str, kind: DataKind, split: str) -> list[str]:
    """The files of a source that is read by its suffix."""
    path = Path(source)
    if path.is_file():
        return [source]
    files = _files_of_kind(path, kind)
    return [str(file) for file in _of_split(path, files, split) or files]


def _suffix(path: Path) -> str:
    """The suffix that tells the kind, a compression's left out."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in _COMPRESSED else suffix


def _is_hub_name(name: str) -> bool:
    return bool(_HUB_NAME.fullmatch(name)) and _suffix(Path(name)) not in _KIND_OF_SUFFIX


def _file_kind(path: Path, name: str) -> DataKind:
    kind = _KIND_OF_SUFFIX.get(_suffix(path))
    if kind is None:
        raise InvalidRequestError(f"--dataset {name}: {path.suffix or 'no suffix'} tells no kind of data", _NEXT_STEP)
    if path.stat().st_size == 0:
        raise InvalidRequestError(f"--dataset {name}: the file is empty", "give one that holds samples")
    return kind


def _folder_kind(path: Path, name: str, split: str | None) -> tuple[DataKind, list[Path]]:
    if any((path / file).is_file() for file in _SAVED_FILES):
        if split not in (None, DEFAULT_SPLIT) and not (path / _SAVED_FILES[1]).is_file():
            raise InvalidRequestError(
                f"--split {split}: --dataset {name} was saved as a single split", "leave --split out, or name another"
            )
        return "saved", sorted(file for file in path.rglob("*") if file.is_file())
    files = [file for file in path.rglob("*") if file.is_file()]
    images = sorted(file for file in files if file.suffix.lower() in _IMAGE_SUFFIXES)
    if images:
        return "imagefolder", images
    kinds = sorted({_KIND_OF_SUFFIX[_suffix(file)] for file in files if _suffix(file) in _KIND_OF_SUFFIX})
    if not kinds:
        raise InvalidRequestError(f"--dataset {name}: the folder holds no data of a known kind", _NEXT_STEP)
    if len(kinds) > 1:
        raise InvalidRequestError(
            f"--dataset {name}: the folder holds files of several kinds ({', '.join(kinds)})", "name one of the files"
        )
    found = _files_of_kind(path, kinds[0])
    chosen = _of_split(path, found, split or DEFAULT_SPLIT)
    if split is not None and not chosen:
        names = [in_one_line(str(file.relative_to(path))) for file in found]
        raise InvalidRequestError(
            f"--split {split}: no file or folder in --dataset {name} is named so",
            f"it has {', '.join(names[:_MOST_NAMED])}{' …' if len(names) > _MOST_NAMED else ''}; name another split, "
            "or leave --split out",
        )
    return kinds[0], chosen or found


def _files_of_kind(path: Path, kind: DataKind) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file() and _KIND_OF_SUFFIX.get(_suffix(file)) == kind)


def _of_split(root: Path, files: list[Path], split: str) -> list[Path]:
    """The files of a folder that a split's name is a word of, or of a folder that they are in."""
    words = "|".join(re.escape(word.lower()) for word in _SPLIT_WORDS.get(split, (split,)))
    # A letter beside it makes it part of another word, a digit or a sign does not.
    named = re.compile(rf"(?<![^\W\d_])({words})(?![^\W\d_])")
    return [file for file in files if named.search(str(file.relative_to(root)).lower().rpartition(_suffix(file))[0])]


def _content(root: Path, files: Iterable[Path]) -> str:
    facts = [(file, file.stat()) for file in files]
    is_small = sum(status.st_size for _, status in facts) <= _HASHED_BYTES
    digest = hashlib.sha256()
    for file, status in facts:
        digest.update(f"{file.relative_to(root) if file != root else ''}\0{status.st_size}\0".encode())
        digest.update(file.read_bytes() if is_small else str(status.st_mtime_ns).encode())
    return digest.hexdigest()[:32]


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
