"""Connect to a Ray cluster and start actors on its nodes; the only module that imports Ray.

Only actors are used, neither Ray Tune nor Ray Train, which have loops of their own. A cluster is used only where it
asks for a token or the user allows one without: everyone who reaches such a cluster can run code on its nodes.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.core.errors import AutotuneError, InvalidRequestError, ServiceError
from autotune.space.features import how_to_add

SCHEME = "ray://"
WITHOUT_TOKEN_VARIABLE = "AUTOTUNE_RAY_WITHOUT_TOKEN"
"""``1`` allows a cluster that asks for no token, such as one on this machine alone."""

_MODE, _TOKEN, _TOKEN_PATH, _ADDRESS = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS"
# Where Ray itself looks last (ray/_private/authentication/authentication_token_setup.py, Ray 2.60).
_TOKEN_FILE = Path("~/.ray/auth_token")
# gRPC methods of a cluster's control server and of its server for clients (gcs_service.proto, ray_client.proto). To an
# unknown method a server answers ``UNIMPLEMENTED``, without asking for a token.
_OF_CONTROL = "/ray.rpc.NodeInfoGcsService/GetClusterId"
_OF_CLIENTS = "/ray.rpc.RayletDriver/ClusterInfo"
# The status for a caller with access. The server for clients does not know this client yet.
_ANSWERS = {_OF_CONTROL: "OK", _OF_CLIENTS: "NOT_FOUND"}
_REFUSED, _UNKNOWN = "UNAUTHENTICATED", "UNIMPLEMENTED"
_PROBE_SECONDS = 10.0
# The server for clients starts a process for each client, and gives up after 30 s, which a busy head may need.
_MOST_ATTEMPTS = 3


class NodeLostError(Exception):
    """The process on a node cannot be reached any more; the message says why."""


@dataclass(frozen=True)
class ClusterNode:
    """A machine of the cluster, with the GPUs and CPU cores that Ray may assign there."""

    id: str
    """Ray's id of the node, for as long as the node is up."""
    host: str
    gpus: int
    cpus: int


@dataclass(frozen=True)
class Token:
    """The token that this user has for a cluster."""

    value: str
    where: str
    """Where it was found, for messages."""


def find_token() -> Token | None:
    """Return the cluster's token as Ray finds it: two environment variables, then a file; ``None`` without one.

    Raises ``ServiceError`` where a variable names a file that cannot be read.
    """
    if value := os.environ.get(_TOKEN, "").strip():
        return Token(value, _TOKEN)
    named = os.environ.get(_TOKEN_PATH)
    path = Path(named) if named else _TOKEN_FILE.expanduser()
    try:
        value = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        if named:
            raise ServiceError(f"{_TOKEN_PATH}={named}: {error.strerror}", "name the file with the token") from error
        return None
    return Token(value, str(path)) if value else None


def check_address(text: str) -> str:
    """Return a valid cluster address. Raises ``InvalidRequestError`` for an invalid one."""
    wanted = text.strip()
    if wanted == "ray://auto" or re.fullmatch(r"ray://(\[[0-9A-Fa-f:.]+\]|[^\s/:@?#]+):\d{1,5}", wanted):
        return wanted
    raise InvalidRequestError(
        f"--executor {text[:100]} is not the address of a Ray cluster",
        "write ray://HOST:10001, the port for clients of its head, or ray://auto on one of its nodes",
    )


def trusts_without_token() -> bool:
    """Return whether the user allows a cluster without authentication."""
    return os.environ.get(WITHOUT_TOKEN_VARIABLE, "") not in ("", "0")


