"""Find the files of a dataset, tell their format, and hash their content, without parsing any sample."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from autotune.core.dataset_spec import DEFAULT_SPLIT, DataKind, DataSpec
from autotune.core.errors import InvalidRequestError, did_you_mean, near_misses
from autotune.core.units import MIB, in_one_line

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
# How datasets recognizes splits in the names of files.
_SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_MOST_NAMED = 8
_IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
# Files that datasets' save_to_disk writes, for one split and for several.
_SAVED_FILES = ("state.json", "dataset_dict.json")
_HUB_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)?(:[A-Za-z0-9_.-]+)?")
# Up to this size files are hashed; of larger datasets only names, sizes and modification times are.
_HASHED_BYTES = 256 * MIB

_NEXT_STEP = "give a jsonl, csv or parquet file, a folder of images, a folder from save_to_disk, or a name on the hub"


class LocatedData(NamedTuple):
    """Where a dataset was found, in which format, and a hash of its content."""

    source: str
    """Absolute path, or name on the hub."""
    kind: DataKind
    content: str
    """Hash of the files, or the hub's name and commit."""


def locate(name: str, split: str | None) -> LocatedData:
    """Find the dataset with this name: a file, a folder, or a dataset on the hub, which is asked for its commit.

    Files are hashed but not parsed. ``split`` is ``None`` where the user named none: then it is ``train``, or all files
    where no file is named so. Raises ``InvalidRequestError`` for no such dataset, an unknown format or a missing split.
    """
    path = Path(os.path.abspath(os.path.expanduser(name)))
    if path.is_dir():
        kind, files = _folder_kind(path, name, split)
    elif path.is_file():
        if (kind_of_file := _KIND_OF_SUFFIX.get(_suffix(path))) is None:
            raise InvalidRequestError(
                f"--dataset {name}: {path.suffix or 'a name without suffix'} is not a known data format", _NEXT_STEP
            )
        if path.stat().st_size == 0:
            raise InvalidRequestError(f"--dataset {name}: the file is empty", "give a file with samples")
        kind, files = kind_of_file, [path]
        if split not in (None, DEFAULT_SPLIT):
            raise InvalidRequestError(
                f"--split {split}: --dataset {name} is a single file, which has no splits",
                "leave --split out, or name the file of that split",
            )
    elif _HUB_NAME.fullmatch(name) and _suffix(Path(name)) not in _KIND_OF_SUFFIX and not _near_file(path):
        return LocatedData(name, "hub", hub_content(name))
    else:
        raise InvalidRequestError(f"--dataset {name}: there is no such file or folder", _near_file(path) or _NEXT_STEP)
    return LocatedData(str(path), kind, _content(path, files))


def check_unchanged(spec: DataSpec, *, of_processor: bool = False) -> None:
    """Raise ``InvalidRequestError`` if the dataset or the tokenizer is gone or has changed since the search.

    With ``of_processor`` the tokenizer is a processor of images and text.
    """
    today = locate(spec.source, None if spec.split == DEFAULT_SPLIT else spec.split).content
    if spec.kind == "hub" and not (commit_of(today) and commit_of(spec.content)):
        # The commit was not known then or is not known now, so no change can be shown.
        today = spec.content
    if today != spec.content:
        raise InvalidRequestError(
            f"{in_one_line(spec.source)} has changed since the search", "search again with the present data"
        )
    if spec.tokenizer is None or tokenizer_content(spec.tokenizer, of_processor=of_processor) == spec.tokenizer_content:
        return
    what = "has changed since the search" if os.path.isdir(os.path.expanduser(spec.tokenizer)) else "is gone"
    raise InvalidRequestError(f"the tokenizer in {in_one_line(spec.tokenizer)} {what}", "search again with --tokenizer")


def tokenizer_content(name: str, *, of_processor: bool = False) -> str:
    """Return a hash of a tokenizer's or processor's files, to notice changes; for a hub name, the name itself."""
    folder = Path(os.path.expanduser(name))
    if not folder.is_dir():
        return name
    named: tuple[str, ...] = ("tokenizer", "vocab", "merges", "special_tokens", "spiece", "added_tokens")
    if of_processor:
        named += ("processor_config", "preprocessor_config", "chat_template")
    return _content(folder, sorted(file for file in folder.iterdir() if file.is_file() and file.name.startswith(named)))


def under_plain_names(files: list[str], folder: Path) -> list[str]:
    """Link files into a new folder under plain names, which ``datasets`` cannot mistake for patterns or URLs."""
    folder.mkdir(parents=True)
    links = []
    for number, file in enumerate(files):
        link = folder / f"{number:06}{''.join(s for s in Path(file).suffixes[-2:] if s[1:].isalnum())}"
        link.symlink_to(file)
        links.append(str(link))
    return links


