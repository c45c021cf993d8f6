"""Attempts on a service, each by a real client: without a token, from other sites, with paths, code and huge bodies."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from serving import StandInEngine, waits_for_state, with_token
from starlette.testclient import TestClient

from autotune.core.errors import InvalidRequestError
from autotune.service import access
from autotune.service.access import MOST_BODY_BYTES
from autotune.service.searches import Searches
from autotune.service.server import Settings
from autotune.store.queue import digest_of
from autotune.store.repository import Store

JSON = {"Content-Type": "application/json"}
TINY = {"model": "bert-tiny", "effective_batch": 16}
_PARTS = ("", "/trials", "/events", "/export", "/report", "/trials/0/log")
READING = [
    "/v1/searches",
    "/v1/verify/x",
    *(f"/v1/searches/x{part}" for part in _PARTS),
    "/v1/devices",
    "/metrics",
    "/openapi.json",
]


@pytest.mark.parametrize("path", READING)
def test_without_a_token_nothing_is_shown(server: TestClient, path: str) -> None:
    answer = server.get(path)
    assert answer.status_code == 401
    assert "needs a token" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/v1/searches"), ("POST", "/v1/verify"), ("DELETE", "/v1/searches/x")]
)
def test_who_may_only_read_changes_nothing(server: TestClient, reader: TestClient, method: str, path: str) -> None:
    assert server.request(method, path, json={}).status_code == 401
    refused = reader.request(method, path, json={})
    assert refused.status_code == 403
    assert "may only read" in refused.json()["detail"]
    assert reader.get("/v1/searches").status_code == 200


def test_a_removed_token_is_refused_soon(server: TestClient, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    later = 0.0
    monkeypatch.setattr(access, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + later))
    client = with_token(server, store.queue.add_token("gone", "run"))
    assert client.get("/v1/searches").status_code == 200
    store.queue.remove_token("gone")
    later = access._BELIEVED_SECONDS
    assert client.get("/v1/searches").status_code == 401


@pytest.mark.parametrize("searches", ["sqlite"], indirect=True)
def test_tokens_are_stored_as_digests_alone(store: Store) -> None:
    token = store.queue.add_token("ann", "run")
    assert store.path is not None
    content = b"".join(path.read_bytes() for path in store.path.parent.iterdir() if path.is_file())
    assert token.encode() not in content
    assert digest_of(token).encode() in content


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "192.168.0.7:8321", "", "localhost.evil"])
def test_other_host_names_are_refused(writer: TestClient, host: str) -> None:
    assert writer.get("/v1/searches", headers={"Host": host}).status_code == 421
    assert writer.get("/healthz", headers={"Host": host}).status_code == 421


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1.evil.example"},
        {"Origin": "http://127.0.0.1:9999"},
        {"Sec-Fetch-Site": "cross-site"},
    ],
)
def test_requests_from_other_sites_are_refused(writer: TestClient, headers: dict[str, str]) -> None:
    refused = writer.post("/v1/searches", json=TINY, headers=headers)
    assert refused.status_code == 403
    assert writer.get("/v1/searches").json() == {"searches": []}
    own = {"Origin": "http://127.0.0.1", "Sec-Fetch-Site": "same-origin"}
    assert writer.post("/v1/searches", json=TINY, headers=own).status_code == 202


def test_a_huge_body_is_refused_unread(writer: TestClient) -> None:
    def more_than_is_taken() -> Iterator[bytes]:
        for _ in range(3):
            yield b"x" * MOST_BODY_BYTES

    declared = writer.post("/v1/searches", content=b"{}", headers={"Content-Length": str(2**30)})
    assert declared.status_code == 413
    assert writer.post("/v1/searches", content=b"{}", headers={"Content-Length": "1e9"}).status_code == 400
    streamed = writer.post("/v1/searches", content=more_than_is_taken())
    assert streamed.status_code == 413
    deep = writer.post("/v1/searches", content=b"[" * 100_000, headers={"Content-Type": "application/json"})
    assert deep.status_code == 422


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", "/etc"),
        ("model", "~/secret"),
        ("model", "../../etc"),
        ("model", "./model"),
        ("model", "x/../../../etc"),
        ("model", "..\\etc"),
        ("dataset", "/etc/passwd"),
        ("tokenizer", "/root/.ssh"),
    ],
)
def test_paths_outside_the_operators_folders_are_refused(writer: TestClient, name: str, value: str) -> None:
    refused = writer.post("/v1/searches", json={**TINY, "dataset": "imdb", name: value})
    assert refused.status_code == 422
    assert "reads no files at" in refused.json()["detail"]
    assert "root:" not in refused.text


def test_a_path_within_the_operators_folders_is_allowed_but_for_links_out_of_them(
    writer: TestClient, data_folder: Path, tmp_path: Path
) -> None:
    (data_folder / "mine.jsonl").write_text('{"text": "a", "label": 0}\n')
    (data_folder / "link").symlink_to("/etc")
    allowed = writer.post("/v1/searches", json={**TINY, "dataset": str(data_folder / "mine.jsonl")})
    assert allowed.status_code == 202
    for path in (data_folder / "link", data_folder / ".." / "studies", tmp_path):
        refused = writer.post("/v1/searches", json={**TINY, "dataset": str(path)})
        assert "reads no files at" in refused.json()["detail"], path
        assert str(data_folder) in refused.json()["hint"]


@pytest.mark.parametrize(
    "code",
    [
        {"trainer": "train.py:build"},
        {"loop": "train.py:train"},
        {"script": ["python", "-c", "import os"]},
        {"trust_remote_code": True},
        {"model": {"__class__": "x"}},
    ],
)
def test_no_code_comes_over_http(writer: TestClient, code: dict[str, object]) -> None:
    refused = writer.post("/v1/searches", json={**TINY, **code})
    assert refused.status_code == 422
    assert writer.get("/v1/searches").json() == {"searches": []}


@pytest.mark.parametrize("path", ["/v1/searches/..%2f..%2fetc%2fpasswd", "/assets/../app.py", "/assets/%2e%2e/app.py",
                                  "/assets/..%2fapp.py", "/v1/searches/x'%20OR%201=1--"])  # fmt: skip
def test_paths_of_the_url_lead_nowhere(writer: TestClient, path: str) -> None:
    answer = writer.get(path)
    assert answer.status_code == 404
    assert "import" not in answer.text


def test_every_answer_tells_browsers_to_be_careful(writer: TestClient) -> None:
    headers = writer.get("/v1/searches").headers
    assert headers["content-security-policy"].startswith("default-src 'self'")
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"
    assert headers["cache-control"] == "no-store"


def test_a_public_address_needs_tls(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "::", "192.168.0.7", "gpu-box"):
        with pytest.raises(InvalidRequestError, match="unencrypted"):
            Settings("a.db", host=host).check()
    for host in ("127.0.0.1", "localhost", "::1"):
        Settings("a.db", host=host).check()
    file = tmp_path / "cert.pem"
    file.write_text("")
    Settings("a.db", host="0.0.0.0", certificate=file, key=file).check()
    with pytest.raises(InvalidRequestError, match="a certificate and its key"):
        Settings("a.db", certificate=file).check()


@pytest.mark.parametrize(
    ("host", "names", "expected"),
    [
        ("127.0.0.1", (), ("http://127.0.0.1:8321", "http://127.0.0.1:8321")),
        ("0.0.0.0", ("gpu-box",), ("http://127.0.0.1:8321", "http://gpu-box:8321")),
        ("::", (), ("http://[::1]:8321", "http://[::1]:8321")),
        ("127.0.0.1", ("gpu-box",), ("http://127.0.0.1:8321", "http://127.0.0.1:8321")),
    ],
)
def test_a_service_has_an_address_here_and_one_for_others(
    host: str, names: tuple[str, ...], expected: tuple[str, str]
) -> None:
    settings = Settings("a.db", host=host, names=names)
    assert (settings.url, settings.shown_url) == expected


def test_a_token_that_submits_in_a_loop_is_stopped(
    writer: TestClient, server: TestClient, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotune.service.access.MOST_SUBMISSIONS", 2)
    codes = [writer.post("/v1/searches", json={**TINY, "seed": seed}).status_code for seed in range(3)]
    assert codes == [202, 202, 429]
    assert "within a minute" in writer.post("/v1/verify", json={"study": "x"}).json()["detail"]
    assert writer.get("/v1/searches").status_code == 200
    other = with_token(server, store.queue.add_token("other", "run"))
    assert other.post("/v1/searches", json=TINY).status_code in (200, 202)


def test_odd_values_are_refused_and_break_no_page(
    writer: TestClient, searches: Searches, on_cpu: StandInEngine
) -> None:
    for path in (f"?before={10**30}", "?study=%00", "/%00", "/%FF", f"/x/events?after={10**30}"):
        assert writer.get(f"/v1/searches{path}").status_code in (200, 404, 422), path
    assert writer.get("/v1/verify/%00").status_code == 404
    for odd in (
        {"needs": {"count": 2**59}},
        {"needs": {"gpu": "\ud800"}},
        {"seed": 10**30},
        {"study": "\ud800"},
        {"dataset": "\ud800"},
    ):
        answer = writer.post("/v1/searches", content=json.dumps({**TINY, **odd}))
        assert answer.status_code == 422, odd
    assert writer.post("/v1/verify", content=b'{"study": "\\ud800"}', headers=JSON).status_code == 422
    writer.post("/v1/searches", json=TINY)
    run = on_cpu.next_run()
    # What cannot be shown as JSON, or on a page, is left out.
    run.add("status", {"running": float("nan")})
    run.end("failed", {"message": {"odd": 1}})
    waits_for_state(searches, run.job, "failed")
    for path in ("/", f"/searches/{run.job}", f"/v1/searches/{run.job}", "/v1/searches", "/metrics"):
        assert writer.get(path).status_code == 200, path
    assert "NaN" not in writer.get(f"/v1/searches/{run.job}/events").text
