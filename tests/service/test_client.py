"""Test what a client says of a service's address before it connects."""

from __future__ import annotations

import pytest

from autotune.core.errors import ServiceError, StorageError
from autotune.service.agent import _is_passing
from autotune.service.client import Client
from autotune.service.problems import error_of


@pytest.mark.parametrize(
    "url",
    ["", " ", "../..", "http://", "a b", "\x80", "http://[::1", "host:99999999", "x" * 300, "ftp://a", "\udcff"],
)
def test_an_address_that_can_be_none_is_refused(url: str) -> None:
    with pytest.raises(ServiceError) as told:
        Client(url)
    assert "\n" not in told.value.message
    assert told.value.hint


@pytest.mark.parametrize("url", ["gpu-box", "http://127.0.0.1:8321", "https://bücher.example", "http://[::1]:8321/"])
def test_an_address_of_a_service_is_taken(url: str) -> None:
    assert Client(url).url.startswith("http")


def test_a_token_that_no_header_can_bear_is_refused() -> None:
    with pytest.raises(ServiceError, match="token"):
        Client("gpu-box", token="a\nb")


def test_an_agent_asks_again_where_the_service_is_away_or_its_disk_is_full() -> None:
    assert _is_passing(StorageError("a.db cannot grow: the disk is full"))
    assert _is_passing(error_of({"exit_code": 5, "status": 503, "detail": "a.db cannot grow"}))
    assert _is_passing(ServiceError("no service answers", status=0))
    assert _is_passing(ServiceError("answered 502, which is not an answer of an autotune service", status=502))
    assert not _is_passing(ServiceError("this needs a token", status=401))
    assert not _is_passing(ServiceError("the lease was lost", status=410))
