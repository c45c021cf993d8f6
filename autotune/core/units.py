"""Quantities as people write them: bytes and seconds, parsed and formatted.

Everything inside autotune carries its unit in its name (``_bytes: int``, ``_seconds: float``);
this module is the only place where text becomes a quantity or a quantity becomes text.
"""

from __future__ import annotations

import math
import re

KIB = 1024
MIB = 1024**2
GIB = 1024**3
TIB = 1024**4

# IEC 80000-13 prefixes are powers of 1024, SI prefixes powers of 1000. A bare "24G" is read as
# GiB, as nvidia-smi, docker and Slurm do when they speak of memory.
_BYTES_OF_SUFFIX = {
    "": 1,
    "b": 1,
    "k": KIB,
    "ki": KIB,
    "kib": KIB,
    "kb": 1000,
    "m": MIB,
    "mi": MIB,
    "mib": MIB,
    "mb": 1000**2,
    "g": GIB,
    "gi": GIB,
    "gib": GIB,
    "gb": 1000**3,
    "t": TIB,
    "ti": TIB,
    "tib": TIB,
    "tb": 1000**4,
}
_SECONDS_OF_SUFFIX = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)"
# More than any machine has; a larger number is a slip of the pen and would overflow SQLite's integers.
_MOST_BYTES = 2**60
_MOST_SECONDS = 365 * 86400.0


def parse_bytes(text: str) -> int:
    """Bytes written as ``24GiB``, ``24GB``, ``512 MiB`` or ``1048576``.

    Raises ``ValueError`` with a sentence for anything else, zero and absurd sizes among it.
    """
    match = re.fullmatch(_NUMBER + r"\s*([a-zA-Z]*)", text.strip(), flags=re.ASCII)
    scale = _BYTES_OF_SUFFIX.get(match.group(2).lower()) if match else None
    if match is None or scale is None:
        raise ValueError(f"{text!r} is not a size; write it as 24GiB, 512MiB or a number of bytes")
    size = float(match.group(1)) * scale
    if not match.group(2) and 1 <= size < KIB:
        raise ValueError(f"{text!r} is not a size without a unit; write {text.strip()}GiB or {text.strip()}MiB")
    if not 1 <= size <= _MOST_BYTES:
        raise ValueError(f"{text!r} is not a size between 1 byte and 1 EiB")
    return int(size)


def format_bytes(size_bytes: float) -> str:
    """``25769803776`` as ``24.0 GiB``; the unit is chosen so that the number stays readable."""
    sign = "-" if size_bytes < 0 else ""
    size = abs(size_bytes)
    for unit, scale in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        # What would be written as 1024.0 of the next smaller unit is written as 1.0 of this one.
        if size >= scale * (1 - 0.05 / 1024):
            return f"{sign}{size / scale:.1f} {unit}"
    return f"{sign}{size:.0f} B"


def format_spread(spread: float | None) -> str:
    """`` ± 0.8%`` after a figure; nothing where no spread is known."""
    return "" if spread is None else f" ± {spread:.1%}"


def parse_share(text: str) -> float:
    """``0.05`` or ``5%`` as a fraction from 0 to below 1; ``ValueError`` on anything else."""
    number, is_per_cent = (text.strip()[:-1], True) if text.strip().endswith("%") else (text, False)
    try:
        share = float(number) / (100 if is_per_cent else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise ValueError(f"{text!r} is not a number from 0 to below 1, nor a percentage")
    return share


def parse_seconds(text: str) -> float:
    """Seconds written as ``90``, ``90s``, ``10m``, ``1h30m`` or ``500ms``; ``ValueError`` otherwise."""
    parts = re.findall(_NUMBER + r"\s*([a-zA-Z]*)\s*", text.strip(), flags=re.ASCII)
    whole = re.fullmatch(rf"(?:{_NUMBER}\s*[a-zA-Z]*\s*)+", text.strip(), flags=re.ASCII)
    if not whole or any(suffix.lower() not in _SECONDS_OF_SUFFIX for _, suffix in parts):
        raise ValueError(f"{text!r} is not a duration; write it as 90s, 10m or 1h30m")
    if len(parts) > 1 and any(not suffix for _, suffix in parts):
        raise ValueError(f"{text!r} is not a duration; each part needs a unit, as in 1h30m")
    seconds = sum(float(number) * _SECONDS_OF_SUFFIX[suffix.lower()] for number, suffix in parts)
    if not 0 < seconds <= _MOST_SECONDS:
        raise ValueError(f"{text!r} is not a duration between 0 and one year")
    return seconds


def format_seconds(seconds: float) -> str:
    """``0.21`` as ``210 ms``, ``75`` as ``1m15s``, ``12.34`` as ``12.3 s``."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"


def in_one_line(text: str) -> str:
    """Text without what ends a line, moves a cursor or colours a terminal, whatever a file or a device is called."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def plural(count: int, word: str) -> str:
    """``1 trial``, ``2 trials``."""
    return f"{count} {word}{'' if count == 1 else 's'}"


def format_count(count: float) -> str:
    """``335143938`` as ``335.1M``; small numbers are left as they are."""
    for unit, scale in (("B", 1e9), ("M", 1e6)):
        if count >= scale * (1 - 0.05 / 1000):
            return f"{count / scale:.1f}{unit}"
    return f"{count / 1e3:.1f}k" if count >= 1e4 else f"{count:.0f}"


def format_rate(per_second: float) -> str:
    """A number of samples or tokens a second to about three digits: ``0.53``, ``310.7``, ``159,060``."""
    if per_second < 9.995:
        return f"{per_second:.2f}"
    return f"{per_second:.1f}" if per_second < 999.95 else f"{per_second:,.0f}"
