"""Measure a service under load: many agents and clients, jobs of a stand-in trial, all over HTTP.

``python tests/service/load.py --agents 50 --jobs 5000 --listeners 200`` prints what was found as JSON. The agents do
everything that real ones do but search.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from autotune import __version__
from autotune.devices import find_device

ROOT = Path(__file__).resolve().parents[2]


class Caller:
    """One client with a connection that is kept open."""

    def __init__(self, url: str, token: str) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}

    def call(self, method: str, path: str, document: Any = None) -> Any:
        """Send a request and return the answer's JSON."""
        body = None if document is None else json.dumps(document)
        self._connection.request(method, path, body, self._headers)
        answer = self._connection.getresponse()
        data = answer.read()
        if answer.status >= 400:
            raise RuntimeError(f"{method} {path}: {answer.status} {data[:200]!r}")
        return json.loads(data) if data and answer.headers.get_content_type() == "application/json" else data


def percentile(values: list[float], share: float) -> float:
    """Return a percentile of some seconds, in milliseconds."""
    ordered = sorted(values)
    return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1)


class Load:
    """The load on one service, and what was measured of it."""

    def __init__(self, url: str, token: str) -> None:
        self.url, self.token = url, token
        self.claim_seconds: list[float] = []
        self.page_seconds: list[float] = []
        self.ran: list[str] = []
        self.heard = 0
        self.is_over = False

    def caller(self) -> Caller:
        """Return a new client."""
        return Caller(self.url, self.token)

    def agent(self, number: int) -> None:
        """Run jobs until none is left: claim, two events, the end."""
        caller = self.caller()
        told = {"name": f"stand-in {number}", "host": "load", "version": __version__}
        agent = caller.call("POST", "/v1/agents", {**told, "device": find_device("cpu").document()})["id"]
        while not self.is_over:
            started = time.monotonic()
            job = caller.call("POST", f"/v1/agents/{agent}/claim", {})["job"]
            if job is None:
                break
            self.claim_seconds.append(time.monotonic() - started)
            path, lease = f"/v1/agents/{agent}/jobs/{job['id']}", {"lease_token": job["lease_token"]}
            event = {"kind": "trial", "document": {"number": 0, "state": "completed"}}
            caller.call("POST", f"{path}/events", {**lease, "events": [event, event]})
            caller.call("POST", f"{path}/end", {**lease, "state": "finished"})
            self.ran.append(job["id"])

    def listen(self) -> None:
        """Follow the changes of the queue."""
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=120)
        connection.request("GET", "/v1/events", headers={"Authorization": f"Bearer {self.token}"})
        answer = connection.getresponse()
        while not self.is_over and answer.readline():
            self.heard += 1
        connection.close()

    def look(self) -> None:
        """Ask for the first page again and again."""
        caller = self.caller()
        while not self.is_over:
            started = time.monotonic()
            caller.call("GET", "/parts/home")
            self.page_seconds.append(time.monotonic() - started)
            time.sleep(0.5)

    def run(self, agents: int, jobs: int, listeners: int) -> dict[str, Any]:
        """Submit the jobs, run them, and return what was found."""
        caller = self.caller()
        started = time.monotonic()
        ids = []
        for number in range(jobs):
            asked = {"model": "bert-tiny", "effective_batch": 16, "study": f"load-{number}"}
            ids.append(caller.call("POST", "/v1/searches", asked)["id"])
        submitted = time.monotonic() - started
        beside = [threading.Thread(target=self.listen, daemon=True) for _ in range(listeners)]
        beside.append(threading.Thread(target=self.look, daemon=True))
        workers = [threading.Thread(target=self.agent, args=(number,)) for number in range(agents)]
        started = time.monotonic()
        for thread in (*beside, *workers):
            thread.start()
        for thread in workers:
            thread.join()
        seconds = time.monotonic() - started
        self.is_over = True
        return {
            "agents": agents,
            "jobs": jobs,
            "listeners": listeners,
            "lost": len(set(ids) - set(self.ran)),
            "doubled": len(self.ran) - len(set(self.ran)),
            "submitted_per_second": round(jobs / submitted, 1),
            "ran_per_second": round(jobs / seconds, 1),
            "claim_ms_median": percentile(self.claim_seconds, 0.5),
            "claim_ms_p95": percentile(self.claim_seconds, 0.95),
            "page_ms_median": round(1000 * statistics.median(self.page_seconds), 1),
            "page_ms_p95": percentile(self.page_seconds, 0.95),
            "events_heard": self.heard,
        }


def measure(agents: int, jobs: int, listeners: int) -> dict[str, Any]:
    """Start a service on a new database, load it and end it; return what was found."""
    with tempfile.TemporaryDirectory() as folder:
        service = subprocess.Popen(
            [sys.executable, "-m", "autotune", "serve", "--port", "0", "--no-agent", "--storage", f"{folder}/a.db"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
        )
        try:
            assert service.stdout is not None
            url, _, token = service.stdout.readline().strip().partition("/#token=")
            return Load(url, token).run(agents, jobs, listeners)
        finally:
            service.terminate()
            service.wait(30)


def main() -> None:
    """Measure, and print it."""
    parser = argparse.ArgumentParser()
    for name, default in (("agents", 50), ("jobs", 5000), ("listeners", 200)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    print(json.dumps(measure(given.agents, given.jobs, given.listeners)))


if __name__ == "__main__":
    main()
