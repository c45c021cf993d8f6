"""What clients cannot do to each other: hold connections, guess tokens, change what is another's, stop /healthz."""

import contextlib
import logging
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from crowd import limited
from processes import all_gone, wait_until
from served import Service
from serving import StandInEngine, waits_for_state, with_token
from sqlalchemy import event
from standing_in import with_devices
from starlette.testclient import TestClient

from autotune.core.ceiling import Ceiling
from autotune.core.errors import ServiceError, StorageError
from autotune.core.schema import encode
from autotune.service import access, routes
from autotune.service.access import OncePerMinute
from autotune.service.predictions import Predictions
from autotune.service.searches import Searches
from autotune.service.server import Settings, serve
from autotune.store.records import StudyRecord
from autotune.store.repository import Store

TINY = {"model": "bert-tiny", "effective_batch": 16, "seq_len": 32}


@pytest.fixture
def crowded(tmp_path: Path) -> Iterator[Service]:
    """A service that may open few files."""
    with Service(tmp_path, with_devices(tmp_path, {})) as service:
        service.serve("--storage", "a.db", **limited(256))
        yield service


def test_connections_that_ask_for_nothing_keep_nobody_out(crowded: Service) -> None:
    address = ("127.0.0.1", int(crowded.url.rpartition(":")[2]))
    with contextlib.ExitStack() as stack:
        # More than the service may open.
        for _ in range(400):
            half = stack.enter_context(socket.create_connection(address, timeout=120))
            half.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n")
        assert crowded.call("GET", "/v1/searches") == {"searches": []}
    assert len(crowded.text("serve.err")) < 100_000
    assert (crowded.folder / "a.db").stat().st_mode & 0o077 == 0


def test_what_cannot_be_accepted_is_logged_once_a_minute() -> None:
    quiet = OncePerMinute()
    record = logging.LogRecord("asyncio", logging.ERROR, "", 0, "socket.accept() out of system resource", (), None)
    other = logging.LogRecord("asyncio", logging.ERROR, "", 0, "something else", (), None)
    assert [quiet.filter(record), quiet.filter(record), quiet.filter(other)] == [True, False, True]


def test_wrong_tokens_from_one_address_are_refused_without_a_look(
    server: TestClient, writer: TestClient, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    # All within the same second.
    monkeypatch.setattr(access, "time", SimpleNamespace(monotonic=lambda: 0.0))
    assert writer.get("/v1/searches").status_code == 200
    event.listen(store.engine, "before_cursor_execute", lambda *told: asked.append(told[2]))
    told = [with_token(server, f"at_{number}").get("/v1/searches") for number in range(access._MOST_GUESSES + 30)]
    assert [answer.status_code for answer in told] == [401] * access._MOST_GUESSES + [429] * 30
    assert told[0].json()["detail"] == "this token is not known"
    looks = [statement for statement in asked if "autotune_tokens" in statement]
    # Once for each guess that is allowed.
    assert access._MOST_GUESSES <= len(looks) <= access._MOST_GUESSES + 1
    assert writer.get("/v1/searches").status_code == 200


def test_a_token_changes_its_own_searches_alone_and_an_admin_all(
    server: TestClient, writer: TestClient, store: Store, searches: Searches, caplog: pytest.LogCaptureFixture
) -> None:
    mine = writer.post("/v1/searches", json={**TINY, "study": "mine"}).json()
    other = with_token(server, store.queue.add_token("other", "run"))
    admin = with_token(server, store.queue.add_token("root", "admin"))
    refused = other.delete(f"/v1/searches/{mine['id']}")
    assert (refused.status_code, refused.json()["detail"]) == (403, "the search 'mine' belongs to 'writer'")
    # Nor does it go on with another's study.
    assert other.post("/v1/searches", json={**TINY, "study": "mine", "seed": 1}).status_code == 403
    assert searches.job(mine["id"]).state == "queued"
    with caplog.at_level(logging.INFO, logger="autotune.service"):
        assert admin.delete(f"/v1/searches/{mine['id']}").json()["state"] == "cancelled"
    (said,) = [record for record in caplog.records if record.getMessage() == "search cancelled"]
    assert said.__dict__["fields"] == {"search": mine["id"], "study": "mine", "by": "root"}


def test_a_study_of_the_command_line_belongs_to_the_admins(
    server: TestClient, writer: TestClient, store: Store
) -> None:
    store.create_study(
        StudyRecord(
            "theirs",
            store.intern_workload({}, "w"),
            store.intern_environment({}, "e"),
            {},
            encode(Ceiling(None, 2**34, 0)),
            "0.1.0",
        )
    )
    refused = writer.post("/v1/searches", json={**TINY, "study": "theirs"})
    assert refused.status_code == 403
    assert refused.json()["detail"] == "the study 'theirs' was made on the command line, and belongs to the admins"
    admin = with_token(server, store.queue.add_token("root", "admin"))
    assert admin.post("/v1/searches", json={**TINY, "study": "theirs"}).status_code in (200, 201, 202)


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ({"dataset": "a" * 300}, "dataset is 300 letters long"),
        ({"model": "a" * 100_000}, "model is 100000 letters long"),
        ({"dataset": "\x1b]0;owned\x07"}, "dataset '\\x1b]0;owned\\x07' has characters that cannot be shown"),
        ({"precision": ["fp32"] * 100_000}, "precision has 100000 values"),
        ({"study": "verify mine"}, "verifications are named so"),
    ],
)
def test_what_is_too_long_for_a_search_is_refused_in_a_line(writer: TestClient, odd: object, words: str) -> None:
    assert isinstance(odd, dict)
    refused = writer.post("/v1/searches", json={**TINY, **odd})
    assert (refused.status_code, words in refused.json()["detail"]) == (422, True), refused.text[:300]
    assert len(refused.text) < 1000


