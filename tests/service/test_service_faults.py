"""Test that a search outlives its process: a sample of the hundred faults of ``make test-service``.

In the ordinary run, attempts that are lost are tests of their own, see ``test_service_api`` and
``tests/store/test_store_queue``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from faults import measure


@pytest.mark.service
@pytest.mark.timeout(600)
def test_no_study_is_lost_when_its_process_is_killed(tmp_path: Path) -> None:
    told = measure(1, tmp_path / "scene", kinds=("kill -9 of a search",))
    assert told["faults"] == {"kill -9 of a search": 1}
    assert told["studies"] >= 2
    for name in ("studies lost", "trials doubled", "wrong answers", "processes left"):
        assert told[name] == 0, name
