"""Kill a service and the processes of its searches while thousands of jobs run, and count what was lost or doubled.

``python tests/service/chaos.py`` submits 2,000 searches over HTTP and kills the service 8 times and a search 20 times.
Service, processes and HTTP are real; a search of ten made-up GPUs lasts a fraction of a second and trains nothing.
``chaos.py serve …`` is that service, ``chaos.py child`` the process of its searches.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "studies")]

DEVICES = 10
CLIENTS = 10
"""Each has a token of its own: one may submit 1,200 searches a minute."""
PATIENCE_SECONDS = 400.0
BAD = ("searches lost", "searches doubled", "searches with another number of ends than one", "gaps in events")
"""What must be none."""


def run_child() -> None:
    """Stand in for ``autotune.engine.child``: say two trials and an end of each search that is handed over."""

    sink = os.fdopen(int(sys.argv[2]), "w")

    def say(work: str, kind: str, document: dict[str, Any]) -> None:
        print(json.dumps({"work": work, "kind": kind, "document": document}), file=sink, flush=True)

    say("", "ready", {})
    with contextlib.suppress(BrokenPipeError):
        for line in sys.stdin:
            work = json.loads(line).get("work")
            if work is None:
                continue
            for number in range(2):
                time.sleep(random.uniform(0.02, 0.2))
                say(work["id"], "trial", {"number": number, "state": "completed"})
            say(work["id"], "end", {"state": "finished", "problem": None})


def run_service(words: list[str]) -> None:
    """Run ``autotune serve`` over made-up GPUs, whose processes are those above."""
    from searching import H200

    from autotune.cli.main import main
    from autotune.engine import local

    local.list_devices = lambda: [  # type: ignore[attr-defined]
        dataclasses.replace(H200, uuid=f"GPU-{number}", index=number) for number in range(DEVICES)
    ]
    interpreter = Path(words.pop(0))
    sys.executable = str(interpreter)
    main(["serve", *words])


class Chaos:
    """A service, its clients, and what was done to them."""

    def __init__(self, folder: Path, storage: str, seed: int) -> None:
        from autotune.service.tokens import add_token
        from autotune.store.opening import open_store

        self.folder, self.storage = folder, storage
        self.random = random.Random(seed)
        with open_store(storage) as store:
            self.tokens = [add_token(store.queue, f"client {number}", "admin") for number in range(CLIENTS)]
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
        self.ids: dict[str, str] = {}
        """Of what was accepted, by study."""
        self.kills: Counter[str] = Counter()
        self.interpreter = folder / "python"
        self.interpreter.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).resolve()}" child "$4"\n')
        self.interpreter.chmod(0o755)
        self.service: subprocess.Popen[bytes] | None = None

    def serve(self) -> None:
        """Start the service, for the first time or again, and wait until it answers."""
        words = [sys.executable, str(Path(__file__).resolve()), "serve", str(self.interpreter), "--port",
                 str(self.port), "--storage", self.storage]  # fmt: skip
        with (self.folder / "log").open("ab") as log:
            self.service = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=log, cwd=self.folder)
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException):
                self.call("/healthz", self.tokens[0])
                return
            assert self.service.poll() is None, (self.folder / "log").read_text()[-2000:]
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def call(self, path: str, token: str, document: Any = None, key: str = "") -> Any:
        """Ask the service."""
        headers = {"Authorization": f"Bearer {token}", **({"Idempotency-Key": key} if key else {})}
        data = None if document is None else json.dumps(document).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def submit(self, token: str, numbers: range) -> None:
        """Submit searches; one that is not answered is sent again with its key."""
        for number in numbers:
            study = f"chaos-{number}"
            asked = {"model": "bert-tiny", "effective_batch": 16, "study": study, "fresh": True}
            while study not in self.ids:
                with contextlib.suppress(OSError, http.client.HTTPException):
                    self.ids[study] = self.call("/v1/searches", token, asked, key=study)["id"]
                    continue
                time.sleep(0.1)

    def kill_service(self) -> None:
        """Kill the service and start it again."""
        assert self.service is not None
        self.service.kill()
        self.service.wait()
        self.kills["kill -9 of the service"] += 1
        time.sleep(self.random.uniform(0, 0.5))
        self.serve()

    def kill_search(self) -> None:
        """Kill the process of a search that runs."""
        import psutil

        assert self.service is not None
        children = psutil.Process(self.service.pid).children()
        if children:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.random.choice(children).send_signal(signal.SIGKILL)
                self.kills["kill -9 of a search"] += 1

    def waiting(self) -> int:
        """How many searches have not ended."""
        with contextlib.suppress(OSError, http.client.HTTPException):
            query = "/v1/searches?state=queued&state=running&limit=1000"
            return len(self.call(query, self.tokens[0])["searches"])
        return -1

    def run(self, jobs: int, server_kills: int, search_kills: int) -> dict[str, Any]:
        """Submit, kill, wait for the end, and count from the database."""
        began = time.monotonic()
        self.serve()
        shares = [range(place, jobs, CLIENTS) for place in range(CLIENTS)]
        clients = [
            threading.Thread(target=self.submit, args=given, daemon=True)
            for given in zip(self.tokens, shares, strict=True)
        ]
        for client in clients:
            client.start()
        # Spread over what is done: of 28 kills, one each time that so many searches more have ended.
        strokes = [self.kill_service] * server_kills + [self.kill_search] * search_kills
        self.random.shuffle(strokes)
        deadline = time.monotonic() + PATIENCE_SECONDS
        for place, stroke in enumerate(strokes, 1):
            due = jobs * place // (len(strokes) + 1)
            while len(self.ids) - max(0, self.waiting()) < due and time.monotonic() < deadline:
                time.sleep(0.1)
            stroke()
        for client in clients:
            client.join(max(1.0, deadline - time.monotonic()))
        while self.waiting() != 0 and time.monotonic() < deadline:
            time.sleep(0.2)
        seconds = time.monotonic() - began
        assert self.service is not None
        self.service.terminate()
        self.service.wait(30)
        return {"searches": jobs, **self.kills, **self.count(jobs), "seconds": round(seconds)}

    def count(self, jobs: int) -> dict[str, int]:
        """Count what is recorded, and compare it with what was accepted."""
        from autotune.store.opening import open_store
        from autotune.store.queue import ENDED

        with open_store(self.storage, create=False) as store:
            found = store.queue.jobs(most=2 * jobs)
            states = {job.id: job.state for job in found}
            ends = gaps = 0
            for job in found:
                events = store.queue.events(job.id)
                ends += sum(each.kind == "state" and each.document["state"] in ENDED for each in events) != 1
                gaps += [each.number for each in events] != list(range(1, job.events + 1))
        accepted = {f"chaos-{number}": self.ids.get(f"chaos-{number}", "") for number in range(jobs)}
        return {
            "searches lost": sum(states.get(job_id) != "finished" for job_id in accepted.values()),
            "searches doubled": len(found) - len({job.study for job in found}),
            "searches with another number of ends than one": ends,
            "gaps in events": gaps,
            "searches with a second attempt": sum(job.attempts > 1 for job in found),
        }

    def close(self) -> None:
        """End what is left."""
        if self.service is not None and self.service.poll() is None:
            self.service.kill()
            self.service.wait()


def measure(storage: str | None, jobs: int = 2000, server_kills: int = 8, search_kills: int = 20, seed: int = 1) -> Any:
    """Run it on a database, by default a file; return what was found."""
    with tempfile.TemporaryDirectory() as folder:
        chaos = Chaos(Path(folder), storage or f"{folder}/a.db", seed)
        try:
            return chaos.run(jobs, server_kills, search_kills)
        finally:
            chaos.close()


def main() -> None:
    """Measure, and print it."""
    if sys.argv[1:2] == ["child"]:
        run_child()
        return
    if sys.argv[1:2] == ["serve"]:
        run_service(sys.argv[2:])
        return
    parser = argparse.ArgumentParser()
    for name, default in (("jobs", 2000), ("server-kills", 8), ("search-kills", 20), ("seed", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--storage", help="An empty database [default: a file of its own].")
    given = parser.parse_args()
    told = measure(given.storage, given.jobs, given.server_kills, given.search_kills, given.seed)
    for name, value in told.items():
        print(f"{name:<46} {value:>6}")
    print(f"load average {os.getloadavg()[0]:.1f}")
    raise SystemExit(any(told[name] for name in BAD))


if __name__ == "__main__":
    main()