def data_files(source: str, kind: DataKind, split: str) -> list[str]:
    """Return the files of a dataset that is read by suffix: those of the split, or all where none is named so."""
    path = Path(source)
    if path.is_file():
        return [source]
    files = _files_of_kind(path, kind)
    return [str(file) for file in _of_split(path, files, split) or files]


def _suffix(path: Path) -> str:
    """Return the suffix of the file format, without a compression suffix."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in _COMPRESSED else suffix


def _near_file(path: Path) -> str:
    """Return ``did you mean …?`` for a misspelt file, with similar data files in its folder, or an empty string.

    Without an ending like a suffix of a known format it is no file: names on the hub may have versions there.
    """
    beside: list[str] = []
    if near_misses(_suffix(path), _KIND_OF_SUFFIX, most=1):
        # A folder that is not there, or that may be entered but not listed.
        with contextlib.suppress(OSError):
            beside = [each.name for each in path.parent.iterdir() if _suffix(each) in _KIND_OF_SUFFIX]
    return did_you_mean(path.name, beside, least_ratio=0.8)


def _folder_kind(path: Path, name: str, split: str | None) -> tuple[DataKind, list[Path]]:
    """Return the format of a dataset's folder, and the split's files. Raises ``InvalidRequestError`` as ``locate``."""
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
        raise InvalidRequestError(f"--dataset {name}: the folder has no files of a known data format", _NEXT_STEP)
    if len(kinds) > 1:
        raise InvalidRequestError(
            f"--dataset {name}: the folder has files of several formats ({', '.join(kinds)})", "name one of the files"
        )
    data = _files_of_kind(path, kinds[0])
    chosen = _of_split(path, data, split or DEFAULT_SPLIT)
    if split is not None and not chosen:
        names = [in_one_line(str(file.relative_to(path))) for file in data]
        raise InvalidRequestError(
            f"--split {split}: no file or folder in --dataset {name} is named so",
            f"it has {', '.join(names[:_MOST_NAMED])}{' …' if len(names) > _MOST_NAMED else ''}; name another split, "
            "or leave --split out",
        )
    return kinds[0], chosen or data


def _files_of_kind(path: Path, kind: DataKind) -> list[Path]:
    """Return the files of a format in a folder and its subfolders."""
    return sorted(file for file in path.rglob("*") if file.is_file() and _KIND_OF_SUFFIX.get(_suffix(file)) == kind)


def _of_split(root: Path, files: list[Path], split: str) -> list[Path]:
    """Return the files whose name or folder, below ``root``, contains the split's name as a word."""
    words = "|".join(re.escape(word.lower()) for word in _SPLIT_WORDS.get(split, (split,)))
    # A letter next to it makes it part of another word; a digit or a sign does not.
    named = re.compile(rf"(?<![^\W\d_])({words})(?![^\W\d_])")
    return [file for file in files if named.search(str(file.relative_to(root)).lower().rpartition(_suffix(file))[0])]


def _content(root: Path, files: Iterable[Path]) -> str:
    """Return a hash of the files' names, sizes and contents; of large files the times of change, not the contents."""
    facts = [(file, file.stat()) for file in files]
    is_small = sum(status.st_size for _, status in facts) <= _HASHED_BYTES
    digest = hashlib.sha256()
    for file, status in facts:
        digest.update(f"{file.relative_to(root) if file != root else ''}\0{status.st_size}\0".encode())
        digest.update(file.read_bytes() if is_small else str(status.st_mtime_ns).encode())
    return digest.hexdigest()[:32]


# The commit of a dataset on the hub tells a changed dataset from the same one.


_HUB_TIMEOUT_SECONDS = 10.0
_MARK = "@"


def hub_content(name: str) -> str:
    """Return ``NAME@COMMIT``, which tells versions of a dataset apart; the name alone where the commit is unknown.

    ``name`` may be ``NAME:CONFIG``. Asks the hub, then its cache on this machine.
    """
    from huggingface_hub import HfApi, constants

    repository = name.partition(":")[0]
    commit: str | None = None
    if not constants.HF_HUB_OFFLINE:
        # No network, no such dataset or no access: loading the dataset reports which.
        with contextlib.suppress(Exception):
            commit = HfApi().dataset_info(repository, timeout=_HUB_TIMEOUT_SECONDS).sha
    if not commit:
        # What the hub's client downloaded last.
        folder = "--".join(("datasets", *repository.split("/")))
        with contextlib.suppress(OSError):
            commit = (Path(constants.HF_HUB_CACHE) / folder / "refs" / "main").read_text().strip()
    return f"{name}{_MARK}{commit}" if commit else name


def commit_of(content: str) -> str | None:
    """Return the commit in a result of ``hub_content``; ``None`` without one."""
    return content.partition(_MARK)[2] or None
