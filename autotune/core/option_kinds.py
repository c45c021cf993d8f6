"""Read and check the values of options, by one ``Kind`` for command lines, Python arguments and JSON alike."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal

from autotune.core.ceiling import Headroom, parse_headroom
from autotune.core.errors import InvalidRequestError, did_you_mean
from autotune.core.training_source import locate_function
from autotune.core.units import parse_bytes, parse_number, parse_seconds, parse_share

# The largest integer of an option: no device holds more samples, and the divisors of any up to it are found at once.
_MOST = 2**31 - 1


class UnfitError(ValueError):
    """A value is of a wrong type or range: it is not ``wanted`` (``True or False``, say); ``hint`` is what to give."""

    def __init__(self, value: Any, wanted: str, hint: str) -> None:
        super().__init__(f"{str(value)[:40]!r} is not {wanted}")
        self.value = value
        self.wanted = wanted
        self.hint = hint


@dataclass(frozen=True)
class Kind:
    """How the values of an option are written, checked and recorded."""

    name: str
    """The word for a value in help, such as ``path``."""
    accept: Callable[[Any], Any]
    """Check a Python value and return it as a search request has it.

    Raises ``UnfitError``, ``ValueError`` or ``InvalidRequestError``."""
    parse: Callable[[str], Any] = str
    """Turn text of a command line into a value for ``accept``; unsuitable text is left for ``accept`` to refuse."""
    json: Any = str
    """The type of the value in JSON, as a search records it."""
    least: int | None = None
    """The least number, or length of a list, that can be recorded."""
    choices: tuple[str, ...] = ()

    def read(self, text: str) -> Any:
        """Parse and check text from the command line. Raises ``ValueError`` or ``InvalidRequestError``."""
        return self.accept(self.parse(text))

    def check(self, name: str, value: Any) -> Any:
        """Return ``accept(value)``; raise ``InvalidRequestError`` with the argument's ``name`` for a wrong value."""
        try:
            return self.accept(value)
        except UnfitError as error:
            raise refuse(name, error.value, error.wanted, error.hint) from error
        except ValueError as error:
            raise InvalidRequestError(f"{name}={value!r}: {error}", "see autotune search --help") from error


def refuse(name: str, value: Any, wanted: str, hint: str) -> InvalidRequestError:
    """Return the error that the argument ``name`` has a value which is not ``wanted``. Long values are not shown."""
    is_short = value is None or isinstance(value, str | Real) or (isinstance(value, list | tuple) and not value)
    shown = f"{name}={value!r}" if is_short else f"{name} of type {type(value).__name__}"
    return InvalidRequestError(f"{shown[:100]} is not {wanted}", hint)


def _accepting(
    is_fit: Callable[[Any], bool], wanted: str, hint: str, convert: Callable[[Any], Any] = lambda value: value
) -> Callable[[Any], Any]:
    """Return a ``Kind.accept`` that converts a value where ``is_fit`` holds for it, and else raises ``UnfitError``."""

    def accept(value: Any) -> Any:
        if not is_fit(value):
            raise UnfitError(value, wanted, hint)
        return convert(value)

    return accept


def _is_path(value: Any) -> bool:
    return isinstance(value, str | os.PathLike)


def path(hint: str = "give it as text or as a pathlib.Path") -> Kind:
    """Return the kind for a name or a path. ``hint`` is the advice for other values."""
    return Kind("path", _accepting(_is_path, "a name or a path", hint, os.fsdecode))


def words(known: tuple[str, ...] = ()) -> Kind:
    """Return the kind for a list of words, or text with commas; only ``known`` words are allowed if any are given."""

    def accept(value: Any) -> tuple[str, ...]:
        listed = value.split(",") if isinstance(value, str) else value
        if not isinstance(listed, Collection) or not all(isinstance(word, str) for word in listed):
            raise UnfitError(value, "a list of texts or text with commas", "write it as ['one', 'another']")
        unique = tuple(dict.fromkeys(word.strip() for word in listed if word.strip()))
        if not unique:
            raise UnfitError(value, "a list of one or more", "name one, or leave it out")
        for word in unique:
            if known and word not in known:
                meant = did_you_mean(word, known, most=1, least_ratio=0.5)
                wanted = f"one of {', '.join(map(repr, known))}" + (f"; {meant}" if meant else "")
                raise UnfitError(word, wanted, "choose among them")
        return unique

    word: Any = Literal[known] if known else str
    return Kind("list", accept, json=tuple[word, ...], least=1, choices=known)


def words_or_auto(known: tuple[str, ...]) -> Kind:
    """Return the kind for a list of known words, or ``auto``, which is accepted as ``None``."""
    listed = words(known)

    def accept(value: Any) -> tuple[str, ...] | None:
        is_auto = isinstance(value, str) and value.strip() == "auto"
        return None if is_auto else listed.accept(value)

    return Kind("list|auto", accept, json=listed.json, least=listed.least, choices=known)


def _parse_whole(text: str) -> int | str:
    """Return the text as an integer, or unchanged where it is not an integer."""
    digits = text.strip()
    # int() refuses very long texts with an error of its own.
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= len(str(_MOST)) else text


