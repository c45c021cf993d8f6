"""Run the service: the HTTP server, the queue, and an engine that runs what is queued."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import uvicorn

from autotune.core.errors import InvalidRequestError
from autotune.core.signals import ending_signals
from autotune.engine.local import LocalEngine
from autotune.engine.work import Engine
from autotune.service.access import OncePerMinute, limited_protocol, raise_open_files
from autotune.service.app import make_app
from autotune.service.requests import read_listed_code
from autotune.service.runner import held
from autotune.service.searches import Searches
from autotune.store.engine import leave_syncing_to_checkpoints
from autotune.store.opening import open_store
from autotune.store.records import now

# Listeners leave at the next poll; a request under way has so long to end.
_SHUTDOWN_SECONDS = 5

log = logging.getLogger("autotune.service")


@dataclass(frozen=True)
class Settings:
    """The options of a service, as ``autotune serve`` takes them."""

    storage: str
    host: str = "127.0.0.1"
    port: int = 8321
    data_folders: tuple[Path, ...] = ()
    names: tuple[str, ...] = ()
    """Host names that it answers to, besides those of this machine."""
    allow: Path | None = None
    """The file that lists code which may be searched by name."""
    executor: str | None = None
    """The address of a Ray cluster that runs the searches; ``None`` for the devices of this machine."""
    certificate: Path | None = None
    key: Path | None = None
    keep: timedelta | None = None
    """How long searches that have ended are kept in the queue; ``None`` for ever."""
    behind_proxy: bool = False
    """Whether something in front of it ends TLS, so that it may listen on a public address without."""

    def check(self) -> None:
        """Raise ``InvalidRequestError`` for a public address without TLS, and for wrong files."""
        if (self.certificate is None) != (self.key is None):
            raise InvalidRequestError("TLS needs a certificate and its key", "give --ssl-certfile and --ssl-keyfile")
        for path in filter(None, (self.certificate, self.key)):
            if not path.is_file():
                raise InvalidRequestError(f"there is no file {path}", "correct --ssl-certfile or --ssl-keyfile")
        if not is_own_address(self.host) and self.certificate is None and not self.behind_proxy:
            raise InvalidRequestError(
                f"{self.host} can be reached by others, and tokens would cross the network unencrypted",
                "give --ssl-certfile and --ssl-keyfile, or --behind-proxy where a proxy ends TLS; or go through "
                f"`ssh -L {self.port}:127.0.0.1:{self.port} THIS-MACHINE`",
            )
        for folder in self.data_folders:
            if not folder.is_dir():
                raise InvalidRequestError(f"--data {folder} is not a folder", "name a folder that is there")

    @property
    def url(self) -> str:
        """The service's address on this machine."""
        return self._url_of({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host))

    @property
    def shown_url(self) -> str:
        """The service's address for other machines where it is reachable and has a name, otherwise ``url``."""
        return self._url_of(self.names[0]) if self.names and not is_own_address(self.host) else self.url

    def _url_of(self, name: str) -> str:
        host = f"[{name}]" if ":" in name else name
        return f"{'https' if self.certificate else 'http'}://{host}:{self.port}"


