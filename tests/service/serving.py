"""Clients and stand-in agents of a service within the test's process."""

from __future__ import annotations

from recorded import EFFECTIVE_64, RecordedRunner
from searching import search
from starlette.testclient import TestClient

from autotune import __version__
from autotune.core.candidate import Document
from autotune.core.errors import InvalidRequestError
from autotune.devices import Device
from autotune.service.agent import Teller
from autotune.service.searches import Searches

URL = "http://127.0.0.1"
PREDICTED: list[Document] = []
"""What was predicted, and not answered from memory."""


def with_token(server: TestClient, token: str) -> TestClient:
    """Return a client of the same service that sends a token."""
    return TestClient(server.app, base_url=URL, headers={"Authorization": f"Bearer {token}"}, follow_redirects=False)


class Agent:
    """A stand-in that speaks as an agent does."""

    def __init__(self, client: TestClient, device: Device, count: int = 1) -> None:
        self.client = client
        offer = {**device.document(), "count": count}
        told = {"name": f"host {device.label}", "host": "host", "version": __version__, "device": offer}
        answer = client.post("/v1/agents", json=told)
        assert answer.status_code == 201, answer.text
        self.id = answer.json()["id"]

    def claim(self) -> Document | None:
        """Take the next search."""
        job: Document | None = self.client.post(f"/v1/agents/{self.id}/claim", json={}).json()["job"]
        return job

    def post(self, job: Document, what: str, **document: object) -> Document:
        """Send something about a search; the problem's status is in the answer where it was refused."""
        told = {"lease_token": job["lease_token"], **document}
        found: Document = self.client.post(f"/v1/agents/{self.id}/jobs/{job['id']}/{what}", json=told).json()
        return found


def run_recorded(searches: Searches, gpu_agent: Agent, *, ends: bool = True) -> Document:
    """Have an agent answer the next search from a recorded landscape; return its job."""
    job = gpu_agent.claim()
    assert job is not None
    events: list[Document] = []
    teller = Teller(lambda kind, document: events.append({"kind": kind, "document": document}), lambda status: None)
    search(searches.store, RecordedRunner(EFFECTIVE_64), teller, study=job["study"])  # type: ignore[arg-type]
    gpu_agent.post(job, "events", events=events)
    if ends:
        gpu_agent.post(job, "end", state="finished")
    return job


def predict(options: Document) -> Document:
    """Stands in for a prediction; says what it was asked."""
    if options["gpu"] == ("unknown",):
        raise InvalidRequestError("--gpu 'unknown' is not known", "known are many")
    PREDICTED.append(options)
    return {"predicted": True, "model": options["model"], "gpus": list(options["gpu"] or ())}
