"""Read the list of scripts, Trainers and loops that an operator lets others search by name.

The list is a TOML or JSON file on the machine that runs the code. A request carries the name alone: nothing else of
what is run can come over HTTP.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.core.errors import AutotuneError, InvalidRequestError, did_you_mean
from autotune.core.training_source import find_loop, find_script, find_trainer
from autotune.engine.work import Code, CodeKind

_KINDS: tuple[CodeKind, ...] = ("trainer", "loop", "script")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


Listed = Mapping[str, Code]


def read_listed_code(path: Path) -> dict[str, Code]:
    """Return the code that a file lists, by name. Raises ``InvalidRequestError`` for a malformed file."""
    try:
        text = path.read_text(encoding="utf-8")
        document = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise InvalidRequestError(f"--allow {path}: {error.strerror or error}", "name a file that is there") from error
    except ValueError as error:
        raise InvalidRequestError(f"--allow {path}: {error}", "write it as TOML, or as JSON in a .json file") from error
    if not isinstance(document, dict):
        raise InvalidRequestError(f"--allow {path} holds no table of names", _EXAMPLE)
    return {name: _entry(path, name, entry) for name, entry in document.items()}


_EXAMPLE = 'write it as [my-name] and script = ["python", "train.py"], trainer = "train.py:build" or loop = "train.py"'


def _entry(path: Path, name: str, entry: Any) -> Code:
    where = f"--allow {path}: {name[:64]!r}"
    if not _NAME.fullmatch(name):
        raise InvalidRequestError(f"{where} is not a valid name", "use letters, digits, dashes, dots and underscores")
    if not isinstance(entry, dict):
        raise InvalidRequestError(f"{where} is not a table", _EXAMPLE)
    unknown = sorted(set(entry) - {*_KINDS, "folder"})
    if unknown:
        raise InvalidRequestError(f"{where} has {unknown[0]!r}", "it may have script, trainer or loop, and folder")
    kinds = [kind for kind in _KINDS if kind in entry]
    if len(kinds) != 1:
        raise InvalidRequestError(f"{where} names {len(kinds)} trainings, not one", _EXAMPLE)
    folder = (path.parent / str(entry.get("folder", "."))).resolve()
    if not folder.is_dir():
        raise InvalidRequestError(f"{where}: there is no folder {folder}", "correct it in the file")
    code = Code(kinds[0], _value(where, kinds[0], entry[kinds[0]], folder), str(folder))
    try:
        if isinstance(code.value, tuple):
            find_script(code.value)
        else:
            (find_loop if code.kind == "loop" else find_trainer)(code.value)
    except AutotuneError as error:
        raise InvalidRequestError(f"{where}: {error.message}", error.hint) from error
    return code


def _value(where: str, kind: CodeKind, value: Any, folder: Path) -> str | tuple[str, ...]:
    """Return a value of the file with its paths made absolute."""
    if kind != "script":
        if not isinstance(value, str):
            raise InvalidRequestError(f"{where}: {kind} is not text", _EXAMPLE)
        return str(folder / value)
    if not isinstance(value, list) or not value or not all(isinstance(word, str) for word in value):
        raise InvalidRequestError(f"{where}: script is not a list of words", _EXAMPLE)
    words = list(value)
    # The first word that is a file is the script; those after it are its own.
    place = next((n for n, word in enumerate(words) if word.endswith(".py") and (folder / word).is_file()), None)
    if place is not None:
        words[place] = str(folder / words[place])
    return tuple(words)


def listed(name: str, codes: Listed) -> Code:
    """Return the listed code of this name. Raises ``InvalidRequestError`` for an unknown name."""
    found = codes.get(name)
    if found is None:
        known = f"it lists {', '.join(sorted(codes)[:10])}" if codes else "its operator lists some with --allow FILE"
        raise InvalidRequestError(f"no code named {name[:64]!r} is listed here", did_you_mean(name, codes) or known)
    return found
