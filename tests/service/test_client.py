"""Test what a client says of a service's address before it connects."""

import contextlib
import http.server
import json
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.core.errors import ServiceError
from autotune.service.client import CERTIFICATE_VARIABLE, Client, path_of


@pytest.mark.parametrize(
    "url", ["", " ", "../..", "http://", "a b", "\x80", "http://[::1", "host:99999999", "x" * 300, "ftp://a", "\udcff"]
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


class _Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def make_certificate(folder: Path, name: str, *more: str) -> Path:
    """Make a certificate for another host than this one; its key lies beside it."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl here")
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", f"/CN={name}", *more]
    words += ["-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.pem")]
    subprocess.run(words, check=True, capture_output=True, timeout=240)
    return folder / f"{name}.pem"


@contextlib.contextmanager
def tls_server(certificate: Path) -> Iterator[str]:
    """Run a server with a certificate; yield its address."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.with_suffix(".key"))
    with http.server.HTTPServer(("127.0.0.1", 0), _Answers) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"https://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_certificate_that_is_named_is_trusted_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate = make_certificate(tmp_path, "gpu-box")
    with tls_server(certificate) as url:
        with pytest.raises(ServiceError, match="is not trusted here: self-signed certificate") as told:
            Client(url).request("GET", "/")
        assert CERTIFICATE_VARIABLE in told.value.hint
        monkeypatch.setenv(CERTIFICATE_VARIABLE, str(certificate))
        assert Client(url).request("GET", "/") is None
        for broken, text in (("missing", None), ("empty", ""), ("key", certificate.with_suffix(".key").read_text())):
            if text is not None:
                (tmp_path / broken).write_text(text)
            monkeypatch.setenv(CERTIFICATE_VARIABLE, str(tmp_path / broken))
            with pytest.raises(ServiceError, match="which is no certificate that can be read"):
                Client(url).request("GET", "/")


@pytest.mark.parametrize("named", ["chain", "authority"])
def test_what_the_authority_of_a_named_certificate_signed_besides_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    """A file that a service is given often ends with the certificate of the authority that signed the first one."""
    authority = make_certificate(tmp_path, "authority")
    by = ("-CA", str(authority), "-CAkey", str(authority.with_suffix(".key")))
    service, other = (make_certificate(tmp_path, name, *by) for name in ("gpu-box", "other"))
    chain = tmp_path / "chain"
    chain.write_text(service.read_text() + authority.read_text())
    monkeypatch.setenv(CERTIFICATE_VARIABLE, str(tmp_path / "chain" if named == "chain" else authority))
    with tls_server(other) as url, pytest.raises(ServiceError, match="is not trusted here"):
        Client(url).request("GET", "/")
    if named == "chain":
        with tls_server(service) as url:
            assert Client(url).request("GET", "/") is None


@contextlib.contextmanager
def answering(status: int, kind: str, body: bytes) -> Iterator[Client]:
    """Run a server that answers everything in one way; yield a client of it."""

    class Answers(_Answers):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with http.server.HTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Client(f"http://127.0.0.1:{server.server_port}", "token")
        server.shutdown()


@pytest.mark.parametrize(
    ("status", "kind", "body"),
    [
        (502, "application/json", b""),
        (502, "application/problem+json", b"<html>"),
        (503, "text/html", b"<html>away</html>"),
        (200, "application/json", b"<html>"),
        (502, "application/json", b"[]"),
    ],
)
def test_what_a_proxy_answers_is_told_in_a_line(status: int, kind: str, body: bytes) -> None:
    with answering(status, kind, body) as client:
        with pytest.raises(ServiceError, match=f"answered {status}, which is not an answer of an autotune") as told:
            client.request("GET", "/v1/searches")
        assert told.value.status == status
        if status != 200:
            with pytest.raises(ServiceError, match=f"answered {status}"):
                next(client.events("x"))


@pytest.mark.parametrize("status", [404, 409, 410, 429, 500, 503])
def test_a_problem_of_the_service_keeps_its_status(status: int) -> None:
    body = json.dumps({"status": status, "detail": "it is so", "hint": "do this", "exit_code": 13}).encode()
    with answering(status, "application/problem+json", body) as client:
        with pytest.raises(ServiceError, match=r"it is so\. do this") as told:
            client.request("GET", "/v1/searches")
        assert told.value.status == status


def test_a_name_that_is_not_utf8_has_a_path() -> None:
    assert path_of("a/\udcff") == "/v1/searches/a%2F%FF"
