"""Measure a service under load: many agents and clients, jobs of a stand-in trial, all over HTTP.

``python tests/service/load.py --agents 50 --jobs 5000 --listeners 200`` prints what was found. The agents do
everything that real ones do but search.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "studies")]

from autotune import __version__  # noqa: E402
from autotune.devices import find_device  # noqa: E402
from autotune.service.app import make_app  # noqa: E402
from autotune.service.searches import Searches  # noqa: E402
from autotune.service.tokens import add_token  # noqa: E402
from autotune.store import open_store  # noqa: E402


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

    def __init__(self, url: str, tokens: list[str], trial_seconds: float) -> None:
        self.url, self.token, self.tokens, self.trial_seconds = url, tokens[0], tokens, trial_seconds
        self.claim_seconds: list[float] = []
        self.submit_seconds: list[float] = []
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
            # As long as a trial lasts the agent asks for nothing; they do not all begin at once.
            time.sleep(self.trial_seconds * random.uniform(0.5, 1.5))
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

    def first_event(self, study: str) -> float:
        """Return the seconds from submitting a search to its first event."""
        started = time.monotonic()
        asked = {"model": "bert-tiny", "effective_batch": 16, "study": study}
        search = self.caller().call("POST", "/v1/searches", asked)["id"]
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=60)
        connection.request("GET", f"/v1/searches/{search}/events", headers={"Authorization": f"Bearer {self.token}"})
        answer = connection.getresponse()
        while not answer.readline().startswith(b"event:"):
            pass
        seconds = time.monotonic() - started
        connection.close()
        return seconds

    def repeat(self) -> float:
        """Return the seconds that the answer to a request takes that was answered before."""
        caller = self.caller()
        started = time.monotonic()
        told = caller.call("POST", "/v1/searches", ANSWERED)
        seconds = time.monotonic() - started
        if told["state"] != "finished":
            raise RuntimeError(f"it was not answered from the store: {told['state']}")
        return seconds

    def run(self, agents: int, jobs: int, listeners: int) -> dict[str, Any]:
        """Submit the jobs, run them, and return what was found."""
        # One token alone may not submit so fast.
        submitters = [Caller(self.url, token) for token in self.tokens]
        started = time.monotonic()
        ids = []
        for number in range(jobs):
            asked = {"model": "bert-tiny", "effective_batch": 16, "study": f"load-{number}"}
            begun = time.monotonic()
            ids.append(submitters[number % len(submitters)].call("POST", "/v1/searches", asked)["id"])
            self.submit_seconds.append(time.monotonic() - begun)
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
        # Still with all listeners.
        first_event = [self.first_event(f"event-{number}") for number in range(5)]
        self.is_over = True
        repeated = [self.repeat() for _ in range(20)]
        return {
            "agents": agents,
            "jobs": jobs,
            "listeners": listeners,
            "trial_seconds": self.trial_seconds,
            "lost": len(set(ids) - set(self.ran)),
            "doubled": len(self.ran) - len(set(self.ran)),
            "submitted_per_second": round(jobs / submitted, 1),
            "ran_per_second": round(jobs / seconds, 1),
            "submit_ms_median": percentile(self.submit_seconds, 0.5),
            "first_event_ms_worst": percentile(first_event, 1.0),
            "repeated_request_ms_median": percentile(repeated, 0.5),
            "claim_ms_median": percentile(self.claim_seconds, 0.5),
            "claim_ms_p95": percentile(self.claim_seconds, 0.95),
            "page_ms_median": round(1000 * statistics.median(self.page_seconds), 1),
            "page_ms_p95": percentile(self.page_seconds, 0.95),
            "events_heard": self.heard,
        }


ANSWERED = {"model": "bert-large-uncased", "effective_batch": 64}


def answer_once(storage: str) -> None:
    """Record a finished search, from a recorded landscape, as the answer to a request."""
    import serving
    from searching import H200
    from starlette.testclient import TestClient

    with open_store(storage) as store:
        searches = Searches(store, storage)
        with TestClient(make_app(searches), base_url=serving.URL) as plain:
            client = serving.with_token(plain, add_token(store.queue, "load", "run"))
            agent = serving.Agent(client, H200)
            client.post("/v1/searches", json=ANSWERED).raise_for_status()
            serving.run_recorded(searches, agent)
            client.delete(f"/v1/agents/{agent.id}")


def measure(agents: int, jobs: int, listeners: int, trial_seconds: float, storage: str | None = None) -> dict[str, Any]:
    """Start a service on a new database, or an empty one at ``storage``, load it and end it; return what was found."""
    with tempfile.TemporaryDirectory() as folder:
        storage = storage or f"{folder}/a.db"
        answer_once(storage)
        with open_store(storage) as store:
            tokens = [add_token(store.queue, f"client {number}", "run") for number in range(10)]
        service = subprocess.Popen(
            [sys.executable, "-m", "autotune", "serve", "--port", "0", "--no-agent", "--storage", storage],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
        )
        try:
            assert service.stdout is not None
            url = service.stdout.readline().strip()
            told = Load(url, tokens, trial_seconds).run(agents, jobs, listeners)
            times = psutil.Process(service.pid).cpu_times()
            # Says what the service costs where other processes share the cores with it.
            cpu_ms = 1000 * (times.user + times.system) / jobs
            return {**told, "service_cpu_ms_a_job": round(cpu_ms, 1), "load_average": os.getloadavg()[0]}
        finally:
            service.terminate()
            service.wait(30)


def main() -> None:
    """Measure, and print it."""
    parser = argparse.ArgumentParser()
    for name, default in (("agents", 50), ("jobs", 5000), ("listeners", 200)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--trial-seconds", type=float, default=2.0, help="How long a stand-in trial lasts on average.")
    parser.add_argument("--storage", help="An empty database, such as postgresql+psycopg://… [default: a SQLite file].")
    given = parser.parse_args()
    told = measure(given.agents, given.jobs, given.listeners, given.trial_seconds, given.storage)
    print("\n".join(f"{name:<28} {value}" for name, value in told.items()))
    # What must be reached, on a machine that does nothing else.
    raise SystemExit(bool(told["lost"] or told["doubled"]))


if __name__ == "__main__":
    main()