def is_own_address(host: str) -> bool:
    """Return whether an address is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def steady_clock() -> Callable[[], datetime]:
    """Return a clock that ignores later changes of the system time, so that the times of jobs never go back."""
    started_at, began = now(), time.monotonic()
    return lambda: started_at + timedelta(seconds=time.monotonic() - began)


def serve(settings: Settings, ready: Callable[[str, str | None], None]) -> None:
    """Serve until SIGINT or SIGTERM.

    Once it listens, ``ready`` is called with its address and the first token; ``None`` if the database has tokens.
    Raises ``InvalidRequestError`` for impossible settings, and the ``StorageError`` of ``open_store``.
    """
    settings.check()
    # Only this user may read the files of requests, logs and the database.
    os.umask(0o077)
    open_files = raise_open_files()
    logging.getLogger("asyncio").addFilter(OncePerMinute())
    codes = read_listed_code(settings.allow) if settings.allow is not None else {}
    with (
        _listen(settings) as listener,
        open_store(settings.storage) as store,
        # Two services on one database would start each other's searches anew.
        held(store, "service", "the queue of this database"),
    ):
        settings = replace(settings, port=int(listener.getsockname()[1]))
        # Otherwise each event would wait for the disk, and all writers for each other.
        leave_syncing_to_checkpoints(store.engine)
        store.queue.clock = steady_clock()
        searches = Searches(store, settings.storage, _engine(settings), data_folders=settings.data_folders, codes=codes)
        own_name = f"[{settings.host}]" if ":" in settings.host else settings.host
        config = uvicorn.Config(
            make_app(searches, [own_name, *settings.names]),
            log_config=None,
            access_log=False,
            lifespan="on",
            timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
            ssl_certfile=settings.certificate,
            ssl_keyfile=settings.key,
            server_header=False,
            # Without a proxy in front, a client that names another address would be counted as another guesser.
            proxy_headers=settings.behind_proxy,
            timeout_keep_alive=30,
            http=limited_protocol(open_files),
        )
        server = _Server(config)
        # Existing tokens cannot be shown: the database has only their digests.
        token = None if store.queue.tokens() else store.queue.add_token("operator", "admin")
        asyncio.run(_run(server, listener, searches, lambda: ready(settings.shown_url, token), settings.keep))


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers, which would end this process before its searches are ended."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the caller, instead of uvicorn's handlers."""
        yield


async def _run(
    server: _Server, listener: socket.socket, searches: Searches, ready: Callable[[], None], keep: timedelta | None
) -> None:
    """Run the HTTP server until a signal, then end the searches and close. Call ``ready`` once it listens."""
    is_to_end = asyncio.Event()

    def end() -> None:
        """Tell the server and the event streams to end; the server waits for open streams."""
        server.should_exit = searches.is_closing = True
        searches.changes.notify_all()

    def stop() -> None:
        # Whoever asks twice does not want to wait for the searches.
        if is_to_end.is_set():
            end()
        is_to_end.set()

    loop = asyncio.get_running_loop()
    for number in ending_signals():
        loop.add_signal_handler(number, stop)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    forgetting = asyncio.create_task(searches.forget_hourly(keep)) if keep is not None else None
    signalled = asyncio.create_task(is_to_end.wait())
    try:
        ready()
        await asyncio.wait((serving, signalled), return_when=asyncio.FIRST_COMPLETED)
    finally:
        signalled.cancel()
        # Before the event streams end, so that their listeners are told what becomes of the searches.
        await asyncio.to_thread(searches.close)
        end()
        await serving
        if forgetting is not None:
            forgetting.cancel()


def _engine(settings: Settings) -> Engine:
    """Return the engine of these settings: local, or on a Ray cluster."""
    if settings.executor is None:
        return LocalEngine()
    from autotune.engine.ray import RayEngine

    return RayEngine(settings.executor)


def _listen(settings: Settings) -> socket.socket:
    """Return a listening socket. Raises ``InvalidRequestError`` where the address is unusable."""
    try:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        listener = socket.create_server((settings.host, settings.port), family=family, backlog=512)
    except OSError as error:
        # Without the address that ``create_server`` adds. A host that cannot be resolved has a number of its own.
        is_unknown = isinstance(error, socket.gaierror)
        reason = str(error.strerror or error) if is_unknown else os.strerror(error.errno or 0)
        raise InvalidRequestError(
            f"the service cannot listen on {settings.host}:{settings.port}: {reason.lower()}",
            "choose another --port, or end what uses it",
        ) from error
    # Accepted connections inherit TCP_NODELAY, which asyncio sets only on sockets made with the protocol's number.
    # Without it the kernel holds the body of an answer back until the client has acknowledged the head, 40 ms later.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


class JsonLines(logging.Formatter):
    """Formats log records as lines of JSON, one object each."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of JSON."""
        line = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_to_stderr() -> None:
    """Log the service's events to stderr, as JSON lines."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("alembic").setLevel(logging.WARNING)
