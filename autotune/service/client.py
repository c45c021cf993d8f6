"""Send requests to a service over HTTP, and listen to its events."""

from __future__ import annotations

import json
import os
import re
import ssl
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import httpx2

from autotune.core.candidate import Document
from autotune.core.errors import ServiceError
from autotune.service.problems import error_of

TOKEN_VARIABLE = "AUTOTUNE_TOKEN"
CERTIFICATE_VARIABLE = "AUTOTUNE_CERTIFICATE"
"""Names a file with the service's certificate, which is then the only one that is trusted, whatever host it names."""
_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
# A listener that hears nothing for so long, not even a keep-alive (15 s), has lost its connection.
_SILENCE_SECONDS = 60.0
_TIMEOUT_SECONDS = 30.0
_PATIENCE_SECONDS = 60.0
"""How long a listener tries to connect again."""


def path_of(search: str) -> str:
    """Return the URL path of a search by its id or study."""
    # A command line may have bytes that are not UTF-8, which no study's name has.
    return f"/v1/searches/{quote(search, safe='', errors='surrogateescape')}"


@dataclass(frozen=True, slots=True)
class StreamedEvent:
    """An event of a search. ``number`` is ``None`` for a ``status`` event, which the service does not keep."""

    kind: str
    document: Document
    number: int | None


class _PinnedSocket(ssl.SSLSocket):
    """A TLS socket that accepts a server only with the certificate that its context has as ``pinned``."""

    def do_handshake(self, block: bool = False) -> None:
        """Do the TLS handshake. Raises ``ssl.SSLCertVerificationError`` for any certificate but the pinned one."""
        super().do_handshake(block)
        if self.getpeercert(binary_form=True) != getattr(self.context, "pinned", None):
            raise ssl.SSLCertVerificationError(f"it is not the one in the file that {CERTIFICATE_VARIABLE} names")


class _PinnedContext(ssl.SSLContext):
    """A TLS context that trusts one certificate, whoever signed it and whatever host it names."""

    sslsocket_class = _PinnedSocket
    pinned: bytes
    """The certificate, DER-encoded."""


def _tls_context() -> ssl.SSLContext:
    """Return a TLS context that trusts the certificate in the environment variable, or the system's certificates."""
    pem = _pinned_certificate()
    if pem is None:
        return ssl.create_default_context()
    context = _PinnedContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=pem)
    # Trust it although it may be signed by an authority that is not trusted here.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.check_hostname = False
    context.pinned = ssl.PEM_cert_to_DER_cert(pem)
    return context


def _pinned_certificate() -> str | None:
    """Return the service's certificate (PEM), the first in the file that the variable names; ``None`` if unset."""
    path = os.environ.get(CERTIFICATE_VARIABLE)
    if not path:
        return None
    try:
        found = _PEM.search(Path(path).read_text(encoding="latin-1"))
        if found is None:
            raise ValueError("there is no certificate in it")
        # Raises ``ssl.SSLError``, an ``OSError``, where the text is no certificate.
        ssl.create_default_context(cadata=found[0])
    except (OSError, ValueError) as error:
        raise ServiceError(
            f"{CERTIFICATE_VARIABLE} names {path}, which is no certificate that can be read",
            "have it name the file that autotune serve was given as --ssl-certfile",
        ) from error
    return found[0]


