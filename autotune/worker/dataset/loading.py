"""Load the user's dataset from a file, a folder or the hub, and say in one line why it cannot be loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datasets import DatasetDict, load_dataset, load_from_disk
from huggingface_hub import constants

from autotune.core.dataset_spec import DataSpec
from autotune.core.errors import InvalidRequestError
from autotune.core.units import in_one_line
from autotune.models.dataset_files import data_files, under_plain_names
from autotune.models.hub_revision import commit_of
from autotune.worker.failures import first_line
from autotune.worker.private.datasets import in_stored_order

# Part of the message of datasets for files without rows.
_NO_DATA = "corresponds to no data"
# Most files that are compared to find one with other columns.
_MOST_COMPARED = 200
_MOST_COLUMNS = 8
_NOTHING = "nothing"


def load(spec: DataSpec, folder: Path) -> Any:
    """Return the ``Dataset`` of a split; files that are made on the way are put in ``folder``.

    Raises ``InvalidRequestError`` where it cannot be read, has no such split, or is empty.
    """
    try:
        loaded = load_from_disk(spec.source) if spec.kind == "saved" else _load_by_kind(spec, folder / "cache")
    except InvalidRequestError:
        raise
    except Exception as error:
        if _NO_DATA in str(error):
            raise _is_empty(spec) from error
        hint = f"check {'the dataset on the hub' if spec.kind == 'hub' else 'the files'}, and --split {spec.split}"
        if spec.kind == "hub":
            hint += "; no file or folder has this name"
        # The message of datasets only says that something failed; the exception's cause says what.
        why = first_line(error.__cause__ or error)
        raise InvalidRequestError(f"--dataset {spec.label} cannot be read: {why}", hint) from error
    if isinstance(loaded, DatasetDict):
        if spec.split not in loaded:
            raise InvalidRequestError(
                f"--dataset {spec.label} has no split {spec.split!r}", f"it has {', '.join(sorted(loaded))}"
            )
        loaded = loaded[spec.split]
    if len(loaded) == 0:
        raise _is_empty(spec)
    return in_stored_order(loaded)


def _is_empty(spec: DataSpec) -> InvalidRequestError:
    return InvalidRequestError(
        f"--dataset {spec.label} has no samples (split {spec.split})", "give a dataset or split with samples"
    )


def _load_by_kind(spec: DataSpec, cache: Path) -> Any:
    if spec.kind == "hub":
        name, _, config = spec.source.partition(":")
        # Read the revision that was looked up. Offline, only a revision that was downloaded earlier is there.
        revision = None if constants.HF_HUB_OFFLINE else commit_of(spec.content)
        return load_dataset(name, config or None, split=spec.split, revision=revision)
    if spec.kind == "imagefolder":
        return load_dataset("imagefolder", data_dir=spec.source, cache_dir=str(cache))
    files = data_files(spec.source, spec.kind, spec.split)
    links = under_plain_names(files, cache / "links")
    options = {"sep": "\t"} if spec.kind == "csv" and ".tsv" in links[0] else {}
    try:
        return load_dataset(spec.kind, data_files=links, split="train", cache_dir=str(cache), **options)
    except Exception as error:
        if len(files) > 1 and _NO_DATA not in str(error):
            # The message of datasets about files that differ names neither the files nor their columns.
            _check_alike(spec, files, links, options)
        raise


def _check_alike(spec: DataSpec, files: list[str], links: list[str], options: dict[str, str]) -> None:
    """Raise ``InvalidRequestError`` where a file's first sample has other columns than that of the first file."""
    some = zip(files[:_MOST_COMPARED], links, strict=False)
    readable = [(file, kinds) for file, link in some if (kinds := _kinds(spec, link, options))]
    for file, kinds in readable[1:]:
        first, others = readable[0]
        if not _is_like(kinds, others):
            names = [in_one_line(str(Path(path).relative_to(spec.source))) for path in (file, first)]
            raise InvalidRequestError(
                f"--dataset {spec.label}: {names[0]} has the columns {_listed(kinds)}, but {names[1]} has "
                f"{_listed(others)}",
                "give files with the same columns, or name one of the files with --dataset",
            )


def _is_like(kinds: dict[str, str], others: dict[str, str]) -> bool:
    """Return whether two samples have the same columns of the same kinds; an empty value may be of any kind."""
    if set(kinds) != set(others):
        return False
    return all(kind == others[name] or _NOTHING in (kind, others[name]) for name, kind in kinds.items())


def _kinds(spec: DataSpec, link: str, options: dict[str, str]) -> dict[str, str]:
    """Return the kind of each column of a file's first sample; empty where it cannot be read or has none."""
    try:
        rows = load_dataset(spec.kind, data_files=[link], split="train", streaming=True, **options)
        row: dict[str, Any] = next(iter(rows), {})
    except Exception:
        return {}
    return {name: _kind(value) for name, value in row.items()}


def _kind(value: Any) -> str:
    if value is None:
        return _NOTHING
    return {str: "text", int: "number", float: "number", bool: "number"}.get(type(value), type(value).__name__)


def _listed(kinds: dict[str, str]) -> str:
    """Return ``text (text), label (number) …``."""
    some = [f"{name} ({kind})" for name, kind in kinds.items()]
    return in_one_line(", ".join(some[:_MOST_COLUMNS]) + (" …" if len(some) > _MOST_COLUMNS else ""))
