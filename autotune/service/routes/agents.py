"""Connect agents, give them searches under a lease, and record what they report."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Query, Request

from autotune.core.candidate import Document
from autotune.service.access import Known, Reader, Writer
from autotune.service.searches import describe_agent

router = APIRouter(tags=["agents"])


@router.get("/v1/agents")
def list_agents(token: Reader, searches: Known) -> Document:
    """List the agents that are connected, with their devices and what they run."""
    running = searches.store.queue.jobs(states=["running"], most=1000)
    return {"agents": [describe_agent(agent, running) for agent in searches.agents()]}


@router.post("/v1/agents", status_code=201)
def register(document: Annotated[dict[str, Any], Body()], token: Writer, searches: Known) -> Document:
    """Connect an agent."""
    return searches.register_agent(document)


@router.delete("/v1/agents/{agent}", status_code=204)
def leave(agent: str, token: Writer, searches: Known) -> None:
    """Disconnect an agent."""
    searches.leave(agent)


@router.post("/v1/agents/{agent}/claim")
async def claim(
    request: Request, agent: str, token: Writer, searches: Known,
    wait_seconds: Annotated[float, Query(ge=0, le=60)] = 0,
) -> Document:  # fmt: skip
    """Take the next search that fits, under a lease; waits for one. ``job`` is ``null`` where none came."""
    return await searches.claim(agent, wait_seconds, request.is_disconnected)


@router.post("/v1/agents/{agent}/jobs/{job}/heartbeat")
def heartbeat(
    agent: str, job: str, document: Annotated[dict[str, Any], Body()], token: Writer, searches: Known
) -> Document:
    """Keep the lease of a search; says whether the search is to be cancelled."""
    return searches.heartbeat(agent, job, document)


@router.post("/v1/agents/{agent}/jobs/{job}/events")
def say(agent: str, job: str, document: Annotated[dict[str, Any], Body()], token: Writer, searches: Known) -> Document:
    """Record what happened in a search."""
    return searches.say(agent, job, document)


@router.get("/v1/agents/{agent}/jobs/{job}/records")
def records(agent: str, job: str, lease_token: str, token: Writer, searches: Known) -> Document:
    """Return what is recorded of a claimed search, for an agent with a database of its own."""
    return searches.records(job, lease_token)


@router.post("/v1/agents/{agent}/jobs/{job}/end")
def end(agent: str, job: str, document: Annotated[dict[str, Any], Body()], token: Writer, searches: Known) -> Document:
    """End a search, or put it back into the queue."""
    return searches.end(agent, job, document)
