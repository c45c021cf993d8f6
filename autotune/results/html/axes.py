"""Compute scales, round ticks and label positions of a chart, in pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Estimates for a proportional font at 12 px: digits and lower-case letters of common system fonts are 6 to 7 px wide.
_CHARACTER_WIDTH = 6.6
_LINE_HEIGHT = 15.0


@dataclass(frozen=True)
class Scale:
    """A map from values to pixels."""

    low: float
    high: float
    start: float
    """Pixel of ``low``."""
    end: float
    """Pixel of ``high``."""
    is_log: bool = False

    def __call__(self, value: float) -> float:
        """Return the pixel of a value; values beyond the ends are put at the ends."""
        value = min(max(value, self.low), self.high)
        if self.is_log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, most: int) -> list[float]:
        """Return round values within the scale, about ``most`` of them at most."""
        if not self.is_log:
            return _linear_ticks(self.low, self.high, most)
        ticks: list[float] = []
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for factors in ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)):
            every = (factor * 10.0**power for power in powers for factor in factors)
            finer = [tick for tick in every if self.low <= tick <= self.high]
            if len(finer) > most:
                break
            ticks = finer
        # Within part of a decade, linear ticks are as good as logarithmic ones.
        return ticks if len(ticks) > 2 else _linear_ticks(self.low, self.high, most)


def _linear_ticks(low: float, high: float, most: int) -> list[float]:
    raw = (high - low) / max(1, most)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if factor * power >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


@dataclass(frozen=True)
class Box:
    """A rectangle in pixels."""

    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: Box) -> bool:
        """Return whether two rectangles share a pixel."""
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )

    def is_within(self, other: Box) -> bool:
        """Return whether this rectangle lies inside another."""
        return (
            self.left >= other.left
            and self.right <= other.right
            and self.top >= other.top
            and self.bottom <= other.bottom
        )


def text_width(text: str) -> float:
    """Estimate the width of a text at 12 px, in pixels; the reader's font is not known."""
    return len(text) * _CHARACTER_WIDTH


def shortened(text: str, width: float) -> str:
    """Cut a text to a width in pixels, and end it with ``…``."""
    most = max(1, int(width / _CHARACTER_WIDTH))
    return text if len(text) <= most else text[: most - 1].rstrip(" ,") + "…"


def place_label(text: str, x: float, y: float, area: Box, labels: Sequence[Box], marks: Sequence[Box]) -> Box:
    """Choose where to write a text near a point: inside the area, over no other label, over few marks."""
    # Labels are bold, which is wider.
    width, gap = 1.15 * text_width(text), 13.0
    choices = []
    for distance in (gap, 2 * gap, 4 * gap):
        choices += [
            (x - width / 2, y - distance - _LINE_HEIGHT),
            (x - distance - width, y - _LINE_HEIGHT / 2),
            (x + distance, y - _LINE_HEIGHT / 2),
            (x - width / 2, y + distance),
            (x - distance - width, y - distance - _LINE_HEIGHT),
            (x - distance - width, y + distance),
            (x + distance, y - distance - _LINE_HEIGHT),
            (x + distance, y + distance),
        ]
    boxes = [Box(left, top, left + width, top + _LINE_HEIGHT) for left, top in choices]

    def cost(box: Box) -> int:
        covered = sum(box.overlaps(mark) for mark in marks) + 1000 * sum(box.overlaps(label) for label in labels)
        return covered + (0 if box.is_within(area) else 1_000_000)

    return min(boxes, key=cost)
