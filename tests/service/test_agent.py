"""Test what an agent does when its service is away."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.core.errors import InvalidRequestError, ServiceError, StorageError
from autotune.service import agent
from autotune.service.client import Client


class Answers(Client):
    """A client of a service that answers in this order, with errors or documents."""

    def __init__(self, *answers: Any) -> None:
        super().__init__("http://127.0.0.1:1", "token")
        self.answers = list(answers)
        self.asked: list[tuple[str, Any]] = []

    def request(self, method: str, path: str, body: Any = None, **more: Any) -> Any:
        """Give the next answer."""
        self.asked.append((path.rpartition("/")[2], body))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_a_search_waits_for_a_database_that_is_away_when_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "_RETRY_SECONDS", 0.0)
    away = [StorageError("the database was shut down"), ServiceError("no service answers", status=0)]
    client = Answers(*away, {"own": None, "related": []}, InvalidRequestError("wrong"))
    lease = agent._Lease(client, "agent", {"id": "job", "lease_token": "token"})
    try:
        assert lease.fetch_records() == {"own": None, "related": []}
        with pytest.raises(InvalidRequestError):
            lease.fetch_records()
    finally:
        lease.release()


def test_a_search_whose_records_are_refused_has_not_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "_RETRY_SECONDS", 0.0)
    client = Answers(StorageError("the disk is full"), InvalidRequestError("this is no study"), {})
    lease = agent._Lease(client, "agent", {"id": "job", "lease_token": "token"})
    lease.release()
    lease.record({"study": {}}, {})
    lease.end("finished")
    assert [name for name, _ in client.asked] == ["events", "events", "end"]
    ended = client.asked[-1][1]
    assert (ended["state"], ended["problem"]["message"]) == ("failed", "this is no study")


def test_a_search_whose_records_nobody_takes_is_left_to_another_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "_PATIENCE_SECONDS", 0.0)
    client = Answers(StorageError("the disk is full"))
    lease = agent._Lease(client, "agent", {"id": "job", "lease_token": "token"})
    lease.release()
    lease.record({"study": {}}, {})
    lease.end("finished")
    assert [name for name, _ in client.asked] == ["events"]
