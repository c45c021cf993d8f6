"""Say that the service is alive, what it offers, and its figures for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse

from autotune import __version__
from autotune.core.candidate import Document
from autotune.service.access import Known, Reader
from autotune.service.searches import Searches, describe_devices
from autotune.store.queue import JOB_STATES

router = APIRouter()


@router.get("/healthz", tags=["health"])
def health(searches: Known) -> Document:
    """Say that the service and its database answer; needs no token."""
    searches.store.queue.counts()
    return {"status": "ok", "version": __version__}


@router.get("/metrics", tags=["health"], response_class=PlainTextResponse)
def metrics(token: Reader, searches: Known) -> str:
    """Return figures for Prometheus."""
    return _metrics(searches)


@router.get("/openapi.json", include_in_schema=False)
def openapi(request: Request, token: Reader) -> JSONResponse:
    return JSONResponse(request.app.openapi())


def _metrics(searches: Searches) -> str:
    queue = searches.store.queue
    counts = queue.counts()
    lines = [
        "# HELP autotune_searches Searches by state.",
        "# TYPE autotune_searches gauge",
        *(f'autotune_searches{{state="{state}"}} {counts.get(state, 0)}' for state in JOB_STATES),
        "# HELP autotune_trials Trials in the database by state.",
        "# TYPE autotune_trials gauge",
        *(f'autotune_trials{{state="{state}"}} {count}' for state, count in searches.trial_counts().items()),
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
        labels = ",".join(f'{label}="{_escaped(str(device[label]))}"' for label in ("host", "label", "name"))
        lines.append(f"autotune_device_busy{{{labels}}} {int(device['search'] is not None)}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    """Return text as the value of a label."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
