"""List the devices on which searches run, and tell clients of earlier versions what is gone."""

from __future__ import annotations

from fastapi import APIRouter

from autotune.core.candidate import Document
from autotune.core.errors import ServiceError
from autotune.service.access import Known, Reader
from autotune.service.searches import describe_devices

router = APIRouter(tags=["devices"])


@router.get("/v1/devices")
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
