"""Test that a search outlives its agent: a sample of the hundred faults of ``make test-service``.

In the ordinary run, leases that are lost and studies that another agent goes on with are tests of their own, see
``test_service_api``, ``tests/store/test_store_queue`` and ``tests/store/test_store_transfer``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from faults import measure


@pytest.mark.service
@pytest.mark.timeout(600)
def test_no_study_is_lost_when_an_agent_is_killed(tmp_path: Path) -> None:
    told = measure(1, tmp_path / "scene", kinds=("kill -9 of an agent",))
    assert told["faults"] == {"kill -9 of an agent": 1}
    assert told["studies"] >= 2
    for name in ("studies lost", "trials doubled", "wrong answers", "processes left"):
        assert told[name] == 0, name
