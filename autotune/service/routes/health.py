"""Say that the service is alive, what it offers, and its figures for Prometheus."""

from __future__ import annotations

from datetime import timedelta

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse

from autotune import __version__
from autotune.core.candidate import Document
from autotune.service.access import Known, Reader
from autotune.service.searches import Searches
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
        "# HELP autotune_leases_lost_total Searches taken back from agents that fell silent, since the start.",
        "# TYPE autotune_leases_lost_total counter",
        f"autotune_leases_lost_total {searches.leases_lost}",
        "# HELP autotune_agent_heartbeat_age_seconds Seconds since an agent was heard of.",
        "# TYPE autotune_agent_heartbeat_age_seconds gauge",
    ]
    moment = queue.clock()
    for agent in searches.agents():
        age = max(timedelta(0), moment - agent.heartbeat_at).total_seconds()
        labels = f'agent="{agent.id}",name="{_escaped(agent.name)}",device="{_escaped(str(agent.device["name"]))}"'
        lines.append(f"autotune_agent_heartbeat_age_seconds{{{labels}}} {age:.1f}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    """Return text as the value of a label."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
