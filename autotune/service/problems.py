"""Carry errors over HTTP: a problem document (RFC 9457) with the message, hint and exit code of the command line."""

from __future__ import annotations

from http import HTTPStatus

from autotune.core import errors
from autotune.core.candidate import Document
from autotune.core.errors import (
    AutotuneError,
    DeviceError,
    InvalidRequestError,
    ServiceError,
    StorageError,
    UnknownModelError,
    UnknownStudyError,
)

MEDIA_TYPE = "application/problem+json"

_STATUS: dict[type[AutotuneError], int] = {
    InvalidRequestError: 422,
    UnknownModelError: 422,
    DeviceError: 409,
    UnknownStudyError: 404,
    StorageError: 503,
}


def problem_document(error: AutotuneError) -> tuple[int, Document]:
    """Return the HTTP status and the problem document for an error."""
    status = error.status if isinstance(error, ServiceError) else _STATUS.get(type(error), 409)
    return status, {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        # JSON may contain half of a surrogate pair, which has no encoding as UTF-8.
        "detail": error.message.encode(errors="backslashreplace").decode(),
        "hint": error.hint,
        "exit_code": error.exit_code,
    }


def error_of(problem: Document) -> AutotuneError:
    """Return the error that a problem document describes, so that a command fails as if the error were local."""
    message = str(problem.get("message") or problem.get("detail") or problem.get("title") or "no reason was given")
    hint, code = str(problem.get("hint") or ""), problem.get("exit_code")
    if code != ServiceError.exit_code and (known := errors.error_with_code(code, message, hint)) is not None:
        return known
    status = problem.get("status")
    return ServiceError(message, hint, status=status if isinstance(status, int) else 400)
