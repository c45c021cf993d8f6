"""Format tables, and the cells of a table of trials: batch, speed, peak memory, time taken."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING

from autotune.core.candidate import Candidate
from autotune.core.outcome import Completed, Failed, Outcome, OutOfMemory
from autotune.core.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from autotune.estimate.pooling import Speed
    from autotune.results.predicted import BatchDocument
    from autotune.store.records import TrialRecord


# Least width, in columns, of a cell that is wrapped. A choice.
_LEAST_WIDTH = 16
# From this relative standard deviation between the steps of a process on, the table mentions it. A choice.
_UNEVEN = 0.1


def batch_cell(of: Candidate | BatchDocument) -> str:
    """Return the per-device batch and the accumulation of a candidate or a prediction: ``32 × 2``."""
    return f"{of.per_device_train_batch_size} × {of.gradient_accumulation_steps}"


def speed_cell(outcome: Outcome | None) -> str:
    """Return samples a second, or the reason why there are none. The uncertainty is shown below ``Best``."""
    match outcome:
        case Completed(measurement=measured):
            return format_rate(measured.samples_per_second)
        case OutOfMemory(where=where):
            return "out of memory" if where == "device" else "out of host memory"
        case Failed(reason=reason):
            return "failed" if reason == "error" else reason
    return "running"


def verdict_cell(verdict: str, outcome: Outcome | None, speed: Speed | None) -> str:
    """Return a trial's verdict, and its candidate's mean ``speed`` where several processes measured that.

    Large differences between the steps of the trial are mentioned, too.
    """
    words = [verdict] if verdict else []
    if speed is not None and speed.processes > 1:
        words.append(f"mean {format_rate(speed.samples_per_second)}")
    if isinstance(outcome, Completed) and (deviation := outcome.measurement.step_deviation) >= _UNEVEN:
        words.append(f"steps vary by {deviation:.0%}")
    return ", ".join(words)


def peak_cell(outcome: Outcome | None) -> str:
    """Return peak reserved memory; a lower bound where the trial ran out of memory."""
    match outcome:
        case Completed(measurement=measured):
            return format_bytes(measured.peak_reserved_bytes)
        case OutOfMemory(peak_reserved_bytes=int(reserved)):
            return f"> {format_bytes(reserved)}"
    return ""


def took_cell(trial: TrialRecord) -> str:
    """Return how long the trial took, or that it was reused."""
    if trial.stage == "reused":
        return "reused"
    return format_seconds(trial.seconds) if trial.seconds is not None else ""


def table_lines(head: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str] = ()) -> list[str]:
    """Return a table as lines, with columns as wide as their widest cell; those titled as in ``right`` right-aligned.

    ``rich.table`` would fold cells to 80 columns where stdout is no terminal, and takes 33 ms to import.
    """
    widths = [max(len(line[column]) for line in (head, *rows)) for column in range(len(head))]
    return [
        "  ".join(
            cell.rjust(width) if title in right else cell.ljust(width)
            for cell, width, title in zip(line, widths, head, strict=True)
        ).rstrip()
        for line in (head, *rows)
    ]


def narrow_table_lines(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    columns: int | None,
    dispensable: Sequence[str],
    wrapped_column: int = 0,
    right: Collection[str] = (),
) -> list[str]:
    """Return ``table_lines``, at most ``columns`` wide if possible, at any width for ``None``.

    In a wider table, the columns titled as in ``dispensable`` are left out, one after the other. Then the cells of
    column number ``wrapped_column`` are wrapped.
    """
    lines = table_lines(head, rows, right)
    if columns is None:
        return lines
    for title in dispensable:
        if max(map(len, lines)) > columns and title in head:
            place = list(head).index(title)
            head = [*head[:place], *head[place + 1 :]]
            rows = [[*row[:place], *row[place + 1 :]] for row in rows]
            lines = table_lines(head, rows, right)
    excess = max(map(len, lines)) - columns
    width = max(len(row[wrapped_column]) for row in (head, *rows)) - excess
    if excess <= 0 or width < _LEAST_WIDTH:
        return lines
    wrapped_rows: list[Sequence[str]] = []
    for row in rows:
        first, *others = wrap(row[wrapped_column], width, subsequent_indent="  ", break_long_words=False) or [""]
        wrapped_rows.append([*row[:wrapped_column], first, *row[wrapped_column + 1 :]])
        wrapped_rows += [["" if place != wrapped_column else words for place in range(len(row))] for words in others]
    return table_lines(head, wrapped_rows, right)