def test_health_is_told_soon_and_says_nothing_of_the_database(
    server: TestClient, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "_HEALTH_SECONDS", 0.5)
    is_over = threading.Event()

    def hang() -> int:
        is_over.wait(60)
        raise StorageError("postgresql://secret@db/autotune does not answer")

    store.queue.count_queued = hang  # type: ignore[method-assign]
    answer = server.get("/healthz")
    is_over.set()
    assert (answer.status_code, answer.json()["detail"]) == (503, "the database does not answer")
    assert wait_until(lambda: server.get("/healthz").status_code == 503)
    assert "secret" not in server.get("/healthz").text


def test_a_full_disk_and_a_device_that_is_down_are_told(
    server: TestClient, store: Store, engine: StandInEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server.get("/healthz").json()["status"] == "ok"
    monkeypatch.setattr(engine, "problems", lambda: ["the process for searches on cuda:0 has ended"])
    assert server.get("/healthz").json()["status"] == "degraded"
    monkeypatch.setattr(routes, "_LEAST_FREE_BYTES", 2**70)
    told = server.get("/healthz")
    if store.path is not None:
        assert (told.status_code, told.json()["detail"]) == (503, "the disk of the database is full")


def test_a_finished_search_without_a_result_is_looked_at_again(
    writer: TestClient, searches: Searches, on_cpu: StandInEngine
) -> None:
    job = writer.post("/v1/searches", json=TINY).json()["id"]
    on_cpu.next_run().end("finished")
    waits_for_state(searches, job, "finished")
    found = searches.store.queue.jobs(states=["finished"])
    assert searches.result_lines(found) == {job: "no result"}
    searches._line_of_study = lambda job: "302.9 samples/s"  # type: ignore[method-assign]
    searches.store.names_of = lambda names: set(names)  # type: ignore[method-assign]
    assert searches.result_lines(found) == {job: "302.9 samples/s"}


def test_a_prediction_that_takes_too_long_is_ended_with_all_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = tmp_path / "pids"
    (tmp_path / "sleeps_twice.py").write_text(f"""
import os, subprocess
child = subprocess.Popen(["sleep", "1000"])
open({str(pids)!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
child.wait()
""")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for most_seconds in (2.0, 20.0, 100.0):
        predictions = Predictions("a.db", most_seconds=most_seconds, module="sleeps_twice")
        with pytest.raises(ServiceError, match=f"took longer than {most_seconds:.0f} s") as told:
            predictions.predict("predict", {"model": "gpt2"})
        assert told.value.status == 503
        # On a busy machine it may not have begun by then.
        if pids.exists() and len(pids.read_text().split()) == 2:
            break
    assert all_gone(map(int, pids.read_text().split()))


def test_a_prediction_under_way_ends_with_the_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sleeps_long.py").write_text("import time; time.sleep(1000)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    predictions = Predictions("a.db", module="sleeps_long")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(predictions.predict, "predict", {"model": "gpt2"})
        assert wait_until(lambda: predictions._running is not None)
        predictions.close()
        with pytest.raises(ServiceError, match="the prediction was ended"):
            waiting.result(60)


def test_a_token_has_two_predictions_under_way_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    is_over = threading.Event()

    def predict(command: object, options: object) -> dict[str, object]:
        is_over.wait(60)
        return {}

    predictions = Predictions("a.db")
    monkeypatch.setattr(predictions, "predict", predict)
    with ThreadPoolExecutor(3) as pool:
        asked = [
            pool.submit(predictions.answer, {"model": "gpt2", "gpu": ["rtx-3090"], "seq_len": length}, "ann")
            for length in (32, 64)
        ]
        assert wait_until(lambda: predictions._waiting["ann"] == 2)
        with pytest.raises(ServiceError, match="'ann' has 2 predictions under way"):
            predictions.answer({"model": "gpt2", "gpu": ["rtx-3090"]}, "ann")
        is_over.set()
        assert [each.result(60) for each in asked] == [{}, {}]


def test_a_second_service_over_one_database_is_refused(crowded: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would start the first one's searches anew."""
    # Of this process nothing is to change.
    monkeypatch.setattr("os.umask", lambda mask: mask)
    monkeypatch.setattr("autotune.service.server.raise_open_files", lambda: 1024)
    with pytest.raises(StorageError, match="the queue of this database is held by process"):
        serve(Settings(str(crowded.folder / "a.db"), port=0), lambda url, token: None)
