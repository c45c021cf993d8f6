"""The commands that ask a service in place of a database: ``--server``."""

import json
import socket
import threading
from collections.abc import Iterator

import pytest
import uvicorn
from click.testing import CliRunner, Result
from processes import wait_until
from serving import StandInEngine, run_recorded

from autotune.cli.main import cli
from autotune.core.errors import ServiceError, UnknownStudyError
from autotune.service.app import make_app
from autotune.service.client import TOKEN_VARIABLE
from autotune.service.searches import Searches
from autotune.service.server import _Server

STUDY = "bert-large-uncased-64"


@pytest.fixture
def url(searches: Searches, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a service, whose token is in the environment."""
    monkeypatch.setenv(TOKEN_VARIABLE, searches.store.queue.add_token("ann", "run"))
    server = _Server(uvicorn.Config(make_app(searches), log_config=None))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        assert wait_until(lambda: server.started)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = searches.is_closing = True
        searches.changes.notify_all()
        thread.join(120)


def run(url: str, *words: str) -> Result:
    return CliRunner().invoke(cli, [*words, "--server", url])


def test_a_finished_study_of_a_service_is_shown_followed_and_exported(
    url: str, searches: Searches, on_gpu: StandInEngine
) -> None:
    token = searches.store.queue.add_token("bob", "run")
    from autotune.service.client import Client

    options = {"model": "bert-large-uncased", "effective_batch": 64}
    Client(url, token).request("POST", "/v1/searches", options)
    run_recorded(searches, on_gpu)
    shown = run(url, "show", STUDY)
    assert shown.output.startswith("Best: per-device batch 32 × accumulation 2")
    assert json.loads(run(url, "show", STUDY, "--json").output)["study"] == STUDY
    assert json.loads(run(url, "export", STUDY).stdout)["per_device_train_batch_size"] == 32
    assert "--per_device_train_batch_size 32" in run(url, "export", STUDY, "--format", "cli").output
    assert "<svg" in run(url, "report", STUDY, "--html", "-").output
    followed = run(url, "follow", STUDY)
    assert followed.exit_code == 0, followed.output
    assert "Best: per-device batch 32" in followed.output
    missing = run(url, "show", "nobody")
    assert isinstance(missing.exception, UnknownStudyError)


def test_a_search_that_was_cancelled_goes_on_and_is_its_owners_alone(
    url: str, searches: Searches, on_gpu: StandInEngine
) -> None:
    from autotune.service.client import Client

    client = Client(url)
    options = {"model": "bert-large-uncased", "effective_batch": 64, "device": "h200"}
    first = client.request("POST", "/v1/searches", options)["id"]
    on_gpu.next_run()
    client.request("DELETE", f"/v1/searches/{first}")
    assert wait_until(lambda: searches.job(first).state == "cancelled")
    results: list[Result] = []
    resuming = threading.Thread(target=lambda: results.append(run(url, "resume", STUDY, "--trials", "7")))
    resuming.start()
    again = run_recorded(searches, on_gpu)
    resuming.join(60)
    assert (again.work.study, again.work.options["trials"]) == (STUDY, 7)
    assert (results[0].exit_code, results[0].exception) == (0, None)
    assert "Best: per-device batch 32" in results[0].output
    assert searches.job(again.job).needs.gpu == "h200"


def test_what_others_say_reaches_no_terminal_as_an_escape(url: str, searches: Searches, on_gpu: StandInEngine) -> None:
    from autotune.service.client import Client

    Client(url).request("POST", "/v1/searches", {"model": "bert-large-uncased", "effective_batch": 64})
    running = on_gpu.next_run()
    running.add("line", {"text": "\x1b]0;owned\x07 a line", "style": None})
    running.end("failed", {"exit_code": 13, "message": "\x1b]0;owned\x07", "hint": ""})
    assert wait_until(lambda: searches.job(running.job).state == "failed")
    followed = run(url, "follow", STUDY)
    assert isinstance(followed.exception, ServiceError)
    assert "a line" in followed.output
    listed = run(url, "queue", "--all")
    assert "owned" in listed.output
    assert "\x1b]" not in followed.output + listed.output
    assert "\x07" not in followed.output + listed.output
