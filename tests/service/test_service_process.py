"""A real service with its processes, and the command line as its client, each a process of its own."""

import json
import os
import queue
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import warm
from processes import all_gone, children, processes_named, wait_until
from served import Service

from autotune.devices.listing import list_devices
from autotune.devices.lock import Lock
from autotune.service.client import Client, StreamedEvent
from autotune.store.opening import open_store


class Scene(Service):
    """A service and its clients, forked from a warm process."""

    popen = warm.Popen

    def searching(self) -> list[int]:
        return processes_named("autotune.engine.child", children(self.process.pid))

    def waits_for(self) -> str:
        return next((search["waits_for"] or "" for search in self.call("GET", "/v1/searches")["searches"]), "")


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with Scene(tmp_path, OMP_NUM_THREADS="1") as scene:
        yield scene


TINY = ["--model", "bert-tiny", "--seq-len", "32", "--effective-batch", "16"]


def test_a_search_of_a_service_is_recorded_answered_again_and_ends_with_it(scene: Scene) -> None:
    service = scene.serve()
    words = ["search", "--server", scene.url, *TINY, "--trials", "1", "--json"]
    (device,) = list_devices()
    # Another program's search on the same device.
    with Lock(device.uuid) as lock:
        assert lock.acquire("another") is None
        client = scene.start("search", *words)
        assert wait_until(lambda: scene.waits_for().startswith("waiting for cpu"), 60), scene.text("serve.err")
        assert f"which process {os.getpid()} of " in scene.waits_for()
    assert client.wait(180) == 0, scene.text("search.err") + scene.text("serve.err")
    report = json.loads(scene.text("search.out"))
    assert (report["state"], report["study"]) == ("finished", "bert-tiny-16")
    (told,) = scene.call("GET", "/v1/searches")["searches"]
    assert told["waits_for"] is None
    assert (told["state"], told["attempts"], told["device"]["kind"]) == ("finished", 1, "cpu")
    again = scene.start("again", *words)
    assert again.wait(60) == 0
    assert json.loads(scene.text("again.out")) == report
    descendants = children(service.pid)
    service.send_signal(signal.SIGTERM)
    assert service.wait(60) == 0
    assert all_gone(descendants)
    assert scene.token not in scene.text("serve.err")


@pytest.mark.service
def test_a_search_whose_process_is_killed_goes_on_in_another(scene: Scene) -> None:
    service = scene.serve()
    words = ["search", "--server", scene.url, *TINY, "--trials", "3", "--json"]
    client = scene.start("search", *words)
    assert wait_until(lambda: "baseline" in scene.text("search.err"), 120), scene.text("serve.err")
    (first,) = scene.searching()
    os.kill(first, signal.SIGKILL)
    assert client.wait(180) == 0, scene.text("search.err")
    report = json.loads(scene.text("search.out"))
    (told,) = scene.call("GET", "/v1/searches")["searches"]
    assert (report["state"], told["state"], told["attempts"]) == ("finished", "finished", 2)
    baselines = [trial for trial in report["trials"] if trial["stage"] == "baseline"]
    assert [trial["state"] for trial in baselines].count("completed") == 1
    assert len({trial["number"] for trial in report["trials"]}) == len(report["trials"])
    assert "back in the queue: its process was ended by signal 9" in scene.text("search.err")
    assert "a process for searches is gone: its process was ended by signal 9" in scene.text("serve.err")
    verified = scene.start("verify", "verify", report["study"], "--server", scene.url, "--steps", "30", "--json")
    assert verified.wait(180) in (0, 11, 12), scene.text("verify.err")
    assert json.loads(scene.text("verify.out"))["study"] == report["study"]
    # Whatever runs, it ends with the service, which tells that it waits.
    other = scene.start("other", "search", "--server", scene.url, *TINY, "--seed", "1", "--trials", "9")
    assert wait_until(lambda: "baseline" in scene.text("other.err"), 120)
    descendants = children(service.pid)
    service.send_signal(signal.SIGTERM)
    assert service.wait(60) == 0
    assert all_gone(descendants)
    other.kill()
    other.wait()
    with open_store(str(scene.folder / "studies" / "autotune.db")) as store:
        (waiting,) = store.queue.jobs(states=["queued"])
    assert (waiting.attempts, waiting.losses) == (1, 0)


def test_errors_of_a_service_are_those_of_the_command(scene: Scene) -> None:
    service = scene.serve()
    unknown = scene.start("unknown", "search", "--server", scene.url, "--model", "bert-tinyy")
    assert unknown.wait(60) == 3
    assert "did you mean bert-tiny" in scene.text("unknown.err")
    unpredicted = scene.start("predict", "predict", "--server", scene.url, "--model", "bert-tiny", "--gpu", "rtx-3091")
    assert unpredicted.wait(60) == 2
    assert "--gpu 'rtx-3091' is not known" in scene.text("predict.err")
    port = scene.url.rpartition(":")[2]
    taken = scene.start("taken", "serve", "--port", port)
    assert taken.wait(60) == 2
    assert f"cannot listen on 127.0.0.1:{port}: address already in use\n" in scene.text("taken.err")
    service.send_signal(signal.SIGINT)
    assert service.wait(60) == 0
    gone = scene.start("gone", "queue", "--server", scene.url)
    assert gone.wait(60) == 13
    assert "no service answers at" in scene.text("gone.err")
    assert "start one with autotune serve" in scene.text("gone.err")


@pytest.mark.service
def test_who_listens_goes_on_where_it_was_after_the_service_was_killed(scene: Scene) -> None:
    """Events that were told are told once, the others after the restart, in order."""
    scene.serve("--storage", "a.db")
    client, heard = Client(scene.url, scene.token), queue.Queue[StreamedEvent]()
    options = {"model": "bert-tiny", "effective_batch": 16, "seq_len": 32, "trials": 3}
    search = client.request("POST", "/v1/searches", options)["id"]

    def listen() -> None:
        for event in client.events(search):
            heard.put(event)

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    found = []
    while not found or found[-1].kind != "trial":
        found.append(heard.get(timeout=120))
    scene.kill()
    scene.serve_again()
    listener.join(180)
    assert not listener.is_alive()
    while not heard.empty():
        found.append(heard.get())
    numbers = [event.number for event in found if event.number is not None]
    assert numbers == list(range(1, len(numbers) + 1))
    states = [event.document["state"] for event in found if event.kind == "state"]
    assert states == ["queued", "running", "queued", "running", "finished"]
    assert client.request("GET", f"/v1/searches/{search}")["attempts"] == 2
