"""Whose turn it is: one search at a time on a GPU, and one on a study."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from autotune.device import Device
from autotune.device.lock import Holder, Lock
from autotune.errors import AutotuneError, DeviceError, StorageError


@contextmanager
def take_turn(device: Device, study: str, database: str, *, wait: bool, note: Callable[[str], None]) -> Iterator[bool]:
    """The device and the study for as long as the block lasts; yields whether it had to wait for them.

    ``database`` is the absolute path or URL that the study is in. Without ``wait`` a GPU that another search
    holds is a ``DeviceError``, a study that one is in a ``StorageError``. A CPU may be shared, which is said.
    """
    waited = False

    def say(what: str) -> Callable[[Holder], None]:
        def on_wait(holder: Holder) -> None:
            nonlocal waited
            waited = True
            note(f"waiting for {what}, which {holder.describe()} searches")

        return on_wait

    label = f"{device.label} ({device.name})"
    with Lock(device.uuid) as of_device, Lock(f"study {database} {study}") as of_study:
        # In the same order everywhere, so that no two wait for each other.
        if wait:
            of_study.wait(study, say(f"the study {study}"))
            of_device.wait(study, say(label))
        else:
            _take(of_study, study, lambda who: _study_is_taken(study, who))
            if device.kind == "cuda":
                _take(of_device, study, lambda who: _device_is_taken(label, who))
            elif (holder := of_device.acquire(study)) is not None:
                note(f"{holder.describe()} searches on this CPU, too: both will measure slower trials than alone")
        yield waited


def _take(lock: Lock, study: str, refuse: Callable[[str], AutotuneError]) -> None:
    holder = lock.acquire(study)
    if holder is not None:
        raise refuse(holder.describe())


def _device_is_taken(label: str, who: str) -> DeviceError:
    return DeviceError(f"{label} is searched on by {who}", "add --wait to wait for its end, or choose another --device")


def _study_is_taken(study: str, who: str) -> StorageError:
    return StorageError(f"the study {study!r} is searched by {who}", "add --wait to wait for its end, or name another")
