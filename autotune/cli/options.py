"""Option types, and options that several commands share."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from autotune.core.errors import InvalidRequestError
from autotune.core.units import parse_bytes, parse_seconds, parse_share

if TYPE_CHECKING:
    _AnyType = click.ParamType[Any]
else:
    # Before click 8.4 the class takes no type in brackets.
    _AnyType = click.ParamType

# No device holds more samples, and every number up to it has its divisors found at once.
_MOST = 2**31 - 1


class _Parsed(_AnyType):
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


def words(known: tuple[str, ...] | None = None) -> _AnyType:
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


def _whole(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        digits = text.strip()
        # Never handed to int() when it is long: that has a limit of its own.
        is_short = digits.isascii() and digits.isdigit() and len(digits) <= len(str(_MOST))
        if not is_short or not least <= int(digits) <= _MOST:
            raise ValueError(f"{text[:40]!r} is not a whole number from {least} to {_MOST}")
        return int(digits)

    return parse


def _headroom(text: str) -> Any:
    from autotune.devices import parse_headroom

    return parse_headroom(text)


BYTES = _Parsed("size", parse_bytes)
SECONDS = _Parsed("duration", parse_seconds)
COUNT = _Parsed("n", _whole(1))
SEED = _Parsed("n", _whole(0))
SHARE = _Parsed("share", parse_share)
HEADROOM = _Parsed("share|size", _headroom)

storage_option = click.option(
    "--storage",
    metavar="FILE|URL",
    envvar="AUTOTUNE_STORAGE",
    default="studies/autotune.db",
    show_default=True,
    help="SQLite file (or SQLAlchemy URL) that holds the studies; also AUTOTUNE_STORAGE.",
)
wait_option = click.option("--wait", is_flag=True, help="Wait while another search holds the device or the study.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")


class SectionedCommand(click.Command):
    """A command with so many options that its help shows them under headings."""

    sections: dict[str, tuple[str, ...]]
    """Heading to parameter names; every option stands under one, --help under the last."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        left = {str(param.name): param.get_help_record(ctx) for param in self.get_params(ctx)}
        for heading, names in self.sections.items():
            records = [left.pop(name) for name in names]
            if heading == list(self.sections)[-1]:
                records += left.values()
            with formatter.section(heading):
                formatter.write_dl([record for record in records if record], col_max=28)


def print_json(document: Any) -> None:
    """One document on stdout."""
    click.echo(json.dumps(document, indent=2))
