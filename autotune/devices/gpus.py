"""Look up the figures of GPUs by name (rates, memory, prices), to predict for a GPU that is not in this machine.

The table is ``gpus.csv``; a user's file is read as it is. Memory is what ``nvidia-smi`` lists as the total of the
common variant. Multiprocessors, threads and capability are from NVIDIA's architecture whitepapers and the CUDA
programming guide's table of compute capabilities. Rates are from the data sheet or whitepaper that is named with each
chip: dense, without sparsity, and for 16-bit products with sums in float32, as torch computes them. GeForce cards have
half the rate of other sums for those.
"""

from __future__ import annotations

import csv
import json
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from autotune.core.device import PCIE_3, PCIE_4, PCIE_5, Link, Rates
from autotune.core.device import Chip as Chip
from autotune.core.errors import InvalidRequestError, did_you_mean
from autotune.core.units import MIB, parse_bytes

TYPICAL_CONTEXT_BYTES = 767 * MIB
"""Memory of the CUDA context while a model trains: 751 to 771 MiB in 54 trials on an H200 (torch 2.11, driver 580);
this is the median in bf16. Other GPUs differ somewhat."""

MOST_CONTEXT_BYTES = 2 * TYPICAL_CONTEXT_BYTES
"""More than the CUDA context of one process takes. What lies above it where only the use of the whole GPU can be read
is another process's: a desktop's or a neighbour's. A choice."""


def _chip(name: str, figures: Mapping[str, Any], source: str) -> Chip:
    """Return the chip of data-sheet figures from ``source``; without rates where the 16-bit rate is missing."""
    major, _, minor = str(figures["capability"]).partition(".")
    multiprocessors = int(figures["multiprocessors"])
    # All but data centre GPUs have 1,536.
    threads = int(figures.get("threads_per_multiprocessor") or 1536)
    rates = None
    if figures["half_tflops"]:
        nvlink, tf32 = figures.get("nvlink_gigabytes_per_second"), figures.get("tf32_tflops")
        rates = Rates(
            float(figures["half_tflops"]) * 1e12,
            float(tf32) * 1e12 if tf32 else None,
            float(figures["fp32_tflops"]) * 1e12,
            float(figures["gigabytes_per_second"]) * 1e9,
            multiprocessors,
            int(float(figures["watts"])),
            source,
            # Data sheets give both directions of NVLink together.
            Link("NVLink", float(nvlink) / 2 * 1e9) if nvlink else _PCIE[figures.get("pcie", "4")],
        )
    memory_bytes = parse_bytes(str(figures["memory"])) // MIB * MIB
    return Chip((int(major), int(minor or 0)), multiprocessors, threads, name, memory_bytes, rates)


_PCIE: dict[str, Link | None] = {"": None, "3": PCIE_3, "4": PCIE_4, "5": PCIE_5}
with Path(__file__).with_name("gpus.csv").open(encoding="utf-8", newline="") as _file:
    ROWS: Mapping[str, Mapping[str, str]] = {row["name"]: row for row in csv.DictReader(_file)}
"""The table, by the names of the GPUs. The a10g was made for one cloud, without a public data sheet."""

CHIPS: dict[str, Chip] = {name: _chip(name, row, row["source"]) for name, row in ROWS.items()}

# Where the figures of each chip were read and compared on 22 November 2026: public copies of NVIDIA's documents, or
# tables that name them. Rates with sparsity were halved. Not found: the rates of the H100 NVL (its memory and power
# were), and of the RTX 4070, 5070 Ti and 5080; the PCIe generation follows from the architecture.
CHECKED_AGAINST: Mapping[str, str] = {name: where for name, row in ROWS.items() if (where := row["checked_against"])}

ALIASES = {alias: name for name, row in ROWS.items() for alias in row["alias"].split()}
"""Other names of chips of the catalog: where a chip comes in several sizes, the common one."""
_NAMES_OF_DEVICES = {row["device"]: name for name, row in ROWS.items() if row["device"]}


def find_chip(name: str, chips: Mapping[str, Chip]) -> Chip:
    """Return the chip with a name or alias, whatever its spelling. Raises ``InvalidRequestError`` for an unknown name.

    ``RTX 4090``, ``rtx4090`` and ``NVIDIA GeForce RTX 4090`` are all ``rtx-4090``.
    """
    key = name.lower()
    names = {_normalized(known): ALIASES.get(known, known) for known in (*ALIASES, *chips)}
    chip = chips.get(key) or chips.get(names.get(_normalized(key), key))
    if chip is None:
        hints = [did_you_mean(key, chips), f"known are {', '.join(chips)}; or describe it in a file for --gpu-spec"]
        raise InvalidRequestError(f"--gpu {name!r} is not known", " ".join(filter(None, hints)))
    return chip


def _normalized(name: str) -> str:
    """Return a GPU name in lower case without vendor, spaces and dashes, for comparison."""
    words = re.split(r"[\s_-]+", name.lower())
    return "".join(word for word in words if word not in ("nvidia", "geforce"))


def chip_of_device(name: str) -> Chip | None:
    """Return the chip for a GPU's name as the driver gives it; ``None`` where the table lacks it."""
    key = _NAMES_OF_DEVICES.get(name.lower())
    return CHIPS[key] if key is not None else None


