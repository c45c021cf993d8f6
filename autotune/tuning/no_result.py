"""Explain why a search has nothing to recommend, and what may help."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from autotune.core.errors import AutotuneError, NoResultError, NothingFitsError
from autotune.core.outcome import Failed, source_of
from autotune.core.stop import Stop, StopReason
from autotune.core.units import format_bytes, plural
from autotune.estimate.history import History, Tried
from autotune.tuning.request import SearchRequest


def no_result(history: History, request: SearchRequest, stop: Stop, *, log_folder: Path) -> AutotuneError:
    """Return the error that says why a search has nothing to recommend."""
    # No candidate was left to try.
    is_certain = stop.reason is StopReason.NOTHING_LEFT
    tried, ceiling = history.tried, history.ceiling
    failed = [t.outcome for t in tried if isinstance(t.outcome, Failed)]
    if not any(history.is_over(t) for t in tried):
        if failed:
            return NoResultError(
                f"no candidate of the search space completed; the last one failed: {failed[-1].message}",
                f"its log is in {log_folder}",
            )
        if not is_certain:
            return NoResultError(f"no candidate was run: {stop.sentence}", "raise --trials or --time-budget")
    return NothingFitsError(
        f"nothing {'' if is_certain else 'that was tried '}fits under {format_bytes(ceiling.line_bytes)} "
        f"({format_bytes(ceiling.cap_bytes)} less headroom); {_how_many(tried)}"
        + (f", {len(failed)} of them failed" if failed else ""),
        _what_may_help(request, is_certain=is_certain),
    )


def _how_many(tried: Sequence[Tried]) -> str:
    """Return ``26 trials were run`` or ``4 trials were run, 22 reused``."""
    reused = sum(source_of(t.outcome) is not None for t in tried)
    run = len(tried) - reused
    return f"{plural(run, 'trial')} {'was' if run == 1 else 'were'} run" + (f", {reused} reused" if reused else "")


def _what_may_help(request: SearchRequest, *, is_certain: bool) -> str:
    """Return what the user can still do after a search in which nothing fits."""
    workload = request.workload
    ways = [
        ("search on with the same --study and more --trials or --time-budget", not is_certain),
        ("raise --memory-limit", request.memory_limit_bytes is not None),
        ("free memory on the device or take a larger one", request.memory_limit_bytes is None),
        ("shorten --seq-len", workload.is_text),
        ("allow --gradient-checkpointing auto", request.gradient_checkpointing == "off"),
        *((f"add --lever {name}=on", True) for name in request.untried_resorts()),
        ("add --lever offload_activations=on", request.may_offload),
        ("leave --batch-multiple out", (request.batch_multiple or 1) > 1),
    ]
    return ", or ".join(way for way, is_open in ways if is_open)
