"""Derive a trial's outcome from its process: from its answer, or else from how it ended."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from autotune.core.errors import TrainingSourceError
from autotune.core.messages import Answer, Problem
from autotune.core.outcome import Failed, Outcome, outcome_from_document
from autotune.core.placement import rank_log
from autotune.core.units import lines_with_words


def tail(path: str | Path, lines: int = 3) -> str:
    """Return the last non-empty lines of a log, joined; an empty string without a log."""
    try:
        with open(path, "rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - 8192))
            text = log.read().decode(errors="replace")
    except OSError:
        return ""
    return " | ".join(lines_with_words(text)[-lines:])


def check_own_code(name: str, answer: Answer, problem: Problem | None, log_path: Path, timeout_seconds: float) -> None:
    """Raise ``TrainingSourceError`` where the user's own code did not reach its training.

    ``problem`` is the inspection's explanation.
    """
    if problem is not None:
        message, hint = problem.message, problem.hint
    elif answer.result is not None or answer.lost or answer.refused is not None:
        return
    elif answer.timed_out:
        message = f"{name} had not begun to train after {timeout_seconds:.3g} s"
        hint = "give it more time with --trial-timeout"
    elif answer.signal:
        message, hint = f"{name} was killed by {_signal_name(answer.signal)} before it trained", ""
    else:
        message = f"{name} ended its process before it trained"
        hint = "it has to train in the process that it is started as, not in one in the background"
    log_path = Path(rank_log(str(log_path), answer.rank or 0))
    last = tail(log_path)
    where = f"its log {log_path} ends: {last}" if last else f"its log is {log_path}"
    raise TrainingSourceError(message, "; ".join(filter(None, (hint, where))))


def how_it_ended(answer: Answer, log_path: str) -> str:
    """Return in a few words how a process without a result ended."""
    if answer.refused is not None:
        return answer.refused
    if answer.overdue:
        return "the trial server did not answer"
    if answer.lost:
        return "the trial server died"
    if answer.timed_out:
        return "it was still at work when its time limit was over"
    if answer.signal:
        return f"killed by {_signal_name(answer.signal)}"
    last = tail(rank_log(log_path, answer.rank or 0))
    return f"its process ended with exit code {answer.exit_code}{f'; its last words: {last}' if last else ''}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def outcome_of(answer: Answer, timeout_seconds: float, log_path: str) -> Outcome:
    """Return the outcome of a job from its process's answer, else from how the process ended."""
    if answer.result is not None:
        try:
            return outcome_from_document(answer.result)
        except ValueError as error:
            return Failed("malformed", str(error))
    during = answer.during
    if answer.refused is not None:
        return Failed("error", answer.refused, during)
    if answer.timed_out:
        return Failed("timeout", f"stopped after the time limit of {timeout_seconds:.3g} s", during)
    if answer.lost:
        return Failed("lost", "the trial server died during the trial", during)
    # Of several ranks: the one that failed first.
    rank = f"rank {answer.rank}: " if answer.rank is not None else ""
    if answer.signal:
        hint = ", perhaps by the kernel for want of host memory" if answer.signal == signal.SIGKILL else ""
        return Failed("killed", f"{rank}killed by {_signal_name(answer.signal)}{hint}", during)
    if answer.malformed is not None:
        return Failed("malformed", f"{rank}not a result: {answer.malformed!r}", during)
    return Failed("error", rank + how_it_ended(answer, log_path), during)
