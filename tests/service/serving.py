"""Clients of a service within the test's process, and an engine whose searches the test itself runs."""

import queue
from collections.abc import Callable, Sequence

from processes import wait_until
from recorded import EFFECTIVE_64, RecordedRunner
from searching import H200, search
from starlette.testclient import TestClient

from autotune.core.candidate import Document
from autotune.core.device import Device
from autotune.core.errors import InvalidRequestError
from autotune.engine.child import Teller
from autotune.engine.local import LocalRun
from autotune.engine.work import Host, Run, Work
from autotune.service.app import make_app
from autotune.service.searches import Searches
from autotune.store.opening import open_store

URL = "http://127.0.0.1"
PREDICTED: list[Document] = []
"""What was predicted, and not answered from memory."""


def with_token(server: TestClient, token: str) -> TestClient:
    """Return a client of the same service that sends a token."""
    return TestClient(server.app, base_url=URL, headers={"Authorization": f"Bearer {token}"}, follow_redirects=False)


class StandInRun(LocalRun):
    """A search that the test runs: what it says is recorded, and a cancel ends it."""

    def __init__(self, work: Work) -> None:
        super().__init__(work.id, lambda: self.end("interrupted"))
        self.work = work

    @property
    def job(self) -> str:
        return self.work.id.partition("-")[0]

    def end(self, state: str, problem: Document | None = None, **more: object) -> None:
        self.add("end", {"state": state, "problem": problem, **more})


class StandInEngine:
    """Has the devices that a test adds, and hands out what is started on them."""

    shares_storage = True

    def __init__(self) -> None:
        self.wake: Callable[[], object] = lambda: None
        self.found: dict[str, Run] = {}
        self.refuses: Exception | None = None
        self._hosts: list[Host] = []
        self._started: queue.SimpleQueue[StandInRun] = queue.SimpleQueue()
        self._runs: list[StandInRun] = []

    def add(self, *devices: Device, name: str = "host") -> None:
        self._hosts.append(Host(name, devices))
        self.wake()

    def next_run(self, seconds: float = 60.0) -> StandInRun:
        return self._started.get(timeout=seconds)

    @property
    def has_started(self) -> bool:
        """Whether a search was started that nobody has taken."""
        return not self._started.empty()

    def hosts(self) -> Sequence[Host]:
        return list(self._hosts)

    def problems(self) -> Sequence[str]:
        return []

    def start(self, work: Work, host: Host) -> Run:
        if self.refuses is not None:
            raise self.refuses
        run = StandInRun(work)
        self._started.put(run)
        self._runs.append(run)
        return run

    def find(self, work_id: str) -> Run | None:
        return self.found.get(work_id)

    def close(self) -> None:
        """See ``Engine.close``: what runs ends with the service, unless it is elsewhere."""
        if self.shares_storage:
            for run in self._runs:
                run.end("interrupted")


def state_of(searches: Searches, job_id: str) -> str:
    """Return the state of a job."""
    return searches.job(job_id).state


def waits_for_state(searches: Searches, job_id: str, *states: str) -> None:
    """Wait until a job is in one of these states."""
    assert wait_until(lambda: state_of(searches, job_id) in states, 60), state_of(searches, job_id)


def run_recorded(searches: Searches, engine: StandInEngine, *, ends: bool = True, **options: object) -> StandInRun:
    """Answer the next search from a recorded landscape; return its run."""
    run = engine.next_run()
    teller = Teller(run.add)
    search(searches.store, RecordedRunner(EFFECTIVE_64), teller, study=run.work.study, **options)  # type: ignore[arg-type]
    if ends:
        run.end("finished")
        waits_for_state(searches, run.job, "finished")
    return run


def record_answers(storage: str, *requests: Document) -> str:
    """Record finished searches in a database, as the answers to these requests; return a token."""
    engine = StandInEngine()
    engine.add(H200)
    with open_store(storage) as store:
        searches, token = Searches(store, storage, engine), store.queue.add_token("ann", "run")
        with TestClient(make_app(searches), base_url=URL) as plain:
            for request in requests:
                with_token(plain, token).post("/v1/searches", json=request).raise_for_status()
                precisions = request.get("precision")
                run_recorded(searches, engine, **({"precisions": tuple(precisions)} if precisions else {}))
    return token


def predict(command: str, options: Document) -> Document:
    """Stands in for a prediction; says what it was asked."""
    if options["gpu"] == ["unknown"]:
        raise InvalidRequestError("--gpu 'unknown' is not known", "known are many")
    PREDICTED.append(options)
    return {"predicted": True, "model": options["model"], "gpus": list(options["gpu"] or ())}
