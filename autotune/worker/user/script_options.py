"""Watch and set the options of the argparse parsers that the user's script makes; watch where it makes batches."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.worker.stack import lines_above, users_line
from autotune.worker.wrapping import after


def set_options(values: dict[str, int]) -> None:
    """Have every ``argparse`` parser of this process give other values for options that it has and that are given."""

    def put(parsed: tuple[Any, Any], *_: Any, **__: Any) -> None:
        for name, value in values.items():
            if getattr(parsed[0], name, None) is not None:
                setattr(parsed[0], name, value)

    after(argparse.ArgumentParser, "parse_known_args", put)


class SeenOptions:
    """The options that the script's own parsers have, what was given for them, and where data loaders are made."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.actions: list[argparse.Action] = []
        self.values: dict[str, Any] = {}
        self.loaders: dict[str, int] = {}
        """``FILE:LINE`` of the script where it made a data loader, and its batch."""
        kind: Any = next(each for each in argparse.ArgumentParser.__mro__ if "add_argument" in vars(each))
        after(kind, "add_argument", self._on_added)
        after(argparse.ArgumentParser, "parse_known_args", self._on_parsed)
        from torch.utils.data import DataLoader

        after(DataLoader, "__init__", self._on_loader)

    def _on_loader(self, _: Any, loader: Any, *__: Any, **___: Any) -> None:
        place = users_line(lines_above())
        if place and loader.batch_size is not None:
            self.loaders[place] = loader.batch_size

    def _on_added(self, made: argparse.Action, _: Any, /, *names: Any, **__: Any) -> None:
        self.names |= {name for name in names if isinstance(name, str) and name.startswith("--")}
        self.actions.append(made)

    def _on_parsed(self, parsed: tuple[Any, Any], *_: Any, **__: Any) -> None:
        self.values |= vars(parsed[0])

    def flags(self, options: Mapping[str, Sequence[str]]) -> dict[str, str]:
        """Return the flag of each thing that can be searched, where the script has one, with dashes or underscores."""
        spelled = {name.replace("_", "-"): name for name in self.names}
        wanted = {what: [name.replace("_", "-") for name in names] for what, names in options.items()}
        return {what: spelled[name] for what, names in wanted.items() for name in names if name in spelled}


@functools.cache
def watch_options() -> SeenOptions:
    """Take down, from now on, which options the parsers of this process have, and where it makes data loaders."""
    return SeenOptions()
