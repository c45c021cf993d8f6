"""Plain tables on stdout, and the cells in which a trial is shown there and while it runs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import click

from autotune.trial import Candidate, Completed, Failed, Outcome, OutOfMemory
from autotune.units import format_bytes, format_rate, format_seconds, format_spread

if TYPE_CHECKING:
    from autotune.store import TrialRecord


def batch_cell(candidate: Candidate) -> str:
    """``32 × 2``."""
    return f"{candidate.per_device_train_batch_size} × {candidate.gradient_accumulation_steps}"


def speed_cell(outcome: Outcome | None) -> str:
    """Samples a second with their spread, or why there are none."""
    match outcome:
        case Completed(measurement=measured):
            return f"{format_rate(measured.samples_per_second)}{format_spread(measured.known_spread)}"
        case OutOfMemory(where=where):
            return "out of memory" if where == "device" else "out of host memory"
        case Failed(reason=reason):
            return "failed" if reason == "error" else reason
    return "running"


def peak_cell(outcome: Outcome | None) -> str:
    """Peak reserved memory; a lower bound where the trial wanted more."""
    match outcome:
        case Completed(measurement=measured):
            return format_bytes(measured.peak_reserved_bytes)
        case OutOfMemory(peak_reserved_bytes=int(reserved)):
            return f"> {format_bytes(reserved)}"
    return ""


def took_cell(trial: TrialRecord) -> str:
    """How long the trial took; that it was not run, where an earlier one told."""
    if trial.stage == "reused":
        return "reused"
    return format_seconds(trial.seconds) if trial.seconds is not None else ""


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str] = ()) -> None:
    """Columns as wide as their widest cell, two spaces apart; those headed as in ``right`` end together."""
    widths = [max(len(line[column]) for line in (head, *rows)) for column in range(len(head))]
    for line in (head, *rows):
        cells = [
            cell.rjust(width) if title in right else cell.ljust(width)
            for cell, width, title in zip(line, widths, head, strict=True)
        ]
        click.echo("  ".join(cells).rstrip())
