"""Test the dashboard over HTTP with a real client: correct and read-only."""

from __future__ import annotations

import dataclasses
import io
import json
import multiprocessing
import os
import signal
import socket
import struct
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any, Literal

import optuna
import pytest
from optuna.trial import TrialState
from processes import receive

from autotune.core.ceiling import Ceiling
from autotune.core.errors import InvalidRequestError
from autotune.core.options import Objective
from autotune.results.dashboard import dashboard_server, serve
from autotune.store.opening import open_store
from autotune.store.records import TRIAL_ID_ATTRIBUTE, StudyRecord
from autotune.store.repository import Store
from autotune.tuning.optuna_study import OptunaStudy

SPACE: dict[str, optuna.distributions.BaseDistribution] = {"batch": optuna.distributions.IntDistribution(1, 64)}


def add_trial(study: optuna.Study, value: float | None, excess: float | None, trial_id: str) -> int:
    """Tells Optuna of a trial; without a value it ran out of memory. Returns its number."""
    trial = study.ask(SPACE)
    trial.set_user_attr(TRIAL_ID_ATTRIBUTE, trial_id)
    if excess is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            trial.set_constraint("memory", excess)
    study.tell(trial, value, state=None if value is not None else TrialState.PRUNED)
    return trial.number


def new_study(store: Store, name: str, direction: Literal["minimize", "maximize"] = "maximize") -> optuna.Study:
    return optuna.create_study(storage=store.optuna, study_name=name, direction=direction)


def record_study(store: Store, name: str, request: dict[str, Any] | None = None) -> StudyRecord:
    """Records a study as a search does when it begins."""
    workload, environment = store.intern_workload({}, "workload"), store.intern_environment({}, "environment")
    study = StudyRecord(name, workload, environment, request or {}, {}, "0.1.0")
    store.create_study(study)
    return study


def name_winner(store: Store, name: str, trial_id: str | None) -> None:
    """Records the study with its winner, as a search does."""
    study = store.study(name) or record_study(store, name)
    store.update_study(dataclasses.replace(study, best_trial_id=trial_id))


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Studies of every kind: with a winner, without, with nothing feasible, Optuna's own."""
    path = tmp_path_factory.mktemp("dashboard") / "autotune.db"
    with open_store(str(path)) as store:
        for name in ("with-winner", "without-winner", "winner-gone"):
            study = new_study(store, name)
            add_trial(study, 200.0, -1.0, "plain")
            add_trial(study, 298.0, -2.0, "winner")
            add_trial(study, 300.0, -0.5, "fastest")
            add_trial(study, 350.0, 0.25, "too-large")
            add_trial(study, None, 1.0, "ran-out")
        name_winner(store, "with-winner", "winner")
        name_winner(store, "without-winner", None)
        name_winner(store, "winner-gone", "nowhere")
        add_trial(new_study(store, "nothing-feasible"), 350.0, 0.25, "too-large")
        add_trial(new_study(store, "nothing-complete"), None, 1.0, "ran-out")
        minimized = new_study(store, "plain-optuna", "minimize")
        for value in (3.0, 1.0, 2.0):
            add_trial(minimized, value, None, "")
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
            thread.join(10)


@pytest.fixture(scope="module")
def port(database: Path) -> Iterator[int]:
    """The port of a server over the database of this module."""
    with running(database) as number:
        yield number


def ask(port: int, path: str, method: str = "GET", **headers: str) -> tuple[HTTPResponse, bytes]:
    """One request on a connection of its own. The only headers are Host and those given."""
    connection = HTTPConnection("127.0.0.1", port, timeout=20)
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


def detail(port: int, name: str) -> Any:
    """The JSON from which the page of a study is drawn."""
    summaries = get_json(port, "/api/studies")["study_summaries"]
    (study_id,) = (summary["study_id"] for summary in summaries if summary["study_name"] == name)
    return get_json(port, f"/api/studies/{study_id}")


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
def test_the_best_trial_is_the_right_one(port: int, study: str, best: list[str]) -> None:
    assert [trial_id_of(trial) for trial in detail(port, study)["best_trials"]] == best


