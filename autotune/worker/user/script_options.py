"""Watch and set the options of the argparse parsers that the user's script makes."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping, Sequence
from typing import Any


def set_options(values: dict[str, int]) -> None:
    """Have every ``argparse`` parser of this process give other values for options that it has and that are given."""
    parse = argparse.ArgumentParser.parse_known_args

    def parse_known_args(parser: Any, *words: Any, **options: Any) -> Any:
        found, others = parse(parser, *words, **options)
        for name, value in values.items():
            if getattr(found, name, None) is not None:
                setattr(found, name, value)
        return found, others

    argparse.ArgumentParser.parse_known_args = parse_known_args  # type: ignore[assignment, method-assign]


class SeenOptions:
    """The options that the script's own parsers have, and what was given for them."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.actions: list[argparse.Action] = []
        self.values: dict[str, Any] = {}

    def watch(self) -> None:
        """Record them from now on."""
        kind: Any = next(each for each in argparse.ArgumentParser.__mro__ if "add_argument" in vars(each))
        add, parse = kind.add_argument, argparse.ArgumentParser.parse_known_args

        @functools.wraps(add)
        def add_argument(parser: Any, *names: Any, **options: Any) -> Any:
            self.names |= {name for name in names if isinstance(name, str) and name.startswith("--")}
            made = add(parser, *names, **options)
            self.actions.append(made)
            return made

        def parse_known_args(parser: Any, *words: Any, **options: Any) -> Any:
            found, others = parse(parser, *words, **options)
            self.values |= vars(found)
            return found, others

        kind.add_argument = add_argument
        argparse.ArgumentParser.parse_known_args = parse_known_args  # type: ignore[assignment, method-assign]

    def flags(self, options: Mapping[str, Sequence[str]]) -> dict[str, str]:
        """Return the flag of each thing that can be searched, where the script has one, with dashes or underscores."""
        spelled = {name.replace("_", "-"): name for name in self.names}
        wanted = {what: [name.replace("_", "-") for name in names] for what, names in options.items()}
        return {what: spelled[name] for what, names in wanted.items() for name in names if name in spelled}


@functools.cache
def watch_options() -> SeenOptions:
    """Take down, from now on, which options the parsers of this process have."""
    seen = SeenOptions()
    seen.watch()
    return seen
