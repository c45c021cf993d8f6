"""Measure a service under load: clients that speak HTTP, jobs of a stand-in search.

5,000 jobs on 50 stand-in devices with 200 listeners. The service does everything but search.
"""

import asyncio
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
from served import Service
from serving import record_answers
from standing_in import with_devices

from autotune.store.opening import open_store

ASKED = {"model": "bert-tiny", "effective_batch": 16}
ANSWERED = {"model": "bert-large-uncased", "effective_batch": 64}
# Each may submit 1,200 searches a minute.
TOKENS = 10
DEVICES, LISTENERS = 50, 200
TRIAL_SECONDS = 1.0
"""How long a stand-in trial lasts on average."""
AIMS = {
    "jobs lost": 0,
    "jobs doubled": 0,
    "a device idle between searches, median (ms)": 50,
    "first page, median (ms)": 200,
    "submit to first event, median of 20 (ms)": 20,
    "a request that was answered before, median (ms)": 5,
}
"""What a machine that does nothing else must reach."""


class Caller:
    """One client with a connection that is kept open."""

    def __init__(self, url: str, token: str) -> None:
        self._host = urlsplit(url).netloc
        self._token = token
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def call(self, method: str, path: str, document: Any = None) -> Any:
        """Send a request and return the answer's JSON, or its bytes."""
        reader = await self.ask(method, path, document)
        status, headers = await read_head(reader)
        data = await reader.readexactly(int(headers.get(b"content-length", b"0")))
        if status >= 400:
            raise RuntimeError(f"{method} {path}: {status} {data[:200]!r}")
        return json.loads(data) if headers.get(b"content-type") == b"application/json" else data

    async def ask(self, method: str, path: str, document: Any = None) -> asyncio.StreamReader:
        """Send a request; return what the answer is read from."""
        if self._reader is None or self._writer is None:
            host, _, port = self._host.partition(":")
            self._reader, self._writer = await asyncio.open_connection(host, int(port))
        body = b"" if document is None else json.dumps(document).encode()
        self._writer.write(
            f"{method} {path} HTTP/1.1\r\nHost: {self._host}\r\nAuthorization: Bearer {self._token}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        return self._reader

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


async def read_head(reader: asyncio.StreamReader) -> tuple[int, dict[bytes, bytes]]:
    """Read an answer's status and headers."""
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).rstrip().split(b"\r\n")
    headers = {}
    for line in lines:
        name, _, value = line.partition(b":")
        headers[name.lower()] = value.strip()
    return int(first.split()[1]), headers


def percentile(seconds: list[float], share: float) -> float:
    """Return a percentile of some seconds, in milliseconds."""
    ordered = sorted(seconds)
    return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1)


