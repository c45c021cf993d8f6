"""What the function ``search`` is given, checked and made into what the command line hands on.

A value of another type is refused here, by the argument's name; so is what the command line would not let through.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from numbers import Integral, Real
from typing import Any, get_args

from autotune.core.errors import InvalidRequestError
from autotune.core.training_source import locate_function
from autotune.core.units import parse_bytes, parse_seconds, parse_share
from autotune.core.workload import DTypeName, PeftName, QuantizeName, Task
from autotune.devices import Headroom, parse_headroom
from autotune.space.features import LEVERS, LeverChoice
from autotune.space.space import CheckpointingChoice
from autotune.tuning.policy import Objective, SamplerName

# More than any device holds, as on the command line.
_MOST = 2**31 - 1

_NO_PATH = {
    "model": "give its name or its folder; a model made in memory is for a function: trainer='train.py:build'",
    "dataset": "save it, with dataset.save_to_disk('folder') or as a jsonl file, and give that path",
    "tokenizer": "give its name, or the folder that tokenizer.save_pretrained('folder') wrote",
}


def as_options(named: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name as the command line has them: text parsed, paths as text, lists as tuples.

    ``None`` stays where it is the default. Raises ``InvalidRequestError`` for what is no value of its argument.
    """
    return {
        name: None if value is None and defaults.get(name, ...) is None else _CHECKS[name](name, value)
        for name, value in named.items()
    }


def refuse(name: str, value: Any, wanted: str, hint: str) -> InvalidRequestError:
    """The error of a value that is not what is wanted; large ones are told by their type."""
    is_short = value is None or isinstance(value, str | Real) or (isinstance(value, list | tuple) and not value)
    told = f"{name}={value!r}" if is_short else f"{name} of type {type(value).__name__}"
    return InvalidRequestError(f"{told[:100]} is not {wanted}", hint)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise refuse(name, value, "text", "give its name as text")
    return value


def _path(name: str, value: Any) -> str:
    if not isinstance(value, str | os.PathLike):
        raise refuse(name, value, "a name or a path", _NO_PATH.get(name, "give it as text or as a pathlib.Path"))
    return os.fsdecode(value)


def _trainer(name: str, value: Any) -> str:
    return _path(name, value) if isinstance(value, str | os.PathLike) else locate_function(value)


def _script(name: str, value: Any) -> tuple[str, ...]:
    # How a line of text falls into words is a shell's to say.
    if isinstance(value, str | os.PathLike):
        raise refuse(name, value, "a list of words", f"give script={os.fsdecode(value).split()!r}")
    if not isinstance(value, Collection):
        raise refuse(name, value, "a list of words", "give script=['python', 'train.py', '--do_train']")
    for word in value:
        if not isinstance(word, str | os.PathLike):
            raise InvalidRequestError(
                f"the word {str(word)[:40]} of {name} is not text", f"write it as {str(word)[:40]!r}"
            )
    return tuple(os.fsdecode(word) for word in value)


def _words(name: str, value: Any) -> tuple[str, ...]:
    words = value.split(",") if isinstance(value, str) else value
    if not isinstance(words, Collection) or not all(isinstance(word, str) for word in words):
        raise refuse(name, value, "a list of texts or text with commas", "write it as ['one', 'another']")
    found = tuple(dict.fromkeys(word.strip() for word in words if word.strip()))
    if not found:
        raise refuse(name, value, "a list of one or more", f"name one, or leave {name} out")
    return found


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise refuse(name, value, "True or False", "give one of them")
    return value


def _whole(least: int) -> Callable[[str, Any], int]:
    def check(name: str, value: Any) -> int:
        # numpy's whole numbers are such, too.
        is_whole = isinstance(value, Integral) and not isinstance(value, bool)
        if not is_whole or not least <= value <= _MOST:
            raise refuse(name, value, f"a whole number from {least} to {_MOST}", "give an int of that range")
        return int(value)

    return check


def _one_of(kind: Any) -> Callable[[str, Any], str]:
    choices: tuple[str, ...] = get_args(kind)

    def check(name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in choices:
            raise refuse(name, value, f"one of {', '.join(map(repr, choices))}", "choose one of them")
        return value

    return check


def _quantity(parse: Callable[[str], Any]) -> Callable[[str, Any], Any]:
    """A number or a text; both are read as the command line reads what is written there."""

    def check(name: str, value: Any) -> Any:
        if isinstance(value, Headroom) and parse is parse_headroom:
            return value
        if isinstance(value, bool) or not isinstance(value, str | Real):
            raise refuse(name, value, "a number or text", "see autotune search --help for what it may be")
        try:
            return parse(str(value))
        except ValueError as error:
            raise InvalidRequestError(f"{name}={value!r}: {error}", "see autotune search --help") from error

    return check


_COUNT = _whole(1)
_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(("model", "dataset", "tokenizer", "storage"), _path),
    **dict.fromkeys(("split", "label_column", "image_column", "device", "study"), _text),
    **dict.fromkeys(("text_column", "precision", "attn", "optim"), _words),
    **dict.fromkeys(("effective_batch", "seq_len", "world_size", "batch_multiple", "trials", "lora_rank"), _COUNT),
    **dict.fromkeys(("pad_to_multiple_of", "steps"), _COUNT),
    **dict.fromkeys(("pretrained", "pad_to_max_length", "group_by_length", "baseline"), _flag),
    **dict.fromkeys(("fresh", "verify", "wait"), _flag),
    **dict.fromkeys(LEVERS, _one_of(LeverChoice)),
    **dict.fromkeys(("time_budget", "trial_timeout"), _quantity(parse_seconds)),
    **dict.fromkeys(("padding", "tolerance"), _quantity(parse_share)),
    "memory_limit": _quantity(parse_bytes),
    "headroom": _quantity(parse_headroom),
    "seed": _whole(0),
    "task": _one_of(Task),
    "dtype": _one_of(DTypeName),
    "gradient_checkpointing": _one_of(CheckpointingChoice),
    "objective": _one_of(Objective),
    "peft": _one_of(PeftName),
    "quantize": _one_of(QuantizeName),
    "sampler": _one_of(SamplerName),
    "trainer": _trainer,
    "script": _script,
}
