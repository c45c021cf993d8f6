"""Sign a browser in with a token, and out again."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response
from starlette.concurrency import run_in_threadpool

from autotune.core.errors import ServiceError
from autotune.service.access import COOKIE, access_of
from autotune.service.pages.frame import form_fields, sign_in_page

_COOKIE_SECONDS = 30 * 24 * 3600

router = APIRouter(include_in_schema=False)


@router.post("/session")
async def begin_session(request: Request) -> Response:
    """Set the cookie of a valid token."""
    token = (await form_fields(request)).get("token", "").strip()
    address = request.client.host if request.client else ""
    try:
        found = await run_in_threadpool(access_of(request).check, token, address)
    except ServiceError as error:
        return sign_in_page(error)
    if found is None:
        return sign_in_page(ServiceError("this token is not known", "see what autotune serve printed", status=401))
    answer = RedirectResponse("/", 303)
    is_tls = request.url.scheme == "https"
    answer.set_cookie(COOKIE, token, httponly=True, samesite="strict", secure=is_tls, max_age=_COOKIE_SECONDS)
    return answer


@router.post("/session/end")
def end_session() -> Response:
    """Remove the cookie."""
    answer = RedirectResponse("/", 303)
    answer.delete_cookie(COOKIE, httponly=True, samesite="strict")
    return answer
