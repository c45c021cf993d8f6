"""Find out which commit a dataset on the Hugging Face hub is at, so that its name does not stand for changed data."""

from __future__ import annotations

from pathlib import Path

_TIMEOUT_SECONDS = 10.0
_MARK = "@"


def hub_content(name: str) -> str:
    """Return ``NAME@COMMIT`` for a dataset ``NAME`` or ``NAME:CONFIG``; the name alone where no commit is known.

    The hub is asked, then its cache on this machine. Imports huggingface_hub.
    """
    repository = name.partition(":")[0]
    commit = _commit_on_hub(repository) or _commit_in_cache(repository)
    return f"{name}{_MARK}{commit}" if commit else name


def commit_of(content: str) -> str | None:
    """Return the commit in what ``hub_content`` returned; ``None`` where none was known."""
    return content.partition(_MARK)[2] or None


def _commit_on_hub(repository: str) -> str | None:
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        return None
    try:
        return HfApi().dataset_info(repository, timeout=_TIMEOUT_SECONDS).sha
    except Exception:
        # No network, no such dataset, no access: reading the data says what is wrong.
        return None


def _commit_in_cache(repository: str) -> str | None:
    """Return the commit that the hub's client downloaded last."""
    from huggingface_hub import constants

    folder = "--".join(("datasets", *repository.split("/")))
    try:
        return (Path(constants.HF_HUB_CACHE) / folder / "refs" / "main").read_text().strip() or None
    except OSError:
        return None
