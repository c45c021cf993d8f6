"""Say that the service is alive, what it offers, on which devices, and its figures for Prometheus."""

from __future__ import annotations

import asyncio
import shutil
import time
from typing import cast

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse

from autotune import __version__
from autotune.core.candidate import Document
from autotune.core.errors import ServiceError
from autotune.service.access import Known, Reader
from autotune.service.searches import Searches, describe_devices
from autotune.store.queue import JOB_STATES

router = APIRouter()


_HEALTH_SECONDS = 1.0
_LEAST_FREE_BYTES = 4 * 2**20
# In the value of a label.
_ESCAPED = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


class Health:
    """Looks whether the database answers, once for all who ask at the same time."""

    def __init__(self, searches: Searches) -> None:
        self._searches = searches
        self._look: asyncio.Task[int] | None = None
        self._looked_at = 0.0

    async def problem(self) -> str | None:
        """Return a general description of a problem with the database, for clients without a token."""
        if self._look is None or (self._look.done() and time.monotonic() - self._looked_at >= _HEALTH_SECONDS):
            self._looked_at = time.monotonic()
            self._look = asyncio.create_task(asyncio.to_thread(self._searches.store.queue.count_queued))
        await asyncio.wait({self._look}, timeout=_HEALTH_SECONDS)
        if not self._look.done() or self._look.exception() is not None:
            return "the database does not answer"
        path = self._searches.store.path
        if path is not None and shutil.disk_usage(path.parent).free < _LEAST_FREE_BYTES:
            return "the disk of the database is full"
        return None


@router.get("/healthz", tags=["health"])
async def health(request: Request, searches: Known) -> Document:
    """Say that the service and its database answer; needs no token. ``degraded``: a device cannot be used now."""
    problem = await cast(Health, request.app.state.health).problem()
    if problem is not None:
        raise ServiceError(problem, "the service's log says more", status=503)
    return {"status": "degraded" if searches.runner.problems() else "ok", "version": __version__}


@router.get("/metrics", tags=["health"], response_class=PlainTextResponse)
def metrics(token: Reader, searches: Known) -> str:
    """Return figures for Prometheus."""
    queue = searches.store.queue
    counts, studies = queue.counts(), searches.store.studies()
    lines = [
        "# HELP autotune_searches Searches by state.",
        "# TYPE autotune_searches gauge",
        *(f'autotune_searches{{state="{state}"}} {counts.get(state, 0)}' for state in JOB_STATES),
        "# HELP autotune_trials Trials in the database by state.",
        "# TYPE autotune_trials gauge",
        *(
            f'autotune_trials{{state="{state}"}} {sum(getattr(summary, state) for summary in studies)}'
            for state in ("running", "completed", "out_of_memory", "failed")
        ),
        "# HELP autotune_attempts_lost_total Attempts at searches whose process or node was lost, since the start.",
        "# TYPE autotune_attempts_lost_total counter",
        f"autotune_attempts_lost_total {searches.runner.lost}",
        "# HELP autotune_problems What keeps devices from searching now.",
        "# TYPE autotune_problems gauge",
        f"autotune_problems {len(searches.runner.problems())}",
        "# HELP autotune_device_busy Whether a search runs on a device.",
        "# TYPE autotune_device_busy gauge",
    ]
    for device in describe_devices(searches):
        labels = ",".join(f'{name}="{str(device[name]).translate(_ESCAPED)}"' for name in ("host", "label", "name"))
        lines.append(f"autotune_device_busy{{{labels}}} {int(device['search'] is not None)}")
    return "\n".join(lines) + "\n"


@router.get("/openapi.json", include_in_schema=False)
def openapi(request: Request, token: Reader) -> JSONResponse:
    return JSONResponse(request.app.openapi())


@router.get("/v1/devices", tags=["devices"])
def list_devices(token: Reader, searches: Known) -> Document:
    """List the devices on which searches run, with what runs on them."""
    return {"devices": describe_devices(searches)}


@router.api_route("/v1/agents{rest:path}", methods=["GET", "POST", "DELETE"], include_in_schema=False)
def refuse_agent(rest: str) -> None:
    """Tell an agent of an earlier version that there are none any more."""
    raise ServiceError(
        "this service runs its searches itself; there are no agents any more",
        "end the agent; for more machines start the service with --executor ray://HOST:10001",
        status=410,
    )
