"""Compute how many bytes a trial may reserve: cap, headroom and line.

The cap is the most that torch's allocator may reserve. The headroom has to stay free below it. The line is the cap less
the headroom: a trial is feasible where its peak is at or under the line.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from autotune.core.errors import InvalidRequestError, NothingFitsError
from autotune.core.units import format_bytes, parse_bytes

PREDICTION_MARGIN = 0.01
"""How far below the line a predicted peak has to be, relative to the line, to count as fitting.

With it, the largest batch was right or one multiple too small in 40 of 44 arms of eleven models recorded on an H200,
one multiple too large in two, and three or four too small in two."""

LARGE_GRADIENTS = 0.01
"""Share of the memory: where gradients take more, a search has DDP keep its first gradient buckets, of which one step
may otherwise hold a second set. Less than the headroom. A choice."""

DEFAULT_HEADROOM_FRACTION = 0.03
"""A choice, not a measurement: reserve for what a short trial does not show of a long run, such as fragmentation."""


@dataclass(frozen=True, slots=True)
class Headroom:
    """Memory kept free below the cap: a fraction of it or, where given, a size."""

    fraction: float = DEFAULT_HEADROOM_FRACTION
    size_bytes: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.fraction < 1:
            raise InvalidRequestError(f"a headroom of {self.fraction:.6g} is not a fraction from 0 to below 1", _WRITE)
        if self.size_bytes is not None and self.size_bytes < 0:
            raise InvalidRequestError(f"a headroom of {self.size_bytes} bytes is below 0", _WRITE)

    def of_cap(self, cap_bytes: int) -> int:
        """Return the bytes to keep free below a cap; a fraction is rounded up."""
        return math.ceil(self.fraction * cap_bytes) if self.size_bytes is None else self.size_bytes

    def describe(self) -> str:
        """Return the headroom in words: ``3 %`` or ``1.0 GiB``."""
        return f"{self.fraction * 100:.3g} %" if self.size_bytes is None else format_bytes(self.size_bytes)


_WRITE = "write --headroom as 5%, 0.05 or 1GiB"


def parse_headroom(text: str) -> Headroom:
    """Parse a headroom written as a percentage (``5%``), a fraction below 1 (``0.05``) or a size (``1GiB``).

    Raises ``InvalidRequestError`` for anything else. A bare number of 1 or more is refused, since it could mean a
    percentage or bytes; bytes are written ``1048576B``.
    """
    written = text.strip()
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*(%?)", written, flags=re.ASCII)
    if match is None:
        try:
            return Headroom(size_bytes=parse_bytes(written))
        except ValueError as error:
            raise InvalidRequestError(f"{text!r} is not a headroom", _WRITE) from error
    fraction = float(match.group(1)) / (100 if match.group(2) else 1)
    if fraction >= 1:
        raise InvalidRequestError(f"{text!r} is not a headroom below the whole cap", _WRITE)
    return Headroom(fraction)


@dataclass(frozen=True, slots=True)
class Bounds:
    """The cap and the line (cap less headroom), by which measured and predicted peaks are judged."""

    cap_bytes: int
    line_bytes: int

    def below_line_bytes(self, margin: float) -> int:
        """Return the largest peak that is below the line by ``margin``, a share of the line."""
        return int(self.line_bytes * (1 - margin))

    def fits(self, reserved_bytes: int, margin: float = 0.0) -> bool:
        """Return whether a peak is at or under the line less ``margin``, a share for errors of predictions."""
        return reserved_bytes <= self.below_line_bytes(margin)


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The memory limit of every trial of a search.

    Constructing one that leaves no memory raises ``InvalidRequestError`` where the limit or the headroom is too tight,
    and ``NothingFitsError`` where the device has too little memory free.
    """

    limit_bytes: int | None
    """The user's limit; ``None`` means all memory that is free."""
    free_bytes: int
    """Free on the device before the first trial."""
    context_bytes: int
    """Memory of a CUDA context, which torch's allocator does not count; 0 on a CPU."""
    headroom: Headroom = field(default_factory=Headroom)

    def __post_init__(self) -> None:
        context = f"the {format_bytes(self.context_bytes)} of a CUDA context"
        if self.limit_bytes is not None and self.limit_bytes <= self.context_bytes:
            raise InvalidRequestError(
                f"a memory limit of {format_bytes(self.limit_bytes)} leaves nothing"
                + (f" after {context}" if self.context_bytes else ""),
                "raise --memory-limit",
            )
        if self.free_bytes <= self.context_bytes:
            raise NothingFitsError(
                f"the {format_bytes(self.free_bytes)} that are free on the device leave nothing"
                + (f" after {context}" if self.context_bytes else ""),
                "end the processes that hold its memory (autotune devices lists them) or choose another --device",
            )
        if self.line_bytes <= 0:
            raise InvalidRequestError(
                f"a headroom of {self.headroom.describe()} leaves nothing of the {format_bytes(self.cap_bytes)} "
                "that a trial may reserve",
                "lower --headroom or raise --memory-limit",
            )

    @property
    def cap_bytes(self) -> int:
        """Most bytes that the allocator of a trial may reserve."""
        return self.reachable_bytes - self.context_bytes

    @property
    def reachable_bytes(self) -> int:
        """Most bytes that a trial's process may use on the device, its CUDA context included."""
        return self.free_bytes if self.limit_bytes is None else min(self.limit_bytes, self.free_bytes)

    @property
    def headroom_bytes(self) -> int:
        """Bytes of the cap that a feasible trial leaves free."""
        return self.headroom.of_cap(self.cap_bytes)

    @property
    def line_bytes(self) -> int:
        """Most bytes that a feasible trial reserves at its peak."""
        return self.cap_bytes - self.headroom_bytes

    @property
    def bounds(self) -> Bounds:
        """The cap and the line, without the free memory and headroom that they are computed from."""
        return Bounds(self.cap_bytes, self.line_bytes)

    def excess_bytes(self, peak_reserved_bytes: int, context_bytes: int | None = None) -> int:
        """Return by how many bytes a trial exceeds what a feasible trial may use; 0 or less for a feasible trial.

        The peak must be at or under the line. Peak and CUDA context together must also stay within
        ``reachable_bytes``. ``context_bytes`` is the trial's measured context, which may be larger than assumed;
        ``None`` where it was not measured.
        """
        over = peak_reserved_bytes - self.line_bytes
        return over if context_bytes is None else max(over, peak_reserved_bytes + context_bytes - self.reachable_bytes)
