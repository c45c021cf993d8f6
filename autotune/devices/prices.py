"""List prices of GPUs by the hour: examples for comparing, or the user's own."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.core.errors import InvalidRequestError, did_you_mean
from autotune.devices.gpus import ROWS, read_table

EXAMPLES_FROM = "RunPod on demand, as listed by deploybase.ai on 10 March 2026"
EXAMPLES: Mapping[str, float] = {name: float(usd) for name, row in ROWS.items() if (usd := row["dollars_per_hour"])}
"""US dollars an hour and GPU."""
_HINT = "write it as h100=2.95, the price of one GPU for an hour, or as EUR: h100=2.70EUR"
_FILE_HINT = 'write e.g. {"h100": 2.95, "l4": 0.7}'
_DEFAULT_UNIT = "USD"
_MOST = 1e6


@dataclass(frozen=True)
class Prices:
    """What GPUs cost an hour, all in one unit."""

    of: Mapping[str, float]
    unit: str
    source: str


def read_prices(given: Sequence[str], path: str | None, names: Mapping[str, str]) -> Prices:
    """Return the user's prices, or the built-in examples where there are none.

    ``names`` has the GPU of the catalog for every name that may be given. The file is JSON: names to numbers, or to
    texts with a unit. Raises ``InvalidRequestError`` for what is no price.
    """
    if not given and path is None:
        return Prices(EXAMPLES, _DEFAULT_UNIT, f"examples: {EXAMPLES_FROM}")
    stated: dict[str, tuple[float, str | None]] = {}
    in_file = {} if path is None else read_table(f"--prices {path}", path, _FILE_HINT)
    pairs = [(text, text.partition("=")) for text in given]
    for text, (name, sign, _) in pairs:
        if not sign or not name.strip():
            raise InvalidRequestError(f"--price {text!r} {'names no GPU' if sign else 'has no ='}", _HINT)
    for name, value in [*in_file.items(), *((name.strip(), value.strip()) for _, (name, _, value) in pairs)]:
        chip = names.get(name.lower())
        if chip is None:
            hint = " ".join(filter(None, [did_you_mean(name.lower(), names), _HINT]))
            raise InvalidRequestError(f"a price is given for {name!r}, which is not a known GPU", hint)
        stated[chip] = _amount(name, value)
    return Prices({name: amount for name, (amount, _) in stated.items()}, _unit_of(stated), "as given")


def _unit_of(stated: Mapping[str, tuple[float, str | None]]) -> str:
    """Return the common unit of all prices. Raises ``InvalidRequestError`` for different or missing units."""
    units = sorted({unit for _, unit in stated.values() if unit is not None})
    if len(units) > 1:
        raise InvalidRequestError(f"prices are in {' and in '.join(units)}", "give all in one unit")
    without = next((name for name, (_, unit) in stated.items() if unit is None), None)
    if units and without is not None:
        raise InvalidRequestError(
            f"the price of {without} has no unit, and others are in {units[0]}", "give all in one unit, or none a unit"
        )
    return units[0] if units else _DEFAULT_UNIT


def _amount(name: str, value: Any) -> tuple[float, str | None]:
    """Return a price and its unit, or ``None`` as its unit."""
    text = str(value).strip()
    digits = text.rstrip(string.ascii_letters)
    unit = text[len(digits) :].upper() or None
    try:
        amount = float(digits)
    except ValueError as error:
        raise InvalidRequestError(f"the price of {name} is {text!r}, no number", _HINT) from error
    if not 0 < amount < _MOST:
        raise InvalidRequestError(f"the price of {name} is {text!r}, not above 0 and below {_MOST:,.0f}", _HINT)
    return amount, unit
