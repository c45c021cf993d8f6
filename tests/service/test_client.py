"""Test what a client says of a service's address before it connects."""

from __future__ import annotations

import pytest

from autotune.core.errors import ServiceError
from autotune.service.client import Client


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
