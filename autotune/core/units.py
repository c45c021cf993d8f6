"""Parse and format quantities: bytes, seconds, shares, counts and rates.

Inside autotune a quantity carries its unit in its name (``_bytes: int``, ``_seconds: float``). Only this module turns
text into quantities and back.
"""

from __future__ import annotations

import math
import re

KIB = 1024
MIB = 1024**2
GIB = 1024**3
TIB = 1024**4

# IEC 80000-13 prefixes are powers of 1024, SI prefixes powers of 1000. A bare "24G" is read as GiB, as nvidia-smi,
# docker and Slurm do for memory.
_BYTES_OF_SUFFIX = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _BYTES_OF_SUFFIX |= dict.fromkeys((_letter, f"{_letter}i", f"{_letter}ib"), 1024**_power)
    _BYTES_OF_SUFFIX[f"{_letter}b"] = 1000**_power
_SECONDS_OF_SUFFIX = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)"
# More than any machine has. A larger number is a typing error, and would overflow SQLite's integers.
_MOST_BYTES = 2**60
_MOST_SECONDS = 365 * 86400.0


def parse_number(text: str) -> float:
    """Parse a number of at least 1, written as ``1000000`` or ``1e6``. Raises ``ValueError`` for anything else."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 1 <= number <= 1e15:
        raise ValueError(f"{text[:40]!r} is not a number from 1 to 1e15; write it as 1000000 or 1e6")
    return number


def parse_bytes(text: str) -> int:
    """Parse bytes written as ``24GiB``, ``24GB``, ``512 MiB`` or ``1048576``.

    Raises ``ValueError`` with a sentence for anything else, including zero and more than 1 EiB.
    """
    match = re.fullmatch(_NUMBER + r"\s*([a-zA-Z]*)", text.strip(), flags=re.ASCII)
    scale = _BYTES_OF_SUFFIX.get(match.group(2).lower()) if match else None
    if match is None or scale is None:
        raise ValueError(f"{text!r} is not a size; write it as 24GiB, 512MiB or a number of bytes")
    size = float(match.group(1)) * scale
    if not match.group(2) and 1 <= size < KIB:
        raise ValueError(f"{text!r} is not a size: the unit is missing; write {text.strip()}GiB or {text.strip()}MiB")
    if not 1 <= size <= _MOST_BYTES:
        raise ValueError(f"{text!r} is not a size between 1 byte and 1 EiB")
    return int(size)


def format_bytes(size_bytes: float) -> str:
    """Format ``25769803776`` as ``24.0 GiB``, in the largest unit that gives a number of at least 1."""
    sign = "-" if size_bytes < 0 else ""
    size = abs(size_bytes)
    for unit, scale in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        # 1023.96 MiB would round to "1024.0 MiB", so it is written as "1.0 GiB".
        if size >= scale * (1 - 0.05 / 1024):
            return f"{sign}{size / scale:.1f} {unit}"
    return f"{sign}{size:.0f} B"


def format_spread(spread: float | None) -> str:
    """Format a relative spread as `` ± 0.8%``, to be put after a number; an empty text where it is unknown."""
    return "" if spread is None else f" ± {spread:.1%}"


# Above this ratio of an interval's two sides, ± would be wrong for one of its ends. A choice: an interval of ± 11 % in
# seconds has such sides as a speed.
_LOPSIDED = 1.25


def is_lopsided(mean: float, low: float, high: float) -> bool:
    """Return whether an interval is too asymmetric to be written with ±."""
    shorter, longer = sorted((high - mean, mean - low))
    return longer > _LOPSIDED * shorter


def format_deviation(half_width: float) -> str:
    """Format the half-width of an interval of natural logarithms: ``12%``, or ``a factor of 2.3`` where it is wide."""
    factor = _factor_if_wide(half_width)
    return f"{half_width:.0%}" if factor is None else f"a factor of {factor}"


def format_next_run(half_width: float) -> str:
    """Format the half-width of an interval of logarithms after a number: `` ± 2.7%``, or `` ×/÷ 2.3`` if wide."""
    factor = _factor_if_wide(half_width)
    return format_spread(half_width) if factor is None else f" ×/÷ {factor}"


def _factor_if_wide(half_width: float) -> str | None:
    """Return the factor that the half-width of an interval of logarithms means; ``None`` where ± is exact enough."""
    factor = math.exp(half_width)
    if not is_lopsided(1, 1 / factor, factor):
        return None
    return f"{factor:,.0f}" if factor >= 9.95 else f"{factor:.1f}"


def parse_share(text: str) -> float:
    """Parse ``0.05`` or ``5%`` to a fraction from 0 to below 1; raises ``ValueError`` for anything else."""
    number = text.strip()
    try:
        share = float(number[:-1]) / 100 if number.endswith("%") else float(number)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise ValueError(f"{text!r} is not a number from 0 to below 1, nor a percentage")
    return share


def parse_seconds(text: str) -> float:
    """Parse seconds written as ``90``, ``90s``, ``10m``, ``1h30m`` or ``500ms``; raises ``ValueError`` otherwise."""
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
    """Format ``0.21`` as ``210 ms``, ``75`` as ``1m15s``, ``12.34`` as ``12.3 s``."""
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
    """Return text, such as a file name, with control characters and line ends escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def lines_with_words(text: str) -> list[str]:
    """Return the lines of a log that contain words, without box-drawing characters."""
    # U+2500 to U+257F: the frames that rich puts around the errors of typer and others.
    lines = (re.sub(r"[\u2500-\u257f]+", " ", line).strip() for line in text.splitlines())
    return [line for line in lines if re.search(r"\w", line)]


def plural(count: int, word: str) -> str:
    """Format ``1 trial``, ``2 trials``."""
    return f"{count} {word}{'' if count == 1 else 's'}"


def format_groups(count: int, size: int, word: str = "devices") -> str:
    """Format ``4 devices``, or ``2 groups of 2 devices`` where the devices of a group share samples."""
    return f"{count} {word}" if size == 1 else f"{plural(count, 'group')} of {size} {word}"


def format_count(count: float) -> str:
    """Format ``335143938`` as ``335.1M`` and ``12345`` as ``12.3k``; numbers below 10,000 in full."""
    for unit, scale in (("B", 1e9), ("M", 1e6)):
        if count >= scale * (1 - 0.05 / 1000):
            return f"{count / scale:.1f}{unit}"
    return f"{count / 1e3:.1f}k" if count >= 1e4 else f"{count:.0f}"


def format_rate(per_second: float) -> str:
    """Format samples or tokens a second to about three digits: ``0.53``, ``310.7``, ``159,060``."""
    if per_second < 9.995:
        return f"{per_second:.2f}"
    return f"{per_second:.1f}" if per_second < 999.95 else f"{per_second:,.0f}"