@dataclass
class Load:
    """The load on one service, and what was measured of it."""

    url: str
    tokens: list[str]
    submit_seconds: list[float] = field(default_factory=list)
    page_seconds: list[float] = field(default_factory=list)
    heard: int = 0

    def caller(self) -> Caller:
        return Caller(self.url, self.tokens[0])

    async def submit(self, token: str, numbers: range) -> list[str]:
        """Submit searches one after another; return their ids."""
        caller, ids = Caller(self.url, token), []
        for number in numbers:
            begun = time.monotonic()
            ids.append((await caller.call("POST", "/v1/searches", {**ASKED, "study": f"load-{number}"}))["id"])
            self.submit_seconds.append(time.monotonic() - begun)
        caller.close()
        return ids

    async def listen(self) -> None:
        """Follow the changes of the queue."""
        caller = self.caller()
        reader = await caller.ask("GET", "/v1/events")
        while data := await reader.read(65536):
            self.heard += data.count(b"event:")

    async def look(self) -> None:
        """Ask for the first page again and again."""
        caller = self.caller()
        while True:
            started = time.monotonic()
            await caller.call("GET", "/")
            self.page_seconds.append(time.monotonic() - started)
            await asyncio.sleep(0.5)

    async def time_first_event(self, study: str) -> float:
        """Return the seconds from submitting a search to its first event."""
        caller, listener = self.caller(), self.caller()
        started = time.monotonic()
        search = (await caller.call("POST", "/v1/searches", {**ASKED, "study": study}))["id"]
        reader = await listener.ask("GET", f"/v1/searches/{search}/events")
        await reader.readuntil(b"event:")
        seconds = time.monotonic() - started
        await caller.call("DELETE", f"/v1/searches/{search}")
        for client in (caller, listener):
            client.close()
        return seconds

    async def time_repeats(self, times: int) -> list[float]:
        """Return the seconds that the answer to a request takes that was answered before."""
        caller, found = self.caller(), []
        for _ in range(times):
            started = time.monotonic()
            told = await caller.call("POST", "/v1/searches", ANSWERED)
            found.append(time.monotonic() - started)
            if told["state"] != "finished":
                raise RuntimeError(f"it was not answered from the store: {told['state']}")
        caller.close()
        return found

    async def wait_until_all_have_run(self) -> None:
        """Wait until no search waits or runs."""
        caller = self.caller()
        while (await caller.call("GET", "/v1/searches?state=queued&state=running&limit=1"))["searches"]:
            await asyncio.sleep(0.2)
        caller.close()

    async def finished(self) -> set[str]:
        """Return the ids of all searches that the service says are finished."""
        caller, found = self.caller(), set()
        query = "state=finished&limit=1000"
        while page := (await caller.call("GET", f"/v1/searches?{query}"))["searches"]:
            found |= {search["id"] for search in page}
            query = f"state=finished&limit=1000&before={page[-1]['number']}"
        caller.close()
        return found

    async def run(self, jobs: int, listeners: int) -> dict[str, float]:
        """Submit the jobs, wait until they have run, and return what was found."""
        started = time.monotonic()
        # One token alone may not submit so fast.
        shares = [range(place, jobs, len(self.tokens)) for place in range(len(self.tokens))]
        submitted = await asyncio.gather(*map(self.submit, self.tokens, shares))
        ids = {search for found in submitted for search in found}
        submitting_seconds = time.monotonic() - started
        beside = [asyncio.create_task(self.listen()) for _ in range(listeners)]
        beside.append(asyncio.create_task(self.look()))
        started = time.monotonic()
        await self.wait_until_all_have_run()
        running_seconds = time.monotonic() - started
        # Still with all listeners.
        first_event = [await self.time_first_event(f"event-{number}") for number in range(20)]
        for task in beside:
            task.cancel()
        repeated, finished = await self.time_repeats(20), await self.finished()
        return {
            "jobs": jobs,
            "jobs lost": len(ids - finished),
            "first page, median (ms)": percentile(self.page_seconds, 0.5),
            "first page, 95th percentile (ms)": percentile(self.page_seconds, 0.95),
            "submit, median (ms)": percentile(self.submit_seconds, 0.5),
            "submit to first event, median of 20 (ms)": percentile(first_event, 0.5),
            "submit to first event, worst of 20 (ms)": percentile(first_event, 1.0),
            "a request that was answered before, median (ms)": percentile(repeated, 0.5),
            "submitted a second": round(jobs / submitting_seconds, 1),
            "run a second": round(jobs / running_seconds, 1),
            "events that the listeners heard": self.heard,
        }


def cpu_seconds(process: psutil.Process) -> float:
    """Return the processor time of a process and of those that it has started."""
    seconds = 0.0
    for each in (process, *process.children(recursive=True)):
        times = each.cpu_times()
        seconds += times.user + times.system + times.children_user + times.children_system
    return seconds


def busy_seconds() -> float:
    """Return the processor time of all processes of this machine."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)


def measure(folder: Path, storage: str, jobs: int = 5000, database: psutil.Process | None = None) -> dict[str, float]:
    """Load a service on an empty database; return what was found."""
    record_answers(storage, ANSWERED)
    with open_store(storage) as store:
        tokens = [store.queue.add_token(f"client {number}", "run") for number in range(TOKENS)]
    with Service(folder, with_devices(folder, {"load": DEVICES}, TRIAL_SECONDS)) as service:
        service.serve("--storage", storage)
        watched = [psutil.Process(), psutil.Process(service.process.pid), *([database] if database else [])]
        started, busy, before = time.monotonic(), busy_seconds(), [cpu_seconds(process) for process in watched]
        told = asyncio.run(Load(service.url, tokens).run(jobs, LISTENERS))
        seconds = time.monotonic() - started
        used = [cpu_seconds(process) - then for process, then in zip(watched, before, strict=True)]
        # The service is a child of this process.
        used[0] -= used[1] + (used[2] if database else 0)
    ran = json.loads((folder / "plan.json").read_text())
    return {
        **told,
        "jobs doubled": len(ran["started"]) - len({each.partition("-")[0] for each in ran["started"]}),
        "a device idle between searches, median (ms)": percentile(ran["idle"], 0.5),
        "a device idle between searches, 95th percentile (ms)": percentile(ran["idle"], 0.95),
        # What the service costs where other programs share the cores with it.
        "processor time of the service for a job (ms)": round(1000 * used[1] / jobs, 1),
        "processor time of the database server for a job (ms)": round(1000 * used[2] / jobs, 1) if database else 0,
        "processor time of the clients for a job (ms)": round(1000 * used[0] / jobs, 1),
        "seconds": round(seconds),
        "cores used by other programs": round((busy_seconds() - busy - sum(used)) / seconds, 2),
        "load average": round(os.getloadavg()[0], 1),
    }