def test_a_study_of_plain_optuna_is_shown_as_ever(port: int) -> None:
    shown = detail(port, "plain-optuna")
    assert shown["directions"] == ["minimize"]
    assert [trial["values"] for trial in shown["best_trials"]] == [[1.0]]
    assert [trial["constraints"] for trial in shown["trials"]] == [[], [], []]


def test_infeasible_trials_are_shown_as_such(port: int) -> None:
    trials = detail(port, "with-winner")["trials"]
    shown = {trial_id_of(trial): (trial["state"], trial["constraints"]) for trial in trials}
    assert shown == {
        "plain": ("Complete", [-1.0]),
        "winner": ("Complete", [-2.0]),
        "fastest": ("Complete", [-0.5]),
        "too-large": ("Complete", [0.25]),
        "ran-out": ("Pruned", [1.0]),
    }


def test_a_winner_named_later_is_shown_by_a_server_that_runs_already(tmp_path: Path) -> None:
    path = tmp_path / "autotune.db"
    with open_store(str(path)) as store:
        study = new_study(store, "growing")
        add_trial(study, 100.0, -1.0, "first")
        with running(path) as port:
            assert [trial_id_of(trial) for trial in detail(port, "growing")["best_trials"]] == ["first"]
            add_trial(study, 90.0, -1.0, "second")
            name_winner(store, "growing", "first")
            new = new_study(store, "new")
            add_trial(new, 1.0, None, "only")
            assert [trial_id_of(trial) for trial in detail(port, "new")["best_trials"]] == ["only"]
            assert [trial_id_of(trial) for trial in detail(port, "growing")["best_trials"]] == ["first"]


@pytest.mark.parametrize(("objective", "label"), [("throughput", "samples/s"), ("max-batch", "per-device batch")])
def test_the_objective_is_named(tmp_path: Path, objective: Objective, label: str) -> None:
    """For new studies in Optuna's own tables, for those recorded without a name by the dashboard's storage."""
    path = tmp_path / "autotune.db"
    with open_store(str(path)) as store:
        new_study(store, "plain-optuna")
        new_study(store, "old")
        record_study(store, "old", {"objective": objective})
        with running(path) as port:
            assert detail(port, "old")["objective_names"] == [label]
            assert "objective_names" not in detail(port, "plain-optuna")
            # Begun while the dashboard runs.
            OptunaStudy("new", store, SPACE, objective, Ceiling(None, 2**30, 0))
            assert detail(port, "new")["objective_names"] == [label]
            study_id = store.optuna.get_study_id_from_name("old")
            assert ask(port, f"/csv/{study_id}")[1].decode().startswith(f"Number,State,{label}")
        assert optuna.load_study(study_name="new", storage=store.optuna).metric_names == [label]


