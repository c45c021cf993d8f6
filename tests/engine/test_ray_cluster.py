"""Test what is said about a Ray cluster before Ray is imported: its address, its token, that Ray is not installed."""

import contextlib
import sys
from pathlib import Path
from typing import Any

import pytest

from autotune.core.errors import InvalidRequestError, ServiceError
from autotune.core.schema import encode
from autotune.engine import ray_cluster
from autotune.engine.ray import RayEngine, facts_here
from autotune.engine.ray_cluster import ClusterNode, NodeLostError, RayCluster, check_address, find_token


@pytest.fixture(autouse=True)
def no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of this user's own clusters is seen."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv(ray_cluster.WITHOUT_TOKEN_VARIABLE, raising=False)
    monkeypatch.setattr(ray_cluster, "_TOKEN_FILE", tmp_path / "auth_token")


@pytest.mark.parametrize("address", ["ray://auto", "ray://head:10001", "ray://10.0.0.1:6379", "ray://[::1]:10001"])
def test_addresses_of_ray_are_taken(address: str) -> None:
    assert check_address(f" {address} ") == address


@pytest.mark.parametrize("address", ["auto", "head:10001", "ray://head", "ray://", "ray://a:b@head:1", "ray://h:1/x"])
def test_another_address_is_refused_with_the_forms(address: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"is not the address of a Ray cluster.*ray://HOST:10001.*ray://auto"):
        RayCluster(address)


def test_no_token_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(ServiceError, match=r"no token for the Ray cluster here.*RAY_AUTH_TOKEN"):
        RayCluster("ray://h:1").connect()


def test_a_mode_without_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    with pytest.raises(ServiceError, match="RAY_AUTH_MODE=disabled turns off the token"):
        RayCluster("ray://h:1").connect()


def test_a_token_is_found_in_the_environment_and_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_token() is None
    (tmp_path / "auth_token").write_text("own\n")
    found = find_token()
    assert (found.value, found.where) == ("own", str(tmp_path / "auth_token"))
    (tmp_path / "named").write_text("named\n")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "named"))
    assert getattr(find_token(), "value", None) == "named"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "first")
    assert getattr(find_token(), "value", None) == "first"


def test_a_token_file_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/nowhere/token")
    with pytest.raises(ServiceError, match="RAY_AUTH_TOKEN_PATH=/nowhere/token: No such file"):
        find_token()


def test_without_ray_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    for module in ("grpc", "ray"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InvalidRequestError, match=r"needs Ray, which is not installed.*\[ray\]"):
        RayCluster("ray://h:1").connect()


class OneNode:
    """A cluster of one node, which does not answer the first question."""

    questions = 0

    def __init__(self, error: Exception) -> None:
        self._error = error

    def nodes(self) -> tuple[ClusterNode, ...]:
        return (ClusterNode("node-1", "head", 0, 1),)

    def get(self, ticket: object) -> Any:
        self.questions += 1
        if self.questions == 1:
            raise self._error
        return encode(facts_here())

    def is_ready(self, ticket: object, wait_seconds: float) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **options: None


@pytest.mark.parametrize(
    ("error", "seconds"), [(ServiceError("no answer"), 60.0), (NodeLostError("it died"), 0.0), (ValueError(), 0.0)]
)
def test_a_node_is_asked_again_after_an_error_that_has_passed(
    error: Exception, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotune.engine.ray.RayCluster", lambda address: OneNode(error))
    with contextlib.closing(RayEngine("ray://h:1")) as engine:
        assert not engine.hosts()
        if not seconds:
            # Not at once: a process would be started on the node every few seconds.
            engine.refresh()
            assert [str(error) in problem for problem in engine.problems()] == [True]
        monkeypatch.setattr("autotune.engine.ray._REFUSED_SECONDS", seconds)
        engine.refresh()
        assert [host.node for host in engine.hosts()] == ["node-1"]
        assert engine.problems() == []
