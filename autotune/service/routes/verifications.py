"""Queue the run of a stock Trainer that shows whether a study's promise holds, and show its result."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Header, Response

from autotune.core.candidate import Document
from autotune.core.errors import UnknownStudyError
from autotune.service.access import Known, Reader, Submitter
from autotune.service.openapi import verification_body
from autotune.service.requests import VERIFIES
from autotune.service.searches import Searches
from autotune.store.queue import JobRecord

router = APIRouter(tags=["verify"])


@router.post("/v1/verify", status_code=202, openapi_extra=verification_body())
def submit(
    document: Annotated[dict[str, Any], Body(examples=[{"study": "bert-large-uncased-64", "steps": 100}])],
    response: Response, token: Submitter, searches: Known,
    idempotency_key: Annotated[str | None, Header(max_length=128)] = None,
) -> Document:  # fmt: skip
    """Queue a verification on a device like the one that the study was measured on. 202 with its Location."""
    job, is_new = searches.submit_verification(document, by=token.name, idempotency_key=idempotency_key)
    response.status_code = 202 if is_new else 200
    response.headers["Location"] = f"/v1/verify/{job.id}"
    return _describe(searches, job)


@router.get("/v1/verify/{verification}")
def show(verification: str, token: Reader, searches: Known) -> Document:
    """Show a verification: its state, and once it has ended the document of ``autotune verify --json``.

    Its events are those of a search, under ``/v1/searches/ID/events``; it is cancelled as one.
    """
    job = searches.job(verification)
    if VERIFIES not in job.request:
        raise UnknownStudyError(f"{verification[:120]!r} is a search", "POST /v1/verify makes a verification")
    return _describe(searches, job)


def _describe(searches: Searches, job: JobRecord) -> Document:
    """Return the JSON of a verification: its job, its result, and the lines of the command line."""
    shown = searches.verification(job) or {}
    return {
        **searches.describe(job),
        "verification": shown.get("verification"),
        # As the command line prints it.
        "lines": shown.get("lines"),
        # Of a promise that was not kept, in the words of the command line.
        "missed": shown.get("problem"),
    }
