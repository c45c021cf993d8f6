"""Test the dashboard over HTTP with a real client: correct and read-only."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import signal
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import optuna
import pytest
from processes import receive
from recorded import measurement

from autotune.core.candidate import Arm, Candidate, Precision
from autotune.core.ceiling import Ceiling, Headroom
from autotune.core.errors import InvalidRequestError
from autotune.core.options import Objective
from autotune.core.outcome import Completed, Outcome, OutOfMemory
from autotune.core.schema import encode
from autotune.core.units import GIB
from autotune.results.dashboard import DashboardStorage, dashboard_server, serve
from autotune.results.optuna_trials import TRIAL_ID_ATTRIBUTE
from autotune.store.opening import open_store
from autotune.store.records import StudyRecord, TrialRecord
from autotune.store.repository import Store

CEILING = Ceiling(None, 23 * GIB, GIB, Headroom(0.0))
"""A line of 22 GiB."""


def new_study(store: Store, name: str, objective: Objective = "throughput") -> StudyRecord:
    """Records a study as a search does when it begins."""
    workload, environment = store.intern_workload({}, "workload"), store.intern_environment({}, "environment")
    study = StudyRecord(name, workload, environment, {"objective": objective}, encode(CEILING), "0.1.0")
    store.create_study(study)
    return study


def add_trial(
    store: Store, study: StudyRecord, speed: float | None, over_gib: float = -1.0, precision: Precision = "bf16"
) -> str:
    """Records a trial; without a speed it ran out of memory. Returns its id."""
    candidate = Candidate(Arm(precision), 8, 1)
    reserved_bytes = int((22 + over_gib) * GIB)
    outcome: Outcome = OutOfMemory("full", peak_reserved_bytes=reserved_bytes)
    if speed is not None:
        outcome = Completed(measurement(candidate, 8 / speed, reserved_bytes, reserved_bytes))
    number = len(store.trials(study.id))
    trial = TrialRecord(study.id, number, candidate, study.workload_id, study.environment_id, outcome=outcome)
    store.start_trial(trial)
    return trial.id


def name_winner(store: Store, study: StudyRecord, trial_id: str) -> None:
    """Records the study with its winner, as a search does."""
    store.update_study(dataclasses.replace(study, best_trial_id=trial_id))


@pytest.fixture(scope="module")
def names() -> dict[str, str]:
    """By id, what the tests call a trial."""
    return {}


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory, names: dict[str, str]) -> Path:
    """Studies of every kind: with a winner, without, with nothing feasible."""
    path = tmp_path_factory.mktemp("dashboard") / "autotune.db"
    with open_store(str(path)) as store:
        for kind in ("with-winner", "without-winner", "winner-gone"):
            study = new_study(store, kind)
            for name, speed, over_gib in (
                ("plain", 200.0, -1.0),
                ("winner", 298.0, -2.0),
                ("fastest", 300.0, -0.5),
                ("too-large", 350.0, 0.25),
                ("ran-out", None, 1.0),
            ):
                names[add_trial(store, study, speed, over_gib)] = name
            if kind == "with-winner":
                name_winner(store, study, next(t.id for t in store.trials(study.id) if names[t.id] == "winner"))
            if kind == "winner-gone":
                name_winner(store, study, "nowhere")
        names[add_trial(store, new_study(store, "nothing-feasible"), 350.0, 0.25)] = "too-large"
        names[add_trial(store, new_study(store, "nothing-complete"), None)] = "ran-out"
    return path


@contextmanager
def running(database: Path) -> Iterator[int]:
    """A server in a thread; its port."""
    with dashboard_server(str(database), port=0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join(60)


@pytest.fixture(scope="module")
def port(database: Path) -> Iterator[int]:
    """The port of a server over the database of this module."""
    with running(database) as number:
        yield number


def ask(port: int, path: str, method: str = "GET", **headers: str) -> tuple[HTTPResponse, bytes]:
    """One request on a connection of its own. The only headers are Host and those given."""
    connection = HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in ({"Host": f"127.0.0.1:{port}"} | headers).items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        response = connection.getresponse()
        return response, response.read()
    finally:
        connection.close()


def get_json(port: int, path: str) -> Any:
    response, body = ask(port, path)
    assert response.status == 200, body
    return json.loads(body)


def id_of(port: int, name: str) -> int:
    """The number that a study has in addresses."""
    summaries = get_json(port, "/api/studies")["study_summaries"]
    (study_id,) = (summary["study_id"] for summary in summaries if summary["study_name"] == name)
    return int(study_id)


def detail(port: int, name: str) -> Any:
    """The JSON from which the page of a study is drawn."""
    return get_json(port, f"/api/studies/{id_of(port, name)}")


def trial_id_of(trial: Any) -> str:
    (value,) = (attr["value"] for attr in trial["user_attrs"] if attr["key"] == TRIAL_ID_ATTRIBUTE)
    return str(value)


@pytest.mark.parametrize(
    ("study", "best"),
    [
        ("with-winner", ["winner"]),
        ("without-winner", ["fastest"]),
        ("winner-gone", ["fastest"]),
        ("nothing-feasible", []),
        ("nothing-complete", []),
    ],
)
def test_the_best_trial_is_the_right_one(port: int, names: dict[str, str], study: str, best: list[str]) -> None:
    assert [names[trial_id] for trial_id in best_of(port, study)] == best


def test_infeasible_trials_are_shown_as_such(port: int, names: dict[str, str]) -> None:
    trials = detail(port, "with-winner")["trials"]
    shown = {names[trial_id_of(trial)]: (trial["state"], trial["constraints"]) for trial in trials}
    assert shown == {
        "plain": ("Complete", [-1.0]),
        "winner": ("Complete", [-2.0]),
        "fastest": ("Complete", [-0.5]),
        "too-large": ("Complete", [0.25]),
        "ran-out": ("Pruned", [1.0]),
    }


def best_of(port: int, name: str) -> list[str]:
    """Our ids of the trials that the page shows as the best."""
    return [trial_id_of(trial) for trial in detail(port, name)["best_trials"]]


def test_a_server_that_runs_shows_what_is_recorded_meanwhile(store: Store) -> None:
    study = new_study(store, "growing")
    first = add_trial(store, study, 90.0)
    with running(store.path) as port:
        assert best_of(port, "growing") == [first]
        add_trial(store, study, 100.0)
        name_winner(store, study, first)
        only = add_trial(store, new_study(store, "new"), 1.0)
        assert best_of(port, "new") == [only]
        assert best_of(port, "growing") == [first]


def test_a_running_trial_is_shown_as_such(store: Store) -> None:
    study = new_study(store, "running")
    store.start_trial(TrialRecord(study.id, 0, Candidate(Arm(), 8), study.workload_id, study.environment_id))
    with running(store.path) as port:
        assert [trial["state"] for trial in detail(port, "running")["trials"]] == ["Running"]


@pytest.mark.parametrize(("objective", "label"), [("throughput", "samples/s"), ("max-batch", "per-device batch")])
def test_the_objective_is_named(store: Store, objective: Objective, label: str) -> None:
    add_trial(store, new_study(store, "study", objective), 1.0)
    with running(store.path) as port:
        assert detail(port, "study")["objective_names"] == [label]
        assert ask(port, f"/csv/{id_of(port, 'study')}")[1].decode().startswith(f"Number,State,{label}")


def test_parameters_that_never_varied_are_not_shown(store: Store) -> None:
    study = new_study(store, "recorded")
    for precision in ("bf16", "fp32", "bf16"):
        add_trial(store, study, 100.0 if precision == "bf16" else 50.0, precision=precision)
    with running(store.path) as port:
        # Checkpointing may still be tried while the search runs, and is then shown of every trial.
        assert "gradient_checkpointing" in shown_parameters(detail(port, "recorded"))
    store.update_study(dataclasses.replace(study, state="finished"))
    with running(store.path) as port:
        shown = {"per_device_train_batch_size", "precision"}
        assert shown_parameters(detail(port, "recorded")) == shown
        importances = get_json(port, f"/api/studies/{id_of(port, 'recorded')}/param_importances")
        assert {entry["name"] for entry in importances["param_importances"][0]} <= shown


def shown_parameters(study: Any) -> set[str]:
    """Names of the parameters in every place that the page draws them from."""
    spaces = [study["union_search_space"], study["intersection_search_space"]]
    (names,) = {
        frozenset(parameter["name"] for parameter in parameters)
        for parameters in (*spaces, *(trial["params"] for trial in study["trials"]))
    }
    return set(names)


def test_the_page_and_what_it_loads_are_served(port: int) -> None:
    moved, _ = ask(port, "/")
    assert (moved.status, moved.getheader("Location")) == (302, f"http://127.0.0.1:{port}/dashboard")
    page, html = ask(port, "/dashboard")
    assert page.status == 200
    assert b"/static/bundle.js" in html
    number = id_of(port, "with-winner")
    for path in (f"/dashboard/studies/{number}", "/favicon.ico", "/static/bundle.js", "/api/meta", f"/csv/{number}"):
        response, body = ask(port, path)
        assert response.status == 200, path
        assert body
    packed, script = ask(port, "/static/bundle.js", Accept_Encoding="gzip")
    assert packed.getheader("Content-Encoding") == "gzip"
    assert script.startswith(b"\x1f\x8b")
    missing, _ = ask(port, "/api/studies/999")
    assert missing.status == 404


def test_head_has_no_body_and_options_changes_nothing(port: int) -> None:
    response, body = ask(port, "/dashboard", "HEAD")
    assert (response.status, body) == (200, b"")
    assert ask(port, "/api/studies", "OPTIONS")[0].status in (200, 204, 405)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/api/studies"),
        ("DELETE", "/api/studies/1"),
        ("POST", "/api/studies/1/rename"),
        ("PUT", "/api/studies/1/note"),
        ("POST", "/api/trials/1/user-attrs"),
        ("PATCH", "/"),
        ("TRACE", "/"),
        ("get", "/dashboard"),
    ],
)
def test_other_methods_are_refused(port: int, method: str, path: str) -> None:
    before = get_json(port, "/api/studies")
    response, body = ask(port, path, method, Content_Type="application/json", Content_Length="0")
    assert response.status == 405
    assert response.getheader("Allow") == "GET, HEAD, OPTIONS"
    assert body.decode() == f"This dashboard only shows studies; {method} would change one.\n"
    assert get_json(port, "/api/studies") == before


def test_what_the_dashboard_reads_from_refuses_its_writes(database: Path) -> None:
    """Without the gate before it, the dashboard still could not delete a study."""
    with open_store(str(database)) as store:
        storage = DashboardStorage(store)
        with pytest.raises(PermissionError, match="only shows studies"):
            storage.delete_study(storage.get_study_id_from_name("with-winner"))
        with pytest.raises(PermissionError, match="only shows studies"):
            storage.create_new_study([optuna.study.StudyDirection.MAXIMIZE], "b")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:{port}", "127.0.0.1", "127.0.0.1:9999", "[::1]:{port}"])
def test_this_machines_own_names_are_answered(port: int, host: str) -> None:
    assert ask(port, "/api/meta", Host=host.format(port=port))[0].status == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:{port}", "localhost.evil.example:{port}", "10.0.0.1:{port}", "", "localhost:x", ":"],
)
def test_other_names_are_refused(port: int, host: str) -> None:
    response, body = ask(port, "/api/studies", Host=host.format(port=port))
    assert response.status == 403
    assert b"localhost and 127.0.0.1 only" in body


def test_a_request_without_a_host_is_refused(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=120) as raw:
        raw.sendall(b"GET /api/studies HTTP/1.0\r\n\r\n")
        assert raw.recv(100).startswith(b"HTTP/1.0 403 ")


def test_a_silent_connection_holds_nobody_up_and_a_dropped_one_is_no_news(
    port: int, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=120):
        dropped = socket.create_connection(("127.0.0.1", port), timeout=120)
        # Lingering for no time at all: the connection is reset, not closed.
        dropped.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        dropped.close()
        for _ in range(3):
            assert ask(port, "/api/meta")[0].status == 200
    assert capfd.readouterr().err == ""


def test_a_port_that_is_none_is_refused(database: Path) -> None:
    with pytest.raises(InvalidRequestError):
        serve(str(database), 70000, print)


def test_other_machines_do_not_reach_it(database: Path) -> None:
    with dashboard_server(str(database), port=0) as server:
        assert server.server_address[0] == "127.0.0.1"


def _serve(database: str, ready: multiprocessing.SimpleQueue[str]) -> None:
    serve(database, 0, ready.put)


def test_ctrl_c_ends_quietly(database: Path, capfd: pytest.CaptureFixture[str]) -> None:
    forks = multiprocessing.get_context("fork")
    ready: multiprocessing.SimpleQueue[str] = forks.SimpleQueue()
    child = forks.Process(target=_serve, args=(str(database), ready), daemon=True)
    child.start()
    url = receive(ready)
    port = int(url.removeprefix("http://127.0.0.1:").removesuffix("/"))
    assert ask(port, "/api/meta")[0].status == 200
    os.kill(child.pid, signal.SIGINT)
    child.join(60)
    assert child.exitcode == 0
    assert capfd.readouterr() == ("", "")
