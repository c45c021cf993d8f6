"""Lease a study to one process at a time, by a row with a token and an expiry that is replaced only if unchanged.

A lease holds between hosts, where a file lock does not. Whoever writes a study's records names the token of its lease,
and a write whose lease was lost is refused. Hosts that share a database need clocks that agree to a few seconds.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import Connection, Engine, delete, select, update

from autotune.core.errors import StorageError
from autotune.core.placement import Owner
from autotune.store.engine import insert_if_absent, storage_errors, transaction
from autotune.store.records import now
from autotune.store.tables import LeaseRow

LEASE_SECONDS = 60.0
"""How long the owner may be silent until another may take over. A choice: longer than a busy disk holds up a write,
and short enough to wait for after a host has died."""
RENEWALS = 4
"""Renewals within ``LEASE_SECONDS``, so that a few may fail."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Who works on a study, and until when this holds without a renewal."""

    name: str
    token: str
    """A random text by which the owner shows that the lease is still its own."""
    owner: Owner
    acquired_at: datetime
    heartbeat_at: datetime
    expires_at: datetime

    def describe(self) -> str:
        """Return the owner and the start: ``process 71 of ada on gpu-2 (since 2026-11-21 10:00 UTC)``."""
        return f"{self.owner.describe()} (since {self.acquired_at:%Y-%m-%d %H:%M} UTC)"


class Leases:
    """The leases in an open database. Methods raise ``StorageError`` where the database is locked, damaged or gone.

    ``clock`` tells the time by which leases expire.
    """

    def __init__(self, engine: Engine, label: str, clock: Callable[[], datetime] = now) -> None:
        self._engine = engine
        self._label = label
        self._clock = clock

    def take(self, name: str, owner: Owner, token: str, lease_seconds: float = LEASE_SECONDS) -> Lease | None:
        """Take a free lease under ``token`` and return ``None``; otherwise return the lease of its holder.

        A lease is free where it does not exist, has expired, or belonged to a process of this machine that has ended:
        after ``kill -9`` nobody waits for the expiry.
        """
        taken_at = self._clock()
        values = {
            "token": token,
            "owner": owner.user,
            "host": owner.host,
            "machine": owner.machine,
            "pid": owner.pid,
            "process_started": owner.started,
            "acquired_at": taken_at,
            "heartbeat_at": taken_at,
            "expires_at": taken_at + timedelta(seconds=lease_seconds),
        }
        with storage_errors(self._label), transaction(self._engine, writes=True) as connection:
            while not insert_if_absent(connection, LeaseRow, {"name": name, **values}):
                # On a server, another process may change the row between any two of these statements: then try again.
                lease = find_lease(connection, name)
                if lease is None:
                    continue
                if self._is_held(lease):
                    return lease
                unchanged = (LeaseRow.name == name) & (LeaseRow.token == lease.token)
                if connection.execute(update(LeaseRow).where(unchanged).values(**values)).rowcount == 1:
                    break
        return None

    def renew(self, name: str, token: str) -> bool:
        """Extend a lease; return whether it still has this token."""
        renewed_at = self._clock()
        values = {"heartbeat_at": renewed_at, "expires_at": renewed_at + timedelta(seconds=LEASE_SECONDS)}
        own = (LeaseRow.name == name) & (LeaseRow.token == token)
        with storage_errors(self._label), transaction(self._engine, writes=True) as connection:
            return connection.execute(update(LeaseRow).where(own).values(**values)).rowcount == 1

    def release(self, name: str, token: str) -> None:
        """Delete a lease, unless another process has it by now."""
        own = (LeaseRow.name == name) & (LeaseRow.token == token)
        with storage_errors(self._label), transaction(self._engine, writes=True) as connection:
            connection.execute(delete(LeaseRow).where(own))

    def holder(self, name: str) -> Lease | None:
        """Return the lease of this name if somebody holds it; ``None`` where it is free."""
        with storage_errors(self._label), transaction(self._engine, writes=False) as connection:
            return self.held_in(connection, name)

    def held_in(self, connection: Connection, name: str) -> Lease | None:
        """Return ``holder``, read within an open transaction."""
        lease = find_lease(connection, name)
        return lease if lease is not None and self._is_held(lease) else None

    def _is_held(self, lease: Lease) -> bool:
        """Return whether a lease has not expired, and its owner is not known to have ended."""
        return lease.expires_at > self._clock() and not lease.owner.is_gone()


@contextlib.contextmanager
def renewed(leases: Leases, name: str, token: str) -> Iterator[None]:
    """Renew a lease from a thread for the duration of the block or until it is lost; then release it."""
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(LEASE_SECONDS / RENEWALS):
            # A database that is locked just now may be free the next time.
            with contextlib.suppress(StorageError):
                if not leases.renew(name, token):
                    return

    thread = threading.Thread(target=renew, name="lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        # A lease that cannot be given back expires.
        with contextlib.suppress(StorageError):
            leases.release(name, token)


def find_lease(connection: Connection, name: str, *, locks_row: bool = False) -> Lease | None:
    """Return the lease of this name, even if expired; ``None`` where there is none.

    With ``locks_row``, nobody can take it over until this write transaction ends.
    """
    query = select(*LeaseRow.__table__.columns).where(LeaseRow.name == name)
    if locks_row:
        # SQLite ignores this, and needs no row lock: it admits one writer at a time.
        query = query.with_for_update(read=True)
    row = connection.execute(query).first()
    if row is None:
        return None
    _, token, user, host, machine, pid, started, *times = row
    return Lease(name, token, Owner(user, host, machine, pid, started), *times)


def name_of_study(study: str) -> str:
    """Return the name of a study's lease."""
    return f"study {study}"
