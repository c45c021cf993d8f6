"""Test what a client says of a service's address before it connects."""

from __future__ import annotations

import http.server
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.core.errors import ServiceError, StorageError
from autotune.service.agent import _is_passing
from autotune.service.client import CERTIFICATE_VARIABLE, Client
from autotune.service.problems import error_of


@pytest.mark.parametrize(
    "url",
    ["", " ", "../..", "http://", "a b", "\x80", "http://[::1", "host:99999999", "x" * 300, "ftp://a", "\udcff"],
)
def test_an_address_that_can_be_none_is_refused(url: str) -> None:
    with pytest.raises(ServiceError) as told:
        Client(url)
    assert "\n" not in told.value.message
    assert told.value.hint


@pytest.mark.parametrize("url", ["gpu-box", "http://127.0.0.1:8321", "https://bücher.example", "http://[::1]:8321/"])
def test_an_address_of_a_service_is_taken(url: str) -> None:
    assert Client(url).url.startswith("http")


def test_a_token_that_no_header_can_bear_is_refused() -> None:
    with pytest.raises(ServiceError, match="token"):
        Client("gpu-box", token="a\nb")


def test_an_agent_asks_again_where_the_service_is_away_or_its_disk_is_full() -> None:
    assert _is_passing(StorageError("a.db cannot grow: the disk is full"))
    assert _is_passing(error_of({"exit_code": 5, "status": 503, "detail": "a.db cannot grow"}))
    assert _is_passing(ServiceError("no service answers", status=0))
    assert _is_passing(ServiceError("answered 502, which is not an answer of an autotune service", status=502))
    assert not _is_passing(ServiceError("this needs a token", status=401))
    assert not _is_passing(ServiceError("the lease was lost", status=410))


@pytest.fixture
def tls_server(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A server with a certificate that nobody has signed, for another host; its address and the certificate."""
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=gpu-box"]
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl here")
    subprocess.run([*words, "-keyout", key, "-out", certificate], check=True, capture_output=True, timeout=60)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Answers) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"https://127.0.0.1:{server.server_port}", certificate
        server.shutdown()


def test_a_certificate_that_is_named_is_trusted_and_no_other(
    tls_server: tuple[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url, certificate = tls_server
    with pytest.raises(ServiceError, match="is not trusted here: self-signed certificate") as told:
        Client(url).request("GET", "/")
    assert CERTIFICATE_VARIABLE in told.value.hint
    monkeypatch.setenv(CERTIFICATE_VARIABLE, str(certificate))
    assert Client(url).request("GET", "/") is None
    monkeypatch.setenv(CERTIFICATE_VARIABLE, str(tmp_path / "missing"))
    with pytest.raises(ServiceError, match="which is no certificate that can be read"):
        Client(url).request("GET", "/")
