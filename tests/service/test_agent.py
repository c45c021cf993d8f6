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

    def request(self, method: str, path: str, body: Any = None, **more: Any) -> Any:
        """Give the next answer."""
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
