"""Look up well-known architectures by their hub names, so that measuring one needs no download.

The files in ``configs/`` hold what each model's ``config.json`` on the hub says about its architecture, and its number
of parameters. Labels, generation settings and version numbers are left out; a list of a thousand label names became
``num_labels``. Weights are not included. Entries without an organisation in their name exist only here: small models to
try things out on a CPU.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from autotune.core.errors import near_misses

# Longer input is cut before it is compared, to bound the time: the hub allows names of 96 characters.
_LONGEST_COMPARED = 128
_MOST_NEAR = 3


@dataclass(frozen=True)
class CatalogEntry:
    """One architecture of the catalog."""

    name: str
    """The hub name with its organisation; without one if it exists only here."""
    aliases: tuple[str, ...]
    """Other names of the same architecture; those with an organisation are hub repositories too."""
    config: dict[str, Any]
    """The config as in a ``config.json``; shared by all callers, so copy it before changing it."""
    parameters: int
    """Parameters of the model as it is trained: with the head of its inferred task, tied weights counted once."""
    about: str
    """A short description: ``encoder, 24 layers``."""

    @property
    def names(self) -> tuple[str, ...]:
        """Every name of this entry, best first; case does not matter."""
        full = (self.name, *self.aliases)
        return tuple(dict.fromkeys((*full, *map(_without_organisation, full))))


def _without_organisation(name: str) -> str:
    """Return ``bert-base-uncased`` for ``google-bert/bert-base-uncased``."""
    return name.rsplit("/", 1)[-1]


@cache
def entries() -> tuple[CatalogEntry, ...]:
    """Return the whole catalog by family, each from small to large."""
    folder = resources.files(__name__).joinpath("configs")
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".json")), key=lambda file: file.name)
    entries: list[CatalogEntry] = []
    for file in files:
        # Not by ``decode``: the command line lists models without importing msgspec.
        family = [
            CatalogEntry(**{**facts, "aliases": tuple(facts["aliases"])})
            for facts in json.loads(file.read_text(encoding="utf-8"))
        ]
        entries += sorted(family, key=lambda entry: (entry.parameters, entry.name))
    return tuple(entries)


@cache
def _entry_of_name() -> dict[str, CatalogEntry]:
    """Return the entries by each of their names, as written and in lower case; names as written have precedence."""
    exact = {name: entry for entry in entries() for name in entry.names}
    return {name.lower(): entry for name, entry in exact.items()} | exact


def find(name: str) -> CatalogEntry | None:
    """Return the entry with this name, with or without its organisation, in any case; ``None`` if there is none."""
    by_name = _entry_of_name()
    return by_name.get(name) or by_name.get(name.lower())


def near_names(name: str) -> tuple[str, ...]:
    """Return up to three similar names from the catalog, the most similar first.

    The beginnings of names are compared, too: ``bert-lrge`` finds ``bert-large-uncased``.
    """
    # Each name in lower case, with how it is written.
    spelling = {_without_organisation(known).lower(): known for entry in entries() for known in reversed(entry.names)}
    wanted = _without_organisation(name.rstrip("/")).lower()[:_LONGEST_COMPARED]
    # Each beginning of a name up to a hyphen, with the names that begin so.
    beginnings: dict[str, list[str]] = {}
    for known in spelling:
        parts = known.split("-")
        for end in range(1, len(parts) + 1):
            beginnings.setdefault("-".join(parts[:end]), []).append(known)
    # With an organisation it is a name on the hub, which has many more models than the catalog.
    near = near_misses(wanted, beginnings, most=_MOST_NEAR, least_ratio=0.8 if "/" in name else 0.6)
    # Shorter names first: of names with the same beginning, the plain one is the most likely.
    found = dict.fromkeys(known for match in near for known in sorted(beginnings[match], key=len))
    return tuple(_without_organisation(spelling[match]) for match in list(found)[:_MOST_NEAR])
