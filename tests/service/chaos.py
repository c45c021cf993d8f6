"""Kill a service and the processes of its searches while thousands of jobs run, and count what was lost or doubled.

Service, processes and HTTP are real; a search of ten made-up GPUs lasts a fraction of a second and trains nothing.
"""

import contextlib
import random
import signal
import threading
import time
from collections import Counter
from http.client import HTTPException
from pathlib import Path
from typing import Any

import psutil
from served import Service
from standing_in import program

from autotune.store.opening import open_store
from autotune.store.queue import ENDED

CLIENTS = 10
"""Each has a token of its own: one may submit 1,200 searches a minute."""
PATIENCE_SECONDS = 400.0
BAD = ("searches lost", "searches doubled", "searches with another number of ends than one", "gaps in events")
AIMS = dict.fromkeys(BAD, 0)


class Chaos:
    """A service, its clients, and what was done to them."""

    def __init__(self, service: Service, seed: int) -> None:
        self.service = service
        self.random = random.Random(seed)
        self.storage = str(service.folder / "a.db")
        with open_store(self.storage) as store:
            self.tokens = [store.queue.add_token(f"client {number}", "admin") for number in range(CLIENTS)]
        service.token = self.tokens[0]
        self.ids: dict[str, str] = {}
        """Of what was accepted, by study."""
        self.kills: Counter[str] = Counter()

    def submit(self, token: str, numbers: range) -> None:
        """Submit searches; one that is not answered is sent again with its key."""
        for number in numbers:
            study = f"chaos-{number}"
            asked = {"model": "bert-tiny", "effective_batch": 16, "study": study, "fresh": True}
            self.ids[study] = self.service.submit(asked, token=token, key=study)["id"]

    def kill_service(self) -> None:
        self.service.kill()
        self.kills["kill -9 of the service"] += 1
        time.sleep(self.random.uniform(0, 0.5))
        self.service.serve_again()

    def kill_search(self) -> None:
        children = psutil.Process(self.service.process.pid).children()
        if children:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.random.choice(children).send_signal(signal.SIGKILL)
                self.kills["kill -9 of a search"] += 1

    def waiting(self) -> int:
        with contextlib.suppress(OSError, HTTPException):
            return len(self.service.call("GET", "/v1/searches?state=queued&state=running&limit=1000")["searches"])
        return -1

    def run(self, jobs: int, server_kills: int, search_kills: int) -> dict[str, Any]:
        """Submit, kill, wait for the end, and count from the database."""
        began = time.monotonic()
        self.service.serve("--storage", self.storage)
        clients = [
            threading.Thread(target=self.submit, args=(token, range(place, jobs, CLIENTS)), daemon=True)
            for place, token in enumerate(self.tokens)
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
        self.service.end()
        return {"searches": jobs, **self.kills, **self.count(jobs), "seconds": round(seconds)}

    def count(self, jobs: int) -> dict[str, int]:
        """Count what is recorded, and compare it with what was accepted."""
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


def measure(
    folder: Path, jobs: int = 2000, server_kills: int = 8, search_kills: int = 20, seed: int = 1
) -> dict[str, Any]:
    """Run it on a file; return what was found."""
    with Service(folder, program("processes", folder)) as service:
        return Chaos(service, seed).run(jobs, server_kills, search_kills)
