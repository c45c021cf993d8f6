"""Write the command that installs an extra of this package, in the way that the package was installed."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path
from urllib.parse import unquote, urlparse

_NAME = "traintune"
"""Of the distribution: on the package index, ``autotune`` is another project."""


def how_to_add(extra: str) -> str:
    """Return the command that installs an extra where this process runs."""
    # A checkout that is the working directory is found first, by its ``egg-info``, which has no record of its place.
    found = importlib.metadata.distributions(name=_NAME)
    direct_url = next((record for each in found if (record := each.read_text("direct_url.json"))), None)
    return command_to_add(extra, Path(sys.prefix), direct_url)


def command_to_add(extra: str, prefix: Path, direct_url: str | None) -> str:
    """Return the install command for an environment.

    ``direct_url`` is the record of where the package came from (PEP 610), if there is one. uv and pipx leave a file of
    their own in the environment of a tool.
    """
    named, is_editable = f"{_NAME}[{extra}]", False
    if direct_url is not None:
        record = json.loads(direct_url)
        url = str(record.get("url", ""))
        is_editable = bool(record.get("dir_info", {}).get("editable"))
        if url.startswith("file:"):
            named = f"{unquote(urlparse(url).path)}[{extra}]"
        elif (repository := record.get("vcs_info")) is not None:
            named += f" @ {repository['vcs']}+{url}@{repository['commit_id']}"
    if (prefix / "pipx_metadata.json").exists():
        return f"pipx install --force '{named}'"
    tool = "uv tool install" if (prefix / "uv-receipt.toml").exists() else "pip install"
    return f"{tool} {'-e ' if is_editable else ''}'{named}'"
