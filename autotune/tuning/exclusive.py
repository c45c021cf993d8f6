"""Let one search at a time run on a GPU, and one on a study.

File locks tell the processes of one host apart, a lease in the database those of several.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from autotune.core.device import Device
from autotune.core.errors import AutotuneError, DeviceError, StorageError
from autotune.core.placement import this_owner
from autotune.devices.lock import FOLDER_VARIABLE, Holder, Lock, LockError

if TYPE_CHECKING:
    # Loads SQLAlchemy and Optuna, which a search that is refused at once does without.
    from autotune.store.leases import Lease
    from autotune.store.repository import Store

_POLL_SECONDS = 0.5

Note = Callable[[str], None]
Wait = Callable[[str | None], object]
"""Called with the reason for a wait in words, and with ``None`` at the end of the wait."""
MakeNames = Callable[[], Iterator[str]]
"""Returns an endless iterator of study names, the best first."""


def waits_with(note: Note) -> Wait:
    """Return a function that reports a wait as a note."""
    return lambda text: note(text) if text is not None else None


@contextlib.contextmanager
def take_turn(
    devices: Sequence[Device],
    study: str | MakeNames,
    database: str,
    *,
    wait: Wait | None,
    note: Note,
    is_taken: Callable[[str], bool] = lambda name: False,
) -> Iterator[tuple[str, bool]]:
    """Lock devices and study for the block; yield the study's name, and whether another search had to end first.

    ``study`` is a name, or makes names for a new study, which gets the first that no search holds and that is not
    ``is_taken``. ``database`` is the resolved path, or the URL, that the study is in. Where another search holds one of
    the locks, its end is waited for; without ``wait`` a locked GPU is a ``DeviceError``, a locked study a
    ``StorageError``. A CPU may be shared, with a note. Where no lock files can be written, nothing is locked but noted.
    """
    with contextlib.ExitStack() as stack:
        name, has_waited = None, False
        try:
            name, has_waited = _hold_study(stack, study, database, is_taken, wait=wait)
            has_waited |= _hold_devices(stack, devices, name, wait=wait, note=note)
        except LockError as error:
            _note_missing_lock(error, note)
            if name is None:
                name = study if isinstance(study, str) else next(each for each in study() if not is_taken(each))
        yield name, has_waited


@contextlib.contextmanager
def take_devices(devices: Sequence[Device], study: str, *, wait: Wait | None = None, note: Note) -> Iterator[None]:
    """Lock the devices for the block, to measure the winner of a ``study`` again outside of a search.

    Without ``wait``, a GPU that a search has locked is a ``DeviceError``.
    """
    with contextlib.ExitStack() as stack:
        try:
            _hold_devices(stack, devices, study, wait=wait, note=note, hint="verify again when that has ended")
        except LockError as error:
            _note_missing_lock(error, note)
        yield


def _note_missing_lock(error: LockError, note: Note) -> None:
    """Tell the user that no lock can be kept, so that this search and others do not notice each other."""
    note(f"{error}; searches beside this one go unnoticed. Name another folder with {FOLDER_VARIABLE}")


_BUSY_HINT = "add --wait to wait for its end, or choose another GPU"


def _hold_devices(
    stack: contextlib.ExitStack,
    devices: Sequence[Device],
    study: str,
    *,
    wait: Wait | None,
    note: Note,
    hint: str = _BUSY_HINT,
) -> bool:
    """Lock all devices until the ``stack`` is left, see ``take_turn``; return if another search had to end first."""
    has_waited = False
    # Locks are taken in one order everywhere, after the lock of the study, so that no two searches wait for each other.
    # Ranks may share the CPU.
    for device in sorted({device.uuid: device for device in devices}.values(), key=lambda one: one.uuid):
        label = f"{device.label} ({device.name})"
        lock = stack.enter_context(Lock(device.uuid))
        if wait is not None:
            has_waited |= _wait_for(functools.partial(lock.acquire, study), label, wait)
        elif (holder := lock.acquire(study)) is not None:
            if device.kind == "cuda":
                raise DeviceError(f"{label} is in use by {holder.describe()}", hint)
            both = "both will measure slower trials than alone; --wait waits for its end"
            note(f"{holder.describe()} searches on this CPU, too: {both}")
    return has_waited


def _hold_study(
    stack: contextlib.ExitStack,
    study: str | MakeNames,
    database: str,
    is_taken: Callable[[str], bool],
    *,
    wait: Wait | None,
) -> tuple[str, bool]:
    """Lock a study until the ``stack`` is left, see ``take_turn``; return its name, and if another had to end first."""
    if isinstance(study, str):
        lock = stack.enter_context(_study_lock(study, database))
        if wait is not None:
            return study, _wait_for(functools.partial(lock.acquire, study), f"the study {study}", wait)
        if (holder := lock.acquire(study)) is not None:
            # The message names the study already.
            raise _study_taken_error(study, replace(holder, study=None).describe())
        return study, False
    for name in study():
        # A new study never waits for a name: there is always another one.
        with contextlib.ExitStack() as attempt:
            lock = attempt.enter_context(_study_lock(name, database))
            # Looked up with the lock held: a search that had the name may have ended just before.
            if lock.acquire(name) is None and not is_taken(name):
                stack.push(attempt.pop_all())
                return name, False
    raise ValueError("there are no more names")


def _study_lock(study: str, database: str) -> Lock:
    return Lock(f"study {database} {study}")


def _wait_for(take: Callable[[], Holder | Lease | None], what: str, wait: Wait) -> bool:
    """Call ``take`` until it returns no other holder of ``what``; return whether another search had to end first."""
    has_waited = False
    while (holder := take()) is not None:
        if not has_waited:
            wait(f"waiting for {what}, which {holder.describe()} searches")
            has_waited = True
        time.sleep(_POLL_SECONDS)
    if has_waited:
        wait(None)
    return has_waited


def _study_taken_error(study: str, holder: str) -> AutotuneError:
    """Return the error for a study that another search holds."""
    return StorageError(
        f"the study {study!r} is searched by {holder}", "add --wait to wait for its end, or name another"
    )


@contextlib.contextmanager
def hold_lease(store: Store, study: str, *, wait: Wait | None) -> Iterator[bool]:
    """Hold the lease of a study, a lock in the database, for the block; yield whether another search had to end first.

    Once the lease is lost, the store refuses to write the study. Without ``wait``, a lease of another process is a
    ``StorageError``.
    """
    from autotune.store.leases import name_of_study, renewed
    from autotune.store.records import new_id

    name, token, has_waited = name_of_study(study), new_id(), False
    take = functools.partial(store.leases.take, name, this_owner(), token)
    if wait is not None:
        has_waited = _wait_for(take, f"the study {study}", wait)
    elif (holder := take()) is not None:
        raise _study_taken_error(study, holder.describe())
    with renewed(store.leases, name, token):
        store.hold(study, token)
        try:
            yield has_waited
        finally:
            store.let_go()
