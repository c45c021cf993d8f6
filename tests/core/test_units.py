"""Test parsing and formatting of bytes, seconds, counts and rates."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.core.units import (
    GIB,
    KIB,
    MIB,
    TIB,
    format_bytes,
    format_count,
    format_deviation,
    format_rate,
    format_seconds,
    lines_with_words,
    parse_bytes,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("24GiB", 24 * GIB),
        ("24gib", 24 * GIB),
        ("24G", 24 * GIB),
        ("24Gi", 24 * GIB),
        ("24GB", 24 * 10**9),
        ("512 MiB", 512 * MIB),
        (" 1.5TiB ", TIB + TIB // 2),
        (".5k", KIB // 2),
        ("1048576", MIB),
        ("1048576B", MIB),
        ("1B", 1),
    ],
)
def test_sizes(text: str, size_bytes: int) -> None:
    """Powers of 1024 unless the suffix is of the SI."""
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90.0),
        ("90s", 90.0),
        ("10m", 600.0),
        ("10 min", 600.0),
        ("1h30m", 5400.0),
        ("1h 30m 5s", 5405.0),
        ("500ms", 0.5),
        ("0.5", 0.5),
        ("2d", 172800.0),
        ("1H", 3600.0),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)


NO_SIZES = (
    "", " ", "GiB", "24 Gig", "24", "1023", "-1GiB", "+1GiB", "1e9", "0", "0.5", "2EiB", "9" * 400, "1,5GiB", "٣GiB",
    "nan", "inf",
)  # fmt: skip
NO_DURATIONS = ("", "s", "soon", "-5s", "0", "0s", "400d", "1h30", "5 parsecs", "1m30", "nan", "9" * 400, "٣s")


@pytest.mark.parametrize(
    ("parse", "kind", "text"),
    [
        *((parse_bytes, "a size", text) for text in NO_SIZES),
        *((parse_seconds, "a duration", text) for text in NO_DURATIONS),
    ],
)
def test_what_is_no_quantity(parse: Callable[[str], object], kind: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"is not {kind}") as error:
        parse(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (KIB, "1.0 KiB"),
        (25769803776, "24.0 GiB"),
        (MIB - 1, "1.0 MiB"),
        (GIB - 1, "1.0 GiB"),
        (-1.5 * GIB, "-1.5 GiB"),
        (3000 * TIB, "3000.0 TiB"),
    ],
)
def test_sizes_as_text(size_bytes: float, text: str) -> None:
    """Never 1024.0 of a unit."""
    assert format_bytes(size_bytes) == text


@given(st.integers(1, 2**60))
def test_a_size_that_was_written_can_be_read(size_bytes: int) -> None:
    """To the digit that is shown; and the number is one that a person can read."""
    text = format_bytes(size_bytes)
    number, unit = text.split()
    # The last digit that is shown is a tenth, which is 5 % at worst, of 1.0.
    assert math.isclose(parse_bytes(text), size_bytes, rel_tol=0.051)
    assert float(number) < 1024 or unit == "TiB"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ms"),
        (0.21, "210 ms"),
        (0.9994, "999 ms"),
        (0.9999, "1.0 s"),
        (12.34, "12.3 s"),
        (59.94, "59.9 s"),
        (59.97, "1m00s"),
        (75, "1m15s"),
        (3599.7, "1h00m"),
        (5400, "1h30m"),
        (float("inf"), "?"),
        (float("nan"), "?"),
    ],
)
def test_durations_as_text(seconds: float, text: str) -> None:
    """Never 1000 ms or 60.0 s."""
    assert format_seconds(seconds) == text


@given(st.floats(0.001, 300 * 86400.0))
def test_a_duration_that_was_written_can_be_read(seconds: float) -> None:
    assert math.isclose(parse_seconds(format_seconds(seconds)), seconds, rel_tol=0.06, abs_tol=0.0006)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (9999, "9999"), (10_000, "10.0k"), (999_960, "1.0M"), (335_143_938, "335.1M"), (1.2e9, "1.2B")],
)
def test_counts_as_text(count: float, text: str) -> None:
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("rate", "text"),
    [(0.0, "0.00"), (0.534, "0.53"), (9.996, "10.0"), (310.66, "310.7"), (999.96, "1,000"), (159059.8, "159,060")],
)
def test_rates_as_text(rate: float, text: str) -> None:
    assert format_rate(rate) == text


def test_the_lines_of_a_log_that_say_something() -> None:
    log = "Traceback:\n   ^^^^\n╭─ Error ──────╮\n│ No such option │\n╰────────╯\n\n"
    assert lines_with_words(log) == ["Traceback:", "Error", "No such option"]


@pytest.mark.parametrize(
    ("half_width", "text"),
    [
        (0.027, "3%"),
        (0.2, "20%"),
        (0.476, "a factor of 1.6"),
        (2.294, "a factor of 9.9"),
        (2.299, "a factor of 10"),
        (7.0, "a factor of 1,097"),
    ],
)
def test_a_deviation_is_a_factor_where_up_and_down_are_not_alike(half_width: float, text: str) -> None:
    assert format_deviation(half_width) == text
