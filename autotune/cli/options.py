"""Option types and options that several commands share."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import click

from autotune.errors import InvalidRequestError
from autotune.units import parse_bytes, parse_seconds

Function = TypeVar("Function", bound=Callable[..., Any])


class _Parsed(click.ParamType[Any]):
    """A type made of a function that raises ``ValueError`` or ``InvalidRequestError`` with a sentence."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except InvalidRequestError as error:
            self.fail(f"{error.message}; {error.hint}", param, ctx)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def words(known: tuple[str, ...] | None = None) -> click.ParamType[Any]:
    """A comma-separated list, each word one of ``known`` (or any)."""

    def parse(text: str) -> tuple[str, ...]:
        found = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
        if not found:
            raise ValueError("the list is empty")
        for word in found:
            if known and word not in known:
                raise ValueError(f"{word!r} is not one of {', '.join(known)}")
        return found

    return _Parsed("list", parse)


def _headroom(text: str) -> Any:
    from autotune.device import parse_headroom

    return parse_headroom(text)


BYTES = _Parsed("size", parse_bytes)
SECONDS = _Parsed("duration", parse_seconds)
HEADROOM = _Parsed("headroom", _headroom)

storage_option = click.option(
    "--storage",
    metavar="FILE|URL",
    envvar="AUTOTUNE_STORAGE",
    default="studies/autotune.db",
    show_default=True,
    help="SQLite file (or SQLAlchemy URL) that holds the studies; also AUTOTUNE_STORAGE.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")


def print_json(document: Any) -> None:
    """One document on stdout."""
    click.echo(json.dumps(document, indent=2))