_SPEC_EXAMPLE = (
    'write e.g. {"my-gpu": {"memory": "24GiB", "capability": "8.9", "multiprocessors": 128, "half_tflops": 165, '
    '"tf32_tflops": 83, "fp32_tflops": 83, "gigabytes_per_second": 1008, "watts": 450}}'
)
_NEEDED_NUMBERS = ("multiprocessors", "half_tflops", "fp32_tflops", "gigabytes_per_second", "watts")
_NUMBERS = (*_NEEDED_NUMBERS, "threads_per_multiprocessor", "tf32_tflops", "nvlink_gigabytes_per_second")
_SPEC_NEEDED = ("memory", "capability", *_NEEDED_NUMBERS)
_SPEC_FIELDS = frozenset({*_SPEC_NEEDED, *_NUMBERS})


def read_chips(path: str) -> dict[str, Chip]:
    """Read the user's GPUs from a JSON file, by name. Raises ``InvalidRequestError`` for missing or wrong values."""
    document = read_table(f"--gpu-spec {path}", path, _SPEC_EXAMPLE)
    return {name.lower(): _read_chip(path, name, figures) for name, figures in document.items()}


def read_table(where: str, path: str, hint: str) -> dict[str, Any]:
    """Read a JSON file with an entry for each GPU. Raises ``InvalidRequestError`` (``where``, ``hint``) for others."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidRequestError(f"{where}: {error.strerror}", hint) from error
    except ValueError as error:
        raise InvalidRequestError(f"{where} is not JSON: {error}", hint) from error
    if not isinstance(document, dict) or not document:
        raise InvalidRequestError(f"{where} names no GPU", hint)
    return document


def _read_chip(path: str, name: str, figures: Any) -> Chip:
    """Return the chip that an entry of the JSON file describes. Raises ``InvalidRequestError`` for a wrong entry."""
    where = f"--gpu-spec {path}: {name}"
    if not isinstance(figures, dict):
        raise InvalidRequestError(f"{where} has no figures", _SPEC_EXAMPLE)
    unknown = sorted(set(figures) - _SPEC_FIELDS)
    if unknown:
        names = ", ".join(sorted(_SPEC_FIELDS))
        raise InvalidRequestError(f"{where}: {unknown[0]!r} is not known", f"known are {names}")
    missing = [field for field in _SPEC_NEEDED if figures.get(field) is None]
    if missing:
        raise InvalidRequestError(f"{where} has no {', no '.join(missing)}", _SPEC_EXAMPLE)
    numbers = {name: figures[name] for name in _NUMBERS if figures.get(name) is not None}
    for field, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < 1e9:
            raise InvalidRequestError(f"{where}: {field} is {value!r}, not a number above 0", _SPEC_EXAMPLE)
    try:
        parse_bytes(str(figures["memory"]))
    except (ValueError, InvalidRequestError) as error:
        raise InvalidRequestError(f"{where}: memory: {error}", _SPEC_EXAMPLE) from error
    try:
        return _chip(name.lower(), figures, f"as given in {path}")
    except ValueError as error:
        problem = f"{where}: capability is {figures['capability']!r}, not a compute capability"
        raise InvalidRequestError(problem, _SPEC_EXAMPLE) from error


EXAMPLES_FROM = "RunPod on demand, as listed by deploybase.ai on 10 March 2026"
EXAMPLES: Mapping[str, float] = {name: float(usd) for name, row in ROWS.items() if (usd := row["dollars_per_hour"])}
"""Example prices by the names of GPUs: US dollars for one GPU and hour."""
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
    """Return the user's prices of GPUs, from ``--price h100=2.95`` and a JSON file, or else the built-in examples.

    ``names`` maps each name that a user may give to that of the chip. The file maps such names to numbers, or to texts
    with a unit. Raises ``InvalidRequestError`` for an unknown GPU, or what is no price.
    """
    if not given and path is None:
        return Prices(EXAMPLES, _DEFAULT_UNIT, f"examples: {EXAMPLES_FROM}")
    stated: dict[str, tuple[float, str | None]] = {}
    in_file = {} if path is None else read_table(f"--prices {path}", path, _FILE_HINT)
    prices = list(in_file.items())
    for text in given:
        name, sign, price = text.partition("=")
        if not sign or not name.strip():
            raise InvalidRequestError(f"--price {text!r} {'names no GPU' if sign else 'has no ='}", _HINT)
        prices.append((name.strip(), price.strip()))
    for name, value in prices:
        chip = names.get(name.lower())
        if chip is None:
            hint = " ".join(filter(None, [did_you_mean(name.lower(), names), _HINT]))
            raise InvalidRequestError(f"a price is given for {name!r}, which is not a known GPU", hint)
        stated[chip] = _amount(name, value)
    return Prices({name: amount for name, (amount, _) in stated.items()}, _unit_of(stated), "as given")


def _unit_of(stated: Mapping[str, tuple[float, str | None]]) -> str:
    """Return the common unit of the stated prices. Raises ``InvalidRequestError`` where they differ in their units."""
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
    """Parse a price such as ``2.70EUR`` to number and unit, ``None`` without one. Raises ``InvalidRequestError``."""
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
