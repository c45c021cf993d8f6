"""Find what a script calls its settings, in what it has read its command line into and in the files that this names."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from autotune.worker.stack import module_of

# Words in a script that reads its command line, but not by argparse, click or typer.
_READERS = re.compile(r"\b(argv|absl|chz|cyclopts|docopt|fire|plac|sacred|tyro)\b")
# Libraries that call a function of the script with what the command line says, or with what is bound to its arguments.
_CALLERS = ("fire", "tyro", "plac", "cyclopts", "chz")
# Those of them that put the name of the argument before the names within it.
_PREFIXERS = ("tyro", "cyclopts")
_BINDERS = (*_CALLERS, "gin")
_DEEPEST = 3
# What holds numbers that are no settings.
_NO_CONFIGS = (type, FrameType, torch.nn.Module, torch.Tensor, torch.optim.Optimizer, DataLoader, Dataset, Sampler)
# What says that a batch is not that of the training.
OF_EVALUATION = re.compile(r"eval|valid|test|infer|predict|(?<![a-z])(val|dev)(?![a-z])", re.IGNORECASE)


def settings_of(frames: Sequence[FrameType]) -> tuple[Mapping[str, Any], bool]:
    """Return what a script reads from its command line without a parser, and whether a key is joined to its value.

    That is ``--key=value`` into globals, ``key=value`` into a config of OmegaConf, ``key value`` into one of yacs.
    """
    module = sys.modules.get("omegaconf")
    for frame in frames:
        values = list(frame.f_locals.values())
        if module is not None:
            configs = [value for value in values if isinstance(value, module.DictConfig)]
            if configs:
                return dict(_flat(module.OmegaConf.to_container(configs[0]))), True
        configs = [value for value in values if isinstance(value, dict)]
        config = next((each for each in configs if callable(getattr(type(each), "merge_from_list", None))), None)
        if config is not None:
            return dict(_flat(config)), False
        if module_of(frame) == "__main__":
            text = _source_text(frame.f_code.co_filename)
            # nanoGPT's configurator, a file of its own or a copy.
            named = re.search(r"exec\(open\(['\"]([\w./]+)['\"]\)", text)
            configurator = _source_text(named[1]) if named else ""
            if re.search(r"exec\(open\(|globals\(\)\[", text) and "argv" in text + configurator:
                found = {f"--{name}": value for name, value in frame.f_globals.items() if not name.startswith("_")}
                return found, True
    return {}, True


def _source_text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _flat(values: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


@dataclass(frozen=True, slots=True)
class ConfigLine:
    """A line of a configuration file that says a number."""

    place: str
    """``conf.yaml:12``."""
    said: str
    """``batch_size: 16``."""
    number: str


def line_in_config(files: Sequence[str], names: Sequence[str]) -> ConfigLine | None:
    """Return the first line of configuration files that gives a setting with one of these names a number."""
    for name in (name for name in names if len(name) > 1):
        said = re.compile(
            rf"""(?<![\w.-])["']?(?:\w+\.)*{name}["']?\s*(?::\s*int\s*=|[:=])\s*(\d+)(?![\w.])""", re.IGNORECASE
        )
        for file in files:
            lines = [line.partition("#")[0] for line in _source_text(file).splitlines()]
            for number, line in enumerate(lines, 1):
                for found in said.finditer(line):
                    if not OF_EVALUATION.search(_owners([*lines[: number - 1], line[: found.end()]])):
                        return ConfigLine(f"{Path(file).name}:{number}", found[0], found[1])
    return None


def _owners(lines: Sequence[str]) -> str:
    """Return what the end of a text belongs to: its own line from the last bracket on, what is before each open
    bracket, the lines above that are indented less, and the section."""
    *above, line = lines
    is_nested = 1
    while is_nested:
        # Groups that are closed again say nothing of what follows.
        line, is_nested = re.subn(r"[(\[{][^()\[\]{}]*[)\]}]", "", line)
    owners = [part.rpartition(",")[2] for part in re.split(r"[(\[{]", line)]
    indent = len(line) - len(line.lstrip())
    for other in filter(str.strip, reversed(above)):
        own = len(other) - len(other.lstrip())
        if own < indent or re.fullmatch(r"\s*\[[^\[\]]*\]+\s*", other):
            owners.append(other)
            indent = min(indent, own)
        if other.startswith("["):
            break
    return "\n".join(owners)


def variables_read(file: str) -> list[str]:
    """Return the variables of the environment that a script's text reads by their names."""
    return re.findall(r"""\b(?:environ(?:\.get\(|\[)|getenv\()\s*["'](\w+)["']""", _source_text(file))


def likely_settings(frames: Sequence[FrameType], file: str) -> dict[str, Any]:
    """Return numbers that a script's file may have read from its command line, by their names, the outermost first.

    They are in objects that hold plain values alone, and in the arguments of a function that is called by a library for
    command lines. Empty for a script that reads none, as far as its text shows.
    """
    if not _READERS.search(_source_text(file)):
        return {}
    found: dict[str, Any] = {}
    # The outermost frames are those of the trial.
    for frame in itertools.dropwhile(lambda frame: frame.f_code.co_filename != file, reversed(frames)):
        package = _package(frame)
        if package in _BINDERS:
            continue
        values = dict(frame.f_locals)
        configs = []
        if (caller := _package(frame.f_back)) in _CALLERS:
            inner = {key: _config(value) for key, value in values.items()} if caller in _PREFIXERS else {}
            configs = [{key: inner.get(key) or value for key, value in values.items()}]
        if frame.f_code.co_filename == file:
            values = {**frame.f_globals, **values}
        values |= getattr(values.pop("self", None), "__dict__", None) or {}
        configs += [config for value in values.values() if (config := _config(value))]
        for key, number in (pair for config in configs for pair in _flat(config)):
            is_whole = isinstance(number, int) and not isinstance(number, bool)
            if is_whole or (isinstance(number, str) and number.isdecimal()):
                found.setdefault(key, number)
    return found


def sizes_at_hand(frames: Sequence[FrameType]) -> set[int]:
    """Return the first dimensions of the tensors that the functions at work hold: one of them is likely the batch."""
    values = (value for frame in frames for value in frame.f_locals.values())
    return {len(value) for value in values if isinstance(value, torch.Tensor) and value.ndim}


def _package(frame: FrameType | None) -> str:
    return module_of(frame).partition(".")[0] if frame is not None else ""


def _config(value: Any, depth: int = _DEEPEST) -> dict[str, Any] | None:
    """Return an object that holds plain values alone as nested dictionaries; ``None`` for any other."""
    if isinstance(value, _NO_CONFIGS) or not depth:
        return None
    try:
        # Of the class, since an object's own attributes may be looked up among its settings. absl's flags are neither a
        # mapping nor in the attributes.
        read = getattr(type(value), "flag_values_dict", None) or getattr(type(value), "items", None)
        held = dict(read(value)) if callable(read) else getattr(value, "__dict__", None)
    except Exception:
        # Whatever else a script calls so.
        return None
    if held is None or not all(isinstance(key, str) for key in held):
        return None
    config: dict[str, Any] = {}
    for key, each in held.items():
        if each is None or isinstance(each, str | int | float | list | tuple):
            config[key] = each
        elif (inner := _config(each, depth - 1)) is not None:
            config[key] = inner
        else:
            return None
    return config
