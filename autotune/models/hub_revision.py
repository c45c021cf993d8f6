"""Find the commit of a dataset on the Hugging Face hub, so that a changed dataset is not taken for the same."""

from __future__ import annotations

from pathlib import Path

_TIMEOUT_SECONDS = 10.0
_MARK = "@"


def hub_content(name: str) -> str:
    """Return ``NAME@COMMIT`` for a dataset ``NAME`` or ``NAME:CONFIG``; the name alone where no commit is known.

    Asks the hub, then its cache on this machine. Imports huggingface_hub.
    """
    repository = name.partition(":")[0]
    commit = _commit_on_hub(repository) or _commit_in_cache(repository)
    return f"{name}{_MARK}{commit}" if commit else name


def commit_of(content: str) -> str | None:
    """Return the commit in a result of ``hub_content``; ``None`` where none was known."""
    return content.partition(_MARK)[2] or None


def _commit_on_hub(repository: str) -> str | None:
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        return None
    try:
        return HfApi().dataset_info(repository, timeout=_TIMEOUT_SECONDS).sha
    except Exception:
        # No network, no such dataset or no access. Loading the dataset reports which.
        return None


def _commit_in_cache(repository: str) -> str | None:
    """Return the commit that the hub's client downloaded last."""
    from huggingface_hub import constants

    folder = "--".join(("datasets", *repository.split("/")))
    try:
        return (Path(constants.HF_HUB_CACHE) / folder / "refs" / "main").read_text().strip() or None
    except OSError:
        return None
