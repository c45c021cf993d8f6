"""Parse the pages of the documentation and the README into blocks."""

import re
from pathlib import Path

from checkout import ROOT

DOCS = ROOT / "docs"
README = ROOT / "README.md"


def pages() -> list[Path]:
    """Return the README and every page."""
    return [README, *sorted(DOCS.rglob("*.md"))]


def read(page: str) -> str:
    """Return the text of a page below ``docs``."""
    return (DOCS / page).read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    """Return the fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[str]:
    """Return what console blocks have after a dollar sign, without redirections, pipes and comments."""
    lines = [line for block in blocks(text, "console") for line in block.splitlines() if line.startswith("$ ")]
    return [re.split(r"\s+(?:[>|#])\s*", line.removeprefix("$ "))[0] for line in lines]


def shown(text: str, command: str) -> list[str]:
    """Return the lines that a console block shows after a command that begins so."""
    for block in blocks(text, "console"):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE):
            if part.startswith(command):
                return part.rstrip("\n").splitlines()[1:]
    raise AssertionError(f"no console block has {command!r}")
