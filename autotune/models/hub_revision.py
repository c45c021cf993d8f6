"""Find the commit of a dataset on the Hugging Face hub, so that a changed dataset is not taken for the same."""

from __future__ import annotations

import contextlib
from pathlib import Path

_TIMEOUT_SECONDS = 10.0
_MARK = "@"


def hub_content(name: str) -> str:
    """Return ``NAME@COMMIT`` for a dataset ``NAME`` or ``NAME:CONFIG``; the name alone where no commit is known.

    Asks the hub, then its cache on this machine. Imports huggingface_hub.
    """
    from huggingface_hub import HfApi, constants

    repository = name.partition(":")[0]
    commit: str | None = None
    if not constants.HF_HUB_OFFLINE:
        # No network, no such dataset or no access: loading the dataset reports which.
        with contextlib.suppress(Exception):
            commit = HfApi().dataset_info(repository, timeout=_TIMEOUT_SECONDS).sha
    if not commit:
        # What the hub's client downloaded last.
        folder = "--".join(("datasets", *repository.split("/")))
        with contextlib.suppress(OSError):
            commit = (Path(constants.HF_HUB_CACHE) / folder / "refs" / "main").read_text().strip()
    return f"{name}{_MARK}{commit}" if commit else name


def commit_of(content: str) -> str | None:
    """Return the commit in a result of ``hub_content``; ``None`` where none was known."""
    return content.partition(_MARK)[2] or None