def test_parameters_that_never_varied_are_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "autotune.db"
    choices: dict[str, list[Any]] = {
        "per_device_train_batch_size": [8],
        "precision": ["bf16", "fp32"],
        "attn_implementation": ["sdpa"],
        "gradient_checkpointing": [False, True],
    }
    space = {name: optuna.distributions.CategoricalDistribution(values) for name, values in choices.items()}
    with open_store(str(path)) as store:
        for name in ("recorded", "plain-optuna"):
            study = new_study(store, name)
            for precision in ("bf16", "fp32", "bf16"):
                fixed = {"precision": precision, "gradient_checkpointing": False}
                study.enqueue_trial({"per_device_train_batch_size": 8, "attn_implementation": "sdpa", **fixed})
                study.tell(study.ask(space), 100.0 if precision == "bf16" else 50.0)
        record = record_study(store, "recorded")
        with running(path) as port:
            # Checkpointing may still be tried while the search runs, and is then shown of every trial.
            assert shown_parameters(detail(port, "recorded")) == set(choices) - {"attn_implementation"}
            assert shown_parameters(detail(port, "plain-optuna")) == set(choices)
        store.update_study(dataclasses.replace(record, state="finished"))
        with running(path) as port:
            shown = {"per_device_train_batch_size", "precision"}
            assert shown_parameters(detail(port, "recorded")) == shown
            importances = get_json(port, "/api/studies/1/param_importances")["param_importances"]
            assert {entry["name"] for entry in importances[0]} <= shown


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
    for path in ("/dashboard/studies/1", "/favicon.ico", "/static/bundle.js", "/api/meta", "/csv/1"):
        response, body = ask(port, path)
        assert response.status == 200, path
        assert body
    packed, script = ask(port, "/static/bundle.js", Accept_Encoding="gzip")
    assert packed.getheader("Content-Encoding") == "gzip"
    assert script.startswith(b"\x1f\x8b")
    importances = get_json(port, "/api/studies/1/param_importances")["param_importances"]
    assert [entry["name"] for entry in importances[0]] == ["batch"]
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


def test_the_database_itself_refuses_the_dashboards_writes(database: Path) -> None:
    """Without the gate before it, the dashboard still could not delete a study."""
    with dashboard_server(str(database), port=0) as server:
        app: Any = server.get_app()
        bottle = next(cell.cell_contents for cell in app.__closure__ if hasattr(cell.cell_contents, "routes"))
        answers: list[str] = []
        environ = {
            "REQUEST_METHOD": "DELETE",
            "PATH_INFO": "/api/studies/1",
            "SERVER_NAME": "localhost",
            "SERVER_PORT": "80",
            "wsgi.url_scheme": "http",
            "wsgi.input": io.BytesIO(),
            "wsgi.errors": None,
        }
        list(bottle(environ, lambda status, headers, error=None: answers.append(status)))
        assert answers == ["500 Internal Server Error"]
    with open_store(str(database)) as store:
        assert "with-winner" in optuna.get_all_study_names(store.optuna)


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
    with socket.create_connection(("127.0.0.1", port), timeout=20) as raw:
        raw.sendall(b"GET /api/studies HTTP/1.0\r\n\r\n")
        assert raw.recv(100).startswith(b"HTTP/1.0 403 ")


def test_a_silent_connection_holds_nobody_up_and_a_dropped_one_is_no_news(
    port: int, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=20):
        dropped = socket.create_connection(("127.0.0.1", port), timeout=20)
        # Lingering for no time at all: the connection is reset, not closed.
        dropped.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        dropped.close()
        for _ in range(3):
            assert ask(port, "/api/meta")[0].status == 200
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("host", "port"), [("0.0.0.0", 0), ("192.168.1.1", 0), ("::", 0), ("127.0.0.1", 70000)])
def test_addresses_that_others_can_reach_are_refused(database: Path, host: str, port: int) -> None:
    with pytest.raises(InvalidRequestError):
        serve(str(database), host=host, port=port)


def _serve(database: str, ready: multiprocessing.SimpleQueue[str]) -> None:
    serve(database, port=0, ready=ready.put)


def test_ctrl_c_ends_quietly(database: Path, capfd: pytest.CaptureFixture[str]) -> None:
    forks = multiprocessing.get_context("fork")
    ready: multiprocessing.SimpleQueue[str] = forks.SimpleQueue()
    child = forks.Process(target=_serve, args=(str(database), ready), daemon=True)
    child.start()
    url = receive(ready)
    port = int(url.removeprefix("http://127.0.0.1:").removesuffix("/"))
    assert ask(port, "/api/meta")[0].status == 200
    assert child.pid is not None
    os.kill(child.pid, signal.SIGINT)
    child.join(60)
    assert child.exitcode == 0
    assert capfd.readouterr() == ("", "")
