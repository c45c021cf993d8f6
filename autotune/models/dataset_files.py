"""Find the files of a dataset, tell their kind, and hash what they hold, without reading any sample."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from autotune.core.dataset_spec import DEFAULT_SPLIT, DataKind, DataSpec
from autotune.core.errors import InvalidRequestError
from autotune.core.units import MIB, in_one_line
from autotune.models.hub_revision import commit_of, hub_content

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


def check_unchanged(spec: DataSpec) -> None:
    """Raise ``InvalidRequestError`` if the data or the tokenizer is gone, or does not hold what it held."""
    today = locate(spec.source, None if spec.split == DEFAULT_SPLIT else spec.split)[2]
    if spec.kind == "hub" and not (commit_of(today) and commit_of(spec.content)):
        # Which commit it was or is, is not known, so nothing says that it changed.
        today = spec.content
    if today != spec.content:
        raise InvalidRequestError(
            f"{in_one_line(spec.source)} has changed since the search", "search again on what it is now"
        )
    if spec.tokenizer is None or tokenizer_content(spec.tokenizer) == spec.tokenizer_content:
        return
    what = "has changed since the search" if os.path.isdir(os.path.expanduser(spec.tokenizer)) else "is gone"
    raise InvalidRequestError(f"the tokenizer in {in_one_line(spec.tokenizer)} {what}", "search again with --tokenizer")


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
