"""Say why a search ended, and which arms it left without a trial."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class StopReason(StrEnum):
    """What ended a search."""

    NOTHING_LEFT = "nothing_left"
    """No remaining candidate was worth a trial."""
    TRIALS = "trials"
    """The budget of trials was spent."""
    TIME = "time"
    """The time budget was spent."""
    NOTHING_NEW = "nothing_new"
    """One of Optuna's samplers proposed nothing new, many times in a row."""
    INTERRUPTED = "interrupted"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Stop:
    """Why a search ended."""

    reason: StopReason
    sentence: str
    """The reason in words, with its figures."""


NOTHING_LEFT = Stop(StopReason.NOTHING_LEFT, "no remaining candidate is worth a trial")
INTERRUPTED = Stop(StopReason.INTERRUPTED, "interrupted")


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Arms that had no trial, for one reason."""

    arms: tuple[str, ...]
    """Each as ``Arm.describe`` names it, or ``all fp16`` for several that have it in common."""
    reason: str

    def describe(self) -> str:
        """Return arms and reason: ``all fp16; tf32, checkpointing: fp16 is never faster than bf16``."""
        return f"{'; '.join(self.arms)}: {self.reason}"