def whole(least: int) -> Kind:
    """Return the kind for an integer of at least ``least``."""

    def is_fit(value: Any) -> bool:
        # numpy's whole numbers are Integral, too.
        return isinstance(value, Integral) and not isinstance(value, bool) and least <= int(value) <= _MOST

    wanted = f"a whole number from {least} to {_MOST}"
    return Kind("n", _accepting(is_fit, wanted, "give an int of that range", int), _parse_whole, int, least)


def choice(*choices: str) -> Kind:
    """Return the kind for one of several words."""
    wanted = f"one of {', '.join(map(repr, choices))}"
    accept = _accepting(lambda value: isinstance(value, str) and value in choices, wanted, "choose one of them")
    return Kind("choice", accept, json=Literal[choices], choices=choices)


def _quantity(name: str, parse: Callable[[str], Any], json: Any, least: int = 0) -> Kind:
    """Return the kind for a quantity such as a size; numbers in Python are parsed as text of the command line is."""

    def accept(value: Any) -> Any:
        if isinstance(value, Headroom) and parse is parse_headroom:
            return value
        if isinstance(value, bool) or not isinstance(value, str | Real):
            raise UnfitError(value, "a number or text", "see autotune search --help for what it may be")
        return parse(str(value))

    return Kind(name, accept, json=json, least=least)


def _accept_script(value: Any) -> tuple[str, ...]:
    """Return the script's command line as a tuple of words.

    Raises ``UnfitError`` for anything but a list, and ``InvalidRequestError`` for a list with other things than words.
    """
    # Splitting a line of text into words is up to a shell.
    if _is_path(value):
        raise UnfitError(value, "a list of words", f"give script={os.fsdecode(value).split()!r}")
    if not isinstance(value, Collection):
        raise UnfitError(value, "a list of words", "give script=['python', 'train.py', '--do_train']")
    for word in value:
        if not _is_path(word):
            raise InvalidRequestError(f"the word {str(word)[:40]} of script is not text", f"write it as '{word!s:.40}'")
    return tuple(os.fsdecode(word) for word in value)


def _accept_gpus(value: Any) -> str:
    """Return GPUs given as a count, a word or a list, as ``--gpus`` writes them: ``2``, ``all``, ``cuda:0,cuda:1``."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        return str(int(value))
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list | tuple) or not listed:
        raise UnfitError(value, "a number of GPUs or a list of them", "give gpus=2, gpus='all' or gpus=[0, 1]")
    # A number in a list names one GPU, while a number alone is a count.
    named = [f"cuda:{word}" if isinstance(word, int) else str(word) for word in listed]
    return named[0] if isinstance(value, str) else ",".join(named)


def _accept_counts(value: Any) -> tuple[int, ...]:
    """Return one or several counts as a sorted tuple without duplicates."""
    listed = value if isinstance(value, list | tuple) else [value]
    if not listed:
        raise UnfitError(value, "a list of numbers", "write it as [1, 2]")
    return tuple(sorted({COUNT.accept(count) for count in listed}))


def _accept_layers(value: Any) -> str:
    """Return ``auto``, ``off`` or a count of layers, as text."""
    if value in ("auto", "off"):
        return str(value)
    return str(COUNT.accept(_parse_whole(value) if isinstance(value, str) else value))


def _function_or_path(option: str) -> Kind:
    """Return the kind for a function object or its path ``FILE:FUNCTION``."""
    text = path()
    return Kind("path", lambda value: text.accept(value) if _is_path(value) else locate_function(value, option))


TEXT = Kind("text", _accepting(lambda value: isinstance(value, str), "text", "give its name as text"))
PATH = path()
MODEL = path("give its name or its folder; a model made in memory is for a function: trainer='train.py:build'")
DATASET = path("save it, with dataset.save_to_disk('folder') or as a jsonl file, and give that path")
TOKENIZER = path("give its name, or the folder that tokenizer.save_pretrained('folder') wrote")
TRAINER = _function_or_path("trainer")
LOOP = _function_or_path("loop")
SCRIPT = Kind("words", _accept_script)
GPUS = Kind("gpus", _accept_gpus)
FLAG = Kind("flag", _accepting(lambda value: isinstance(value, bool), "True or False", "give one of them"), json=bool)
COUNT = whole(1)
COUNTS = Kind(
    "n,…", _accept_counts, lambda text: [_parse_whole(word) for word in text.split(",") if word.strip()],
    tuple[int, ...], 1,
)  # fmt: skip
LAYERS = Kind("auto|off|n", _accept_layers, str.strip)
SEED = whole(0)
BYTES = _quantity("size", parse_bytes, int, 1)
SECONDS = _quantity("duration", parse_seconds, float)
SHARE = _quantity("share", parse_share, float)
NUMBER = _quantity("number", parse_number, float, 1)
HEADROOM = _quantity("share|size", parse_headroom, Headroom)
WORDS = words()

LEVERS = choice("auto", "off")
"""For ``levers``, of which ``core.arguments.check_arguments`` has made one argument each where they are a dict."""
GIVEN_LEVERS = Kind("words", lambda value: (value,) if isinstance(value, str) else tuple(value))
"""For ``--lever``: one or several texts ``NAME[=VALUE]``."""
