"""Have the winner of a search of one's own ``Trainer`` run once what a long run does beyond its first steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from autotune.core.candidate import Candidate
from autotune.core.rehearsal import Rehearsal, RehearsalWork
from autotune.devices.host import host_memory

if TYPE_CHECKING:
    from autotune.execution.trial_server import TrialServer
    from autotune.tuning.prepare import Prepared

Rehearse = Callable[[Candidate, float], Rehearsal | None]
"""Rehearses a winner after so many seconds of searching; ``None`` where its run is no more than its steps."""

# Share of the search that a part may take, and its bounds in seconds. Choices.
_SHARE, _LEAST_SECONDS, _MOST_SECONDS = 0.03, 2.0, 20.0


def rehearser_of(prepared: Prepared, server: TrialServer, timeout_seconds: float) -> Rehearse:
    """Return what rehearses the winner of a search, by a job of a trial server."""
    request, source = prepared.request, prepared.request.workload.source

    def rehearse(candidate: Candidate, searched_seconds: float) -> Rehearsal | None:
        if source is None or source.framework != "trainer" or not prepared.model.interface.goes_on:
            return None
        if candidate.arm.ranks > 1:
            return Rehearsal(problem="it trains on several devices")
        devices = server.placement.rank_devices
        work = RehearsalWork(
            candidate,
            devices,
            prepared.ceiling.cap_bytes,
            prepared.ceiling.line_bytes,
            request.seed,
            host_bytes=host_memory().free_bytes if devices.kind == "cuda" else None,
            seconds=min(_MOST_SECONDS, max(_LEAST_SECONDS, _SHARE * searched_seconds)),
            unmodified=candidate == prepared.baseline and prepared.model.own is not None,
        )
        return server.rehearse(work, request.trial_timeout_seconds or timeout_seconds)

    return rehearse