class Client:
    """A client of the service at a URL. Without ``token``, it is in the URL (``#token=…``) or in AUTOTUNE_TOKEN.

    Raises ``ServiceError`` for an invalid URL, token or certificate file.
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        try:
            parts = urlsplit(url if "//" in url else f"http://{url}")
            if not re.fullmatch(r"[A-Za-z0-9._:%-]+", (parts.hostname or "").encode("idna").decode()):
                raise ValueError(f"{parts.hostname!r} is not a host name")
            # Raises ``ValueError`` for an invalid port.
            _ = parts.port
        except ValueError as error:
            raise ServiceError(
                f"{url[:200]!r} is not the URL of a service", "write it as http://127.0.0.1:8321"
            ) from error
        if parts.scheme not in ("http", "https"):
            raise ServiceError(f"{url[:200]!r} begins with neither http:// nor https://", "correct --server")
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        in_url = parse_qs(parts.fragment).get("token", [""])[0]
        token_text = token or in_url or os.environ.get(TOKEN_VARIABLE, "")
        if not re.fullmatch(r"[!-~]*", token_text):
            raise ServiceError("the token has characters that no token has", f"see --server and {TOKEN_VARIABLE}")
        headers = {"Accept": "application/json", **({"Authorization": f"Bearer {token_text}"} if token_text else {})}
        try:
            # The certificate is read once: a service keeps the one that it started with when the file is renewed.
            # Proxies in the environment are for the Internet, and not used here.
            self._http = httpx2.Client(
                base_url=self.url,
                headers=headers,
                timeout=_TIMEOUT_SECONDS,
                verify=_tls_context() if parts.scheme == "https" else False,
                trust_env=False,
            )
        except httpx2.InvalidURL as error:
            raise ServiceError(f"{url[:200]!r} is not the URL of a service: {error}", "correct --server") from error

    def _unreachable(self, error: Exception) -> ServiceError:
        """Return the error, of status 0, for a service that cannot be reached, with the reason among its causes."""
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, ssl.SSLCertVerificationError):
                why = getattr(cause, "verify_message", None) or str(cause)
                return ServiceError(
                    f"the certificate of {self.url} is not trusted here: {why}",
                    f"have {CERTIFICATE_VARIABLE} name a file with it, or correct --server",
                    status=0,
                )
            if isinstance(cause, OSError) and cause.strerror:
                break
            cause = cause.__cause__ or cause.__context__
        why = getattr(cause, "strerror", None) or str(error) or type(error).__name__
        return ServiceError(
            f"no service answers at {self.url}: {why}", "start one with autotune serve, or correct --server", status=0
        )

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, Any] | None = None,
        timeout_seconds: float = _TIMEOUT_SECONDS,
    ) -> Any:
        """Send a request; return the response's JSON or text, ``None`` if it is empty. Raises the error it reports."""
        response = self._answer(method, path, json=body, params=query, timeout=timeout_seconds)
        kind = response.headers.get("content-type", "").partition(";")[0].strip()
        is_json = kind == "application/json" or kind.endswith("+json")
        if not response.content:
            return None
        if not is_json:
            return response.text
        try:
            return response.json()
        except ValueError as error:
            raise self._foreign_response(response.status_code) from error

    def fetch(self, path: str, query: Mapping[str, Any]) -> tuple[str, Mapping[str, str]]:
        """Send a GET request; return the response's text and headers. Raises errors as ``request`` does."""
        response = self._answer("GET", path, params=query)
        return response.text, response.headers

    def _answer(self, method: str, path: str, **options: Any) -> httpx2.Response:
        """Send a request and return the response. Raises the error that a status of 400 or above reports."""
        try:
            response = self._http.request(method, path, **options)
        except httpx2.HTTPError as error:
            raise self._unreachable(error) from error
        if response.status_code >= 400:
            raise self._error(response)
        return response

    def _error(self, response: httpx2.Response) -> Exception:
        """Return the error in a response's problem document; another for a response without one, as from a proxy."""
        try:
            problem = response.json()
        except ValueError:
            problem = None
        return error_of(problem) if isinstance(problem, dict) else self._foreign_response(response.status_code)

    def _foreign_response(self, status: int) -> ServiceError:
        """Return the error for a response that does not come from an autotune service."""
        return ServiceError(
            f"{self.url} answered {status}, which is not an answer of an autotune service",
            "correct --server",
            status=status,
        )

    def events(self, search: str, after: int = 0) -> Iterator[StreamedEvent]:
        """Yield a search's events above number ``after`` to its end. Raises ``ServiceError`` if it cannot reconnect."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            try:
                for event in self._stream(search, after):
                    deadline = time.monotonic() + _PATIENCE_SECONDS
                    after = event.number or after
                    yield event
                    if event.kind == "state" and event.document.get("state") in ("finished", "failed", "cancelled"):
                        return
            except ServiceError as error:
                # Status 0: there was no HTTP response.
                if error.status != 0 or time.monotonic() > deadline:
                    raise
            time.sleep(0.5)

    def _stream(self, search: str, after: int) -> Iterator[StreamedEvent]:
        """Yield the events numbered above ``after`` until the connection ends. Raises ``ServiceError``."""
        headers = {"Last-Event-ID": str(after)}
        try:
            with self._http.sse(f"{path_of(search)}/events", headers=headers, timeout=_SILENCE_SECONDS) as source:
                if source.response.status_code >= 400:
                    source.response.read()
                    raise self._error(source.response)
                for event in source:
                    # A status event has no id; SSE clients then report the id of the event before it.
                    number = int(event.id) if event.id and event.event != "status" else None
                    yield StreamedEvent(event.event, json.loads(event.data), number)
        except httpx2.HTTPError as error:
            raise self._unreachable(error) from error
        except ValueError as error:
            raise ServiceError(f"{self.url} sent what is no event: {error}", "correct --server", status=0) from error
