"""List the devices on which searches run."""

from __future__ import annotations

from fastapi import APIRouter

from autotune.core.candidate import Document
from autotune.service.access import Known, Reader
from autotune.service.searches import describe_devices

router = APIRouter(tags=["devices"])


@router.get("/v1/devices")
def list_devices(token: Reader, searches: Known) -> Document:
    """List the devices on which searches run, with what runs on them."""
    return {"devices": describe_devices(searches)}
