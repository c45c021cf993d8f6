"""Check the options of a command that come as Python values or JSON, and write them as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.core.ceiling import Headroom
from autotune.core.errors import InvalidRequestError, did_you_mean
from autotune.core.options import BY_NAME, names_of_levers, values_of


def json_value(value: Any) -> Any:
    """Return an option's value as JSON-ready data, which ``check_arguments`` accepts."""
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, Headroom):
        return f"{value.size_bytes}B" if value.size_bytes is not None else str(value.fraction)
    return value


def check_arguments(given: Mapping[str, Any], *required: str) -> dict[str, Any]:
    """Check options that are given as Python values; return the values that the command line would yield.

    Texts are parsed, lists become tuples, and a dictionary of ``levers`` becomes an option for each lever. ``None``
    stays where it is the default of an option that is not ``required``. Raises ``InvalidRequestError``.
    """
    if isinstance(levers := given.get("levers"), Mapping):
        given = {name: value for name, value in given.items() if name != "levers"}
        given = {**given, **checked_levers(given, levers)}
    checked = {}
    for name, value in given.items():
        option = BY_NAME[name]
        is_left_out = value is None and option.default is None and name not in required
        checked[name] = None if is_left_out else option.kind.check(name, value)
    return checked


def checked_levers(given: Mapping[str, Any], levers: Mapping[str, Any], command: str = "search") -> dict[str, Any]:
    """Check a dictionary of ``levers`` and return it; ``True`` and ``False`` become ``on`` and ``off``.

    Raises ``InvalidRequestError`` for an unknown lever of the ``command``, for an impossible value, and where ``given``
    has another value for the lever's own option.
    """
    known, checked = names_of_levers(command), {}
    for written, value in levers.items():
        name = str(written).replace("-", "_")
        if name not in known:
            meant = did_you_mean(name, known, most=1, least_ratio=0.5)
            raise InvalidRequestError(
                f"there is no lever {str(written)[:40]!r}", meant or f"there are {', '.join(known)}"
            )
        option, word = BY_NAME[name], value
        if isinstance(value, bool):
            word = "on" if value else "off"
        try:
            checked[name] = option.kind.read(word) if isinstance(word, str) else option.kind.accept(word)
        except (ValueError, InvalidRequestError) as error:
            raise InvalidRequestError(
                f"{option.said(str(word)[:40])}: {name} has no such value", f"give one of {values_of(option)}"
            ) from error
        if given.get(name) not in (None, checked[name]):
            raise InvalidRequestError(
                f"{option.said(checked[name])} and {option.own_flag} {given[name]} say different things",
                "give one of the two",
            )
    return checked