class RayCluster:
    """A connection to a cluster. Its methods may be called by several threads.

    What keeps it from being reached is a ``ServiceError``; an actor that is gone is a ``NodeLostError``.
    """

    def __init__(self, address: str) -> None:
        """Take the address ``ray://HOST:PORT`` or ``ray://auto``; ``connect`` uses it."""
        self.address = check_address(address)
        self.ray: Any = None
        self._is_ours = False
        """Whether the connection was made here, not by the program that uses autotune."""
        self._guard = threading.Lock()
        self._target = ""
        """The address that Ray's client connects to."""

    def connect(self) -> None:
        """Connect to the cluster. Raises ``ServiceError`` where it is missing or must not be used."""
        token = self._check_token_here()
        if token is not None:
            # Ray reads the mode when it is imported.
            os.environ[_MODE] = "token"
        try:
            import grpc
        except ImportError as error:
            raise _ray_missing_error() from error
        target = self.address.removeprefix(SCHEME)
        if target == "auto":
            target = _current_cluster()
        is_control_server = self._probe(grpc, target, token)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            import ray
        except ImportError as error:
            raise _ray_missing_error() from error
        self.ray = ray
        self._target = target if is_control_server else self.address
        if not ray.is_initialized():
            self._connect(self._target)
            self._is_ours = True

    def connect_again(self) -> None:
        """Reconnect after a lost connection. Raises ``ServiceError`` while the cluster is unreachable."""
        with self._guard:
            with contextlib.suppress(Exception):
                if self.ray.is_initialized() and self.ray.nodes():
                    return
            with contextlib.suppress(Exception):
                self.ray.shutdown()
            self._connect(self._target)

    def close(self) -> None:
        """Disconnect from the cluster; detached actors continue."""
        if self._is_ours:
            with contextlib.suppress(Exception):
                self.ray.shutdown()

    def _check_token_here(self) -> Token | None:
        """Return this machine's token for the cluster; ``None`` where the user allows a cluster without one.

        Raises ``ServiceError`` where there is no token, or Ray is told to use none.
        """
        mode = os.environ.get(_MODE, "token").lower()
        if trusts_without_token():
            return find_token() if mode == "token" else None
        if mode != "token":
            raise ServiceError(
                f"{_MODE}={mode} turns off the token of the Ray cluster", f"set {_MODE}=token here and where it starts"
            )
        token = find_token()
        if token is None:
            raise ServiceError(
                "there is no token for the Ray cluster here",
                f"set {_TOKEN} to what ray get-auth-token prints on its head, or put that into {_TOKEN_FILE}",
            )
        return token

    def _probe(self, grpc: Any, target: str, token: Token | None) -> bool:
        """Check that the cluster requires a token and accepts ours; return whether the address is the control server.

        Raises ``ServiceError`` otherwise. Ray itself would try for 10 to 20 seconds before it reports a refusal.
        """

        def status(question: str, metadata: tuple[tuple[str, str], ...] = ()) -> str:
            """Return the name of the gRPC status with which the cluster answers a call of a method."""
            with grpc.insecure_channel(target) as channel:
                ask = channel.unary_unary(question, request_serializer=bytes, response_deserializer=bytes)
                try:
                    ask(b"", timeout=_PROBE_SECONDS, metadata=metadata)
                except grpc.RpcError as error:
                    return str(error.code().name)
                return "OK"

        status_without_token = status(_OF_CONTROL)
        is_control_server = status_without_token != _UNKNOWN
        question = _OF_CONTROL if is_control_server else _OF_CLIENTS
        if not is_control_server:
            status_without_token = status(_OF_CLIENTS)
        if status_without_token not in (_REFUSED, _ANSWERS[question]):
            raise ServiceError(
                f"no Ray cluster answers at {target}",
                "see whether it runs (ray status on its head) and whether this machine reaches that port",
            )
        if status_without_token != _REFUSED:
            if not trusts_without_token():
                raise ServiceError(
                    f"the Ray cluster at {target} asks for no token: everyone who reaches it can run code there",
                    f"start it with {_MODE}=token (ray get-auth-token --generate makes one); "
                    f"for one on this machine alone set {WITHOUT_TOKEN_VARIABLE}=1",
                )
        elif token is None:
            raise ServiceError(f"the Ray cluster at {target} asks for a token", f"set {_MODE}=token and {_TOKEN}")
        elif status(question, (("authorization", f"Bearer {token.value}"),)) == _REFUSED:
            raise ServiceError(
                f"the Ray cluster at {target} does not take the token in {token.where}",
                f"ray get-auth-token on its head prints the one for {_TOKEN}",
            )
        return is_control_server

    def _connect(self, address: str) -> None:
        """Connect Ray's client to an address, with a few attempts. Raises ``ServiceError`` where that fails."""
        for attempt in range(1, _MOST_ATTEMPTS + 1):
            try:
                with _signal_handlers_kept():
                    self.ray.init(address=address, namespace=_NAMESPACE, log_to_driver=False, logging_level="ERROR")
                return
            except RuntimeError as error:
                # Ray refuses another version of itself or of Python, and says which.
                raise ServiceError(
                    f"the Ray cluster at {address} cannot be used from here: {' '.join(str(error).split())[:300]}",
                    "use the same versions of Ray and Python here and there",
                ) from error
            except (ConnectionError, ValueError, self.ray.exceptions.RayError) as error:
                if isinstance(error, ConnectionError) and attempt < _MOST_ATTEMPTS:
                    self.ray.shutdown()
                    continue
                raise ServiceError(
                    f"the Ray cluster at {address} cannot be reached: {_last_line(error)}",
                    "ray://HOST:10001 is for machines outside of the cluster, ray://auto for its nodes",
                ) from error

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Translate Ray's errors: ``NodeLostError`` where an actor is gone, ``ServiceError`` where no answer comes."""
        ray = self.ray
        try:
            yield
        except ray.exceptions.OutOfMemoryError as error:
            raise NodeLostError("Ray ended its process, since the host's memory was used up") from error
        except ray.exceptions.RayTaskError as error:
            raise AutotuneError(
                f"a process on the cluster failed: {_last_line(error)}", "please report this, with the log of Ray"
            ) from error
        except ray.exceptions.ActorDiedError as error:
            raise NodeLostError("its process or the whole node has died") from error
        except ray.exceptions.ActorUnschedulableError as error:
            raise NodeLostError(_last_line(error)) from error
        except (ray.exceptions.RayError, ConnectionError, RuntimeError, TimeoutError) as error:
            message = f"the Ray cluster at {self.address} does not answer: {_last_line(error)}"
            raise ServiceError(message, "see ray status on its head", status=0) from error

    def nodes(self) -> tuple[ClusterNode, ...]:
        """Return the live nodes, those with the most GPUs first."""
        with self._errors():
            nodes = self.ray.nodes()
        found = [
            ClusterNode(
                str(node["NodeID"]),
                str(node["NodeManagerHostname"]),
                int(node["Resources"].get("GPU", 0)),
                int(node["Resources"].get("CPU", 0)),
            )
            for node in nodes
            if node["Alive"]
        ]
        return tuple(sorted(found, key=lambda node: -node.gpus))

    def start(
        self, kind: type, arguments: tuple[Any, ...], node: str, *, gpus: int, cpus: int, name: str | None
    ) -> Any:
        """Start an actor of the class ``kind`` on a node without waiting; one with a ``name`` outlives this process."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        options: dict[str, Any] = {
            "num_gpus": gpus,
            "num_cpus": cpus,
            "max_restarts": 0,
            "max_task_retries": 0,
            # One call may wait for messages while others are answered.
            "max_concurrency": 4,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
        }
        if name is not None:
            options |= {"name": name, "namespace": _NAMESPACE, "lifetime": "detached"}
        with self._errors():
            return self.ray.remote(kind).options(**options).remote(*arguments)

    def find(self, name: str) -> Any:
        """Return the handle of the actor with a name; ``None`` where there is none."""
        with self._errors():
            try:
                return self.ray.get_actor(name, namespace=_NAMESPACE)
            except ValueError:
                return None

    def call(self, actor: Any, question: str, *arguments: Any) -> Any:
        """Call a method of an actor without waiting; return a reference to the result."""
        with self._errors():
            return getattr(actor, question).remote(*arguments)

    def is_ready(self, ticket: Any, wait_seconds: float) -> bool:
        """Return whether the result of a call is available, waiting for it at most ``wait_seconds``."""
        with self._errors():
            return bool(self.ray.wait([ticket], timeout=wait_seconds)[0])

    def get(self, ticket: Any) -> Any:
        """Return the result of a call."""
        with self._errors():
            return self.ray.get(ticket, timeout=_FETCH_SECONDS)

    def kill(self, actor: Any) -> None:
        """End an actor's process at once."""
        with contextlib.suppress(Exception):
            self.ray.kill(actor, no_restart=True)


_NAMESPACE = "autotune"
_FETCH_SECONDS = 60.0


def _ray_missing_error() -> InvalidRequestError:
    return InvalidRequestError("--executor ray://… needs Ray, which is not installed", how_to_add("ray"))


def _current_cluster() -> str:
    """Return the address of the cluster that this machine belongs to, as ``ray.init(address="auto")`` finds it."""
    named = os.environ.get(_ADDRESS, "").removeprefix(SCHEME)
    if named and named not in ("auto", "local"):
        return named
    try:
        # Ray has no public function that tells the address before a connection.
        from ray._private.services import get_ray_address_from_environment
    except ImportError as error:
        raise _ray_missing_error() from error
    try:
        address = get_ray_address_from_environment("auto", None)
    except ConnectionError:
        address = None
    if not address:
        raise ServiceError("no Ray cluster runs on this machine", "name one: --executor ray://HOST:10001")
    return str(address)


@contextlib.contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Restore the handlers of SIGTERM and SIGINT after connecting, in the main thread.

    Ray's handler of SIGTERM would end this process without its search.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _last_line(error: BaseException) -> str:
    """Return the last line of Ray's message, which may be a long traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__
