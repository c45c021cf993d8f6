"""Watch and set the options of the argparse parsers that the user's script makes; say how to put placeholders there."""

from __future__ import annotations

import argparse
import functools
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.core.training_source import TrainingSource
from autotune.worker.wrapping import after

_LOOP_PAGE = "docs/how-to/own-loop.md"
_PLACEHOLDERS_PAGE = "docs/how-to/placeholders.md"
# Parts of the names of options that a hint names. A choice.
_BATCH = re.compile(r"batch|accum", re.IGNORECASE)
_MOST_NAMED = 12
_EVALUATION = re.compile(r"eval|valid|test", re.IGNORECASE)


_MEANS = {"batch": re.compile("batch"), "accumulation": re.compile("accum")}


def set_options(values: Mapping[str, int]) -> None:
    """Replace values of options in every ``argparse`` parser of this process, where the options exist and are set."""

    def put(parsed: tuple[Any, Any], parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        for action in parser._actions:
            for name in {action.dest, *action.option_strings} & values.keys():
                if getattr(parsed[0], action.dest, None) is not None:
                    setattr(parsed[0], action.dest, values[name])

    after(argparse.ArgumentParser, "parse_known_args", put)


class SeenOptions:
    """The long options that the script's own parsers have, and what was given for them."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        """Where each puts its value."""
        self.values: dict[str, Any] = {}
        kind: Any = next(each for each in argparse.ArgumentParser.__mro__ if "add_argument" in vars(each))

        def added(made: argparse.Action, _: Any, /, *names: Any, **__: Any) -> None:
            self.names |= {name: made.dest for name in names if isinstance(name, str) and name.startswith("--")}

        after(kind, "add_argument", added)
        after(argparse.ArgumentParser, "parse_known_args", lambda parsed, *_, **__: self.values.update(vars(parsed[0])))

    def flags(self, options: Mapping[str, Sequence[str]], seen: Mapping[str, int | None]) -> dict[str, str]:
        """Return the script's flag for each searchable setting, with dashes or underscores.

        For a setting with a value in ``seen``, it is the only option with this name and this value.
        """
        spelled = {name.replace("_", "-"): name for name in self.names}
        wanted = {what: [name.replace("_", "-") for name in names] for what, names in options.items()}
        found = {what: spelled[name] for what, names in wanted.items() for name in names if name in spelled}
        for what, number in seen.items():
            named = [flag for flag in self.names if _MEANS[what].search(flag) and not _EVALUATION.search(flag)]
            given = [flag for flag in named if self.values.get(self.names[flag]) == number]
            flags = [flag for flag in given if "train" in flag] or given
            if len(flags) == 1:
                found[what] = flags[0]
        return found


@functools.cache
def watch_options() -> SeenOptions:
    """Record the options of every parser in this process from now on."""
    return SeenOptions()


def next_step(source: TrainingSource) -> str:
    """Return advice for a script with its own loop: placeholders or a function, with links to the documentation."""
    within = os.path.relpath(source.file, source.cwd)
    file = source.file if within.startswith(os.pardir) else within
    names = [name for name in watch_options().names if name != "--help" and not _EVALUATION.search(name)]
    # Of a script whose data make the batches, any of them may say their samples.
    flags = [name for name in names if _BATCH.search(name)]
    flags = flags if any("batch" in name for name in flags) else names[:_MOST_NAMED]
    start = ["torchrun" if source.is_ranked else "python", *(("-m", source.module) if source.module else (file,))]
    command = shlex.join([*start, *source.argv, next((name for name in flags if "batch" in name), "OPTION"), "{batch}"])
    named = f"its options are {', '.join(flags)}; " if flags else ""
    return (
        "put {batch} where its command line, a variable or a configuration file says the samples of a forward pass, "
        f"such as -- {command} ({named}see {_PLACEHOLDERS_PAGE}); or make a function of the loop that goes over "
        f"autotune.steps(loader), and give --loop {file}:train (see {_LOOP_PAGE})"
    )
