"""A real service, real agents and the command line as their client, each a process of its own."""

from __future__ import annotations

import json
import queue
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import warm
from processes import all_gone, children, wait_until

from autotune import __version__
from autotune.devices import find_device
from autotune.service.client import Client, StreamedEvent

ROOT = Path(__file__).resolve().parents[2]


def environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1"}  # fmt: skip


class Scene:
    """The processes of a test, with their output in files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = self.token = ""
        self._every: list[warm.Popen] = []

    def start(self, name: str, *words: str) -> warm.Popen:
        """Start a command; its output goes to files of this name."""
        with (self.folder / f"{name}.out").open("wb") as out, (self.folder / f"{name}.err").open("wb") as err:
            process = warm.Popen(
                [sys.executable, "-m", "autotune", *words],
                cwd=self.folder,
                env={**environment(), "AUTOTUNE_TOKEN": self.token},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )
        self._every.append(process)
        return process

    def text(self, name: str) -> str:
        """What a command printed: ``serve.out``, ``agent.err``."""
        return (self.folder / name).read_text()

    def serve(self, *words: str) -> warm.Popen:
        """Start the service and wait for its address."""
        process = self.start("serve", "serve", "--port", "0", *words)
        assert wait_until(lambda: "\n" in self.text("serve.out") or process.poll() is not None, 60)
        self.url, _, self.token = self.text("serve.out").strip().partition("/#token=")
        return process

    def agent(self, name: str, *words: str) -> warm.Popen:
        """Start an agent on the CPU, by itself with the service's database."""
        storage = words or ("--storage", "studies/autotune.db", "--shared")
        return self.start(name, "agent", "--server", self.url, "--device", "cpu", *storage)

    def get(self, path: str) -> Any:
        """Ask the service."""
        request = urllib.request.Request(self.url + path, headers={"Authorization": f"Bearer {self.token}"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def end(self) -> None:
        """Kill what is left."""
        for process in self._every:
            if process.poll() is None:
                process.kill()
                process.wait()


@contextmanager
def scene_in(folder: Path) -> Iterator[Scene]:
    scene = Scene(folder)
    try:
        yield scene
    finally:
        scene.end()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with scene_in(tmp_path) as scene:
        yield scene


@pytest.mark.service
def test_a_search_whose_agent_is_ended_is_gone_on_with_by_another(scene: Scene) -> None:
    service = scene.serve("--no-agent")
    client = scene.start("search", "search", "--server", scene.url, "--model", "bert-tiny", "--seq-len", "32",
                         "--effective-batch", "16", "--trials", "3", "--json")  # fmt: skip
    first = scene.agent("first")
    assert wait_until(lambda: "baseline" in scene.text("search.err"), 120), scene.text("first.err")
    first.send_signal(signal.SIGTERM)
    assert first.wait(60) == 0
    assert "queued" in scene.text("first.err")
    (told,) = scene.get("/v1/searches")["searches"]
    assert (told["state"], told["attempts"]) == ("queued", 0)
    # As on another machine: all that it knows of the study comes from the service, and goes there.
    second = scene.agent("second", "--storage", "elsewhere/agent.db")
    assert client.wait(180) == 0, scene.text("search.err")
    report = json.loads(scene.text("search.out"))
    assert report["state"] == "finished"
    assert report["study"] == told["study"] == "bert-tiny-16"
    baselines = [trial for trial in report["trials"] if trial["stage"] == "baseline"]
    assert [trial["state"] for trial in baselines].count("completed") == 1
    log = urllib.request.Request(f"{scene.url}/v1/searches/{told['id']}/trials/{report['trials'][-1]['number']}/log",
                                 headers={"Authorization": f"Bearer {scene.token}"})  # fmt: skip
    with urllib.request.urlopen(log, timeout=30) as answer:
        assert answer.status == 200
    assert len({trial["number"] for trial in report["trials"]}) == len(report["trials"])
    assert "back in the queue: its agent ended" in scene.text("search.err")
    assert "continuing the study bert-tiny-16" in scene.text("search.err")
    again = scene.start("again", "search", "--server", scene.url, "--model", "bert-tiny", "--seq-len", "32",
                        "--effective-batch", "16", "--trials", "3", "--json")  # fmt: skip
    assert again.wait(60) == 0
    assert json.loads(scene.text("again.out")) == report
    verified = scene.start("verify", "verify", report["study"], "--server", scene.url, "--steps", "30", "--json")
    assert verified.wait(180) in (0, 11, 12), scene.text("verify.err")
    assert json.loads(scene.text("verify.out"))["study"] == report["study"]
    # A trial server is kept for the next search.
    assert children(second.pid)
    descendants = [*children(second.pid), *children(service.pid)]
    for process in (second, service):
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert all_gone(descendants)
    assert scene.token not in scene.text("serve.err") + scene.text("first.err") + scene.text("second.err")


def test_an_agent_without_a_service_says_so_and_ends_when_told(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    words = ["agent", "--server", f"http://127.0.0.1:{port}", "--device", "cpu", "--with-parent"]
    # Cold: a fork leaves without the end of the interpreter, where a thread that reads stdin can abort it.
    with warm.cold(), (tmp_path / "err").open("wb") as err:
        process = warm.Popen(
            [sys.executable, "-m", "autotune", *words],
            cwd=tmp_path,
            env={**environment(), "AUTOTUNE_TOKEN": "x"},
            stdin=subprocess.PIPE,
            stderr=err,
        )
    with process:
        try:
            assert wait_until(lambda: b"asking again" in (tmp_path / "err").read_bytes(), 60)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
    (line,) = (tmp_path / "err").read_text().splitlines()
    assert line.startswith(f"no service answers at http://127.0.0.1:{port}: ")


def test_errors_of_a_service_are_those_of_the_command(scene: Scene) -> None:
    service = scene.serve("--no-agent")
    unknown = scene.start("unknown", "search", "--server", scene.url, "--model", "bert-tinyy")
    assert unknown.wait(60) == 3
    assert "did you mean bert-tiny" in scene.text("unknown.err")
    unpredicted = scene.start("predict", "predict", "--server", scene.url, "--model", "bert-tiny", "--gpu", "rtx-3091")
    assert unpredicted.wait(60) == 2
    assert "--gpu 'rtx-3091' is not known" in scene.text("predict.err")
    port = scene.url.rpartition(":")[2]
    taken = scene.start("taken", "serve", "--port", port, "--no-agent")
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
    service = scene.serve("--no-agent", "--storage", "a.db")
    client, heard = Client(scene.url, scene.token), queue.Queue[StreamedEvent]()
    told = {"name": "stand-in", "host": "host", "version": __version__, "device": find_device("cpu").document()}
    agent = client.request("POST", "/v1/agents", told)["id"]
    search = client.request("POST", "/v1/searches", {"model": "bert-tiny", "effective_batch": 16})["id"]
    job = client.request("POST", f"/v1/agents/{agent}/claim", {})["job"]

    def say(text: str) -> None:
        event = {"kind": "line", "document": {"text": text}}
        news = {"lease_token": job["lease_token"], "events": [event]}
        client.request("POST", f"/v1/agents/{agent}/jobs/{search}/events", news)

    def listen() -> None:
        for event in client.events(search):
            heard.put(event)

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    say("before")
    found = [heard.get(timeout=60) for _ in range(3)]
    service.kill()
    service.wait()
    port = scene.url.rpartition(":")[2]
    scene.start("again", "serve", "--no-agent", "--storage", "a.db", "--port", port)
    assert wait_until(lambda: "\n" in scene.text("again.out"), 60), scene.text("again.err")
    say("after")
    client.request("POST", f"/v1/agents/{agent}/jobs/{search}/end",
                   {"lease_token": job["lease_token"], "state": "finished"})  # fmt: skip
    listener.join(60)
    assert not listener.is_alive()
    while not heard.empty():
        found.append(heard.get())
    assert [event.number for event in found] == [1, 2, 3, 4, 5]
    assert [event.document.get("text") for event in found if event.kind == "line"] == ["before", "after"]
