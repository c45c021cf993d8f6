"""Speak to a service over HTTP, with the standard library alone: for the command line and for agents."""

from __future__ import annotations

import http.client
import json
import os
import re
import ssl
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlencode, urlsplit

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


@dataclass(frozen=True, slots=True)
class StreamedEvent:
    """Something that happened to a search; ``number`` is ``None`` for what runs now, which is not kept."""

    kind: str
    document: Document
    number: int | None


def _host_name(name: str | None) -> str:
    """Return a host's name as DNS has it; raises ``ValueError`` for what can be none."""
    plain = (name or "").encode("idna").decode()
    if not re.fullmatch(r"[A-Za-z0-9._:%-]+", plain):
        raise ValueError(f"{name!r} is not a host name")
    return plain


class _PinnedConnection(http.client.HTTPSConnection):
    """A TLS connection to the holder of one certificate."""

    def __init__(self, host: str, port: int | None, *, timeout: float, pem: str) -> None:
        context = ssl.create_default_context(cadata=pem)
        # Nobody need have signed it, and the service may be known here by another name.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        context.check_hostname = False
        super().__init__(host, port, timeout=timeout, context=context)
        self._certificate = ssl.PEM_cert_to_DER_cert(pem)

    def connect(self) -> None:
        """Connect; raises ``ssl.SSLCertVerificationError`` for another certificate, also one that this one signed."""
        super().connect()
        if self.sock.getpeercert(binary_form=True) != self._certificate:
            self.close()
            raise ssl.SSLCertVerificationError(f"it is not the one in the file that {CERTIFICATE_VARIABLE} names")


def _pinned_certificate() -> str | None:
    """Return the certificate that the environment names; of a file with a chain, the first, which is the service's."""
    path = os.environ.get(CERTIFICATE_VARIABLE)
    if not path:
        return None
    try:
        found = _PEM.search(Path(path).read_text(encoding="latin-1"))
        if found is None:
            raise ValueError("there is no certificate in it")
        ssl.create_default_context(cadata=found[0])
    except (OSError, ValueError) as error:
        raise ServiceError(
            f"{CERTIFICATE_VARIABLE} names {path}, which is no certificate that can be read",
            "have it name the file that autotune serve was given as --ssl-certfile",
        ) from error
    return found[0]


class Client:
    """A service at a URL. The token is in the URL's fragment (``#token=…``) or in AUTOTUNE_TOKEN."""

    def __init__(self, url: str, token: str | None = None, timeout_seconds: float = _TIMEOUT_SECONDS) -> None:
        try:
            parts = urlsplit(url if "//" in url else f"http://{url}")
            self._host, self._port = _host_name(parts.hostname), parts.port
        except ValueError as error:
            raise ServiceError(
                f"{url[:200]!r} is not the URL of a service", "write it as http://127.0.0.1:8321"
            ) from error
        if parts.scheme not in ("http", "https"):
            raise ServiceError(f"{url[:200]!r} begins with neither http:// nor https://", "correct --server")
        self._is_tls = parts.scheme == "https"
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        in_url = parse_qs(parts.fragment).get("token", [""])[0]
        self._token = token or in_url or os.environ.get(TOKEN_VARIABLE, "")
        if not re.fullmatch(r"[!-~]*", self._token):
            raise ServiceError("the token has characters that no token has", f"see --server and {TOKEN_VARIABLE}")
        self._timeout_seconds = timeout_seconds
        # Read once: a service goes on with the certificate that it started with when the file is renewed.
        self._certificate = _pinned_certificate() if self._is_tls else None

    def _connect(self, timeout_seconds: float) -> http.client.HTTPConnection:
        if self._certificate is not None:
            return _PinnedConnection(self._host, self._port, timeout=timeout_seconds, pem=self._certificate)
        if self._is_tls:
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(self._host, self._port, timeout=timeout_seconds, context=context)
        return http.client.HTTPConnection(self._host, self._port, timeout=timeout_seconds)

    def _send(
        self,
        method: str,
        path: str,
        body: Any,
        headers: Mapping[str, str],
        timeout_seconds: float,
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Send a request; the caller closes the connection. ``ServiceError`` where there is no answer."""
        connection = self._connect(timeout_seconds)
        every = {"Accept": "application/json", **headers}
        if self._token:
            every["Authorization"] = f"Bearer {self._token}"
        data = None if body is None else json.dumps(body).encode()
        if data is not None:
            every["Content-Type"] = "application/json"
        try:
            connection.request(method, path, data, every)
            return connection, connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> ServiceError:
        if isinstance(error, ssl.SSLCertVerificationError):
            why = getattr(error, "verify_message", None) or str(error)
            return ServiceError(
                f"the certificate of {self.url} is not trusted here: {why}",
                f"have {CERTIFICATE_VARIABLE} name a file with it, or correct --server",
                status=0,
            )
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return ServiceError(
            f"no service answers at {self.url}: {why}", "start one with autotune serve, or correct --server", status=0
        )

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        query: Mapping[str, Any] | None = None,
        timeout_seconds: float | None = None,
    ) -> Any:
        """Send a request and return the JSON, or the text, of the answer; raises what its problem stands for."""
        target = path + ("?" + urlencode(query, doseq=True) if query else "")
        seconds = timeout_seconds or self._timeout_seconds
        connection, response = self._send(method, target, body, headers or {}, seconds)
        try:
            data = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from error
        finally:
            connection.close()
        kind = response.headers.get_content_type()
        is_json = kind == "application/json" or kind.endswith("+json")
        if response.status >= 400:
            raise self._error(response.status, data, is_json=is_json)
        if not data:
            return None
        return json.loads(data) if is_json else data.decode("utf-8", "replace")

    def _error(self, status: int, data: bytes, *, is_json: bool) -> Exception:
        problem: Any = None
        if is_json:
            problem = json.loads(data)
        if isinstance(problem, dict):
            return error_of(problem)
        return ServiceError(
            f"{self.url} answered {status}, which is not an answer of an autotune service",
            "correct --server",
            status=status,
        )

    def events(self, search: str, after: int = 0) -> Iterator[StreamedEvent]:
        """Follow a search to its end; a connection that is lost is made again, and goes on where it was."""
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
                if error.status != 0 or time.monotonic() > deadline:
                    raise
            time.sleep(0.5)

    def _stream(self, search: str, after: int) -> Iterator[StreamedEvent]:
        path = f"/v1/searches/{quote(search, safe='')}/events"
        headers = {"Accept": "text/event-stream", "Last-Event-ID": str(after)}
        connection, response = self._send("GET", path, None, headers, _SILENCE_SECONDS)
        try:
            if response.status >= 400:
                raise self._error(response.status, response.read(), is_json=True)
            fields: dict[str, str] = {}
            while line := response.readline():
                text = line.decode().rstrip("\r\n")
                if text:
                    name, _, value = text.partition(":")
                    fields[name] = value.removeprefix(" ")
                elif "data" in fields:
                    number = int(fields["id"]) if "id" in fields else None
                    yield StreamedEvent(fields.get("event", "message"), json.loads(fields["data"]), number)
                    fields = {}
                else:
                    fields = {}
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from error
        finally:
            connection.close()
