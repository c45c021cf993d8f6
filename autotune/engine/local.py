"""Run searches in child processes of this machine, one for each device, which are started again when they end."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from subprocess import PIPE

from autotune.core.candidate import Document
from autotune.core.device import Device
from autotune.core.errors import DeviceError
from autotune.core.placement import this_host
from autotune.core.schema import encode
from autotune.core.signals import signals_delayed
from autotune.devices.listing import list_devices
from autotune.engine.work import Host, Message, Run, Work
from autotune.execution.child_process import ChildProcess

# Processes that end at once, again and again, are started less and less often.
_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 60.0
# After a process that lived so long, the pause before a restart is the first one again.
_STARTED_WELL_SECONDS = 60.0
END_SECONDS = 6.0
"""How long processes may take to end their searches; they are killed then."""
_SEND_SECONDS = 60.0
"""How long a process that imports its modules may leave what it is sent unread."""
_MOST_LINE_BYTES = 2000
_READ_BYTES = 1 << 16

log = logging.getLogger("autotune.engine")


class LocalRun:
    """A search in a process of this machine: the process's messages until the client has acknowledged them."""

    def __init__(self, work_id: str, cancel: Callable[[], object]) -> None:
        """Wait for messages of the work with this id, which calling ``cancel`` ends."""
        self.work_id, self._cancel = work_id, cancel
        self._changed = threading.Condition()
        self._messages: deque[Message] = deque()
        self._last_number, self.is_over = 0, False

    def add(self, kind: str, document: Document) -> None:
        """Add a message of the process. Messages after an end are dropped."""
        with self._changed:
            if self.is_over:
                return
            self.is_over = kind == "end"
            self._last_number += 1
            self._messages.append(Message(self._last_number, kind, document))
            self._changed.notify_all()

    def messages(self, after: int, wait_seconds: float) -> list[Message]:
        """Return the messages after number ``after``, waiting at most ``wait_seconds``; see ``Run.messages``."""
        with self._changed:
            while self._messages and self._messages[0].number <= after:
                self._messages.popleft()
            if not self._messages:
                self._changed.wait(wait_seconds)
            return list(self._messages)

    def ends_within(self, seconds: float) -> bool:
        """Wait for the end of the search for at most ``seconds``; return whether it came in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self.is_over, seconds)

    def cancel(self) -> None:
        """Cancel the search, whose end is a message; see ``Run.cancel``."""
        self._cancel()

    def close(self) -> None:
        """End the search if it still runs; see ``Run.close``."""
        if not self.is_over:
            self._cancel()


class SearchProcess:
    """A process that runs one search at a time (``autotune.engine.child``)."""

    def __init__(self, device: str | None, on_end: Callable[[SearchProcess, str], None]) -> None:
        """Start a process for the device with a UUID, or for any. Once it ends, a thread calls ``on_end`` with why."""
        self.device = device
        self.started_at = time.monotonic()
        self._takes_no_input = False
        self._on_end = on_end
        self._run: LocalRun | None = None
        self._guard = threading.Lock()
        arguments = (device,) if device is not None else ()
        self._process = ChildProcess("autotune.engine.child", PIPE, os.environ, arguments)
        for target in (self._read, self._log):
            threading.Thread(target=target, name="engine", daemon=True).start()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process runs and reads its input."""
        # A killed process closes its pipes some time before it counts as ended.
        return not self._takes_no_input and self._process.is_alive

    def begin(self, work: Work) -> LocalRun:
        """Start work in the process, after waiting up to ``END_SECONDS`` for the end of its last work.

        Raises ``DeviceError`` where the process is gone or still busy.
        """
        run = LocalRun(work.id, lambda: self._send({"cancel": work.id}))
        # A search that was cancelled may need a moment to end, though nobody listens to it any longer.
        if self._run is not None and not self._run.ends_within(END_SECONDS):
            raise DeviceError("this process runs another search", "wait for its end")
        with self._guard:
            self._run = run
        if not self._send({"work": encode(work)}):
            self._takes_no_input = True
            raise DeviceError("the process of this device has ended", "it is started again")
        return run

    def _send(self, message: Document) -> bool:
        """Send a message; return ``False`` where the process has ended, or does not read for too long."""
        return self._process.send(message, time.monotonic() + _SEND_SECONDS)

    def _read(self) -> None:
        """Add messages of the process to its run until the process ends, then end the run as lost."""
        for line in self._process.reports.lines():
            with contextlib.suppress(ValueError):
                message = json.loads(line)
                with self._guard:
                    run = self._run
                if run is not None and run.work_id == message["work"]:
                    run.add(message["kind"], message["document"])
        code = self._process.wait() or 0
        self._process.close()
        why = f"its process was ended by signal {-code}" if code < 0 else f"its process ended with the status {code}"
        with self._guard:
            run = self._run
        if run is not None:
            run.add("end", {"state": "lost", "why": why})
        self._on_end(self, why)

    def _log(self) -> None:
        """Log the output of the process line by line, shortened."""
        assert self._process.output is not None
        with self._process.output as stream:
            while line := stream.readline(_READ_BYTES):
                text = line[:_MOST_LINE_BYTES].decode("utf-8", "replace").rstrip()
                if text:
                    log.warning(text, extra={"fields": {"process": self.pid, "device": self.device}})

    def tell_to_end(self) -> None:
        """Tell the process to end, together with its search."""
        self._process.close_input()

    def wait(self, seconds: float) -> None:
        """Wait for the end of the process; kill it after a timeout."""
        if self._process.wait(seconds) is None:
            self._process.kill()


class LocalEngine:
    """Searches on the devices of this machine: its GPUs, or its CPU where there is none. Each has a process."""

    shares_storage = True

    def __init__(self) -> None:
        self._name = this_host()
        self._guard = threading.Lock()
        self._children: dict[str, SearchProcess] = {}
        """The process of each device, by UUID."""
        self._pauses: dict[str, float] = {}
        """The seconds before the last restart of each process that ended, by UUID."""
        self._is_closing = False
        devices = list_devices()
        self._devices = tuple([device for device in devices if device.kind == "cuda"] or devices[:1])
        for device in self._devices:
            self._start_child(device.uuid)

    def _start_child(self, uuid: str) -> None:
        """Start a device's process, unless the engine closes. Raises ``OSError`` where none can be started."""
        with self._guard, signals_delayed():
            if not self._is_closing:
                self._children[uuid] = SearchProcess(uuid, self._on_end)

    def _on_end(self, child: SearchProcess, why: str) -> None:
        """Restart a device's process after a pause, which doubles where the process ended soon after its start."""
        assert child.device is not None
        uuid = child.device
        with self._guard:
            if self._is_closing:
                return
            pause_seconds = _FIRST_PAUSE_SECONDS
            has_started_well = time.monotonic() - child.started_at >= _STARTED_WELL_SECONDS
            if uuid in self._pauses and not has_started_well:
                pause_seconds = min(_LONGEST_PAUSE_SECONDS, 2 * self._pauses[uuid])
            self._pauses[uuid] = pause_seconds
        log.error(
            f"a process for searches is gone: {why}", extra={"fields": {"device": uuid, "again_in": pause_seconds}}
        )
        self._start_later(uuid, pause_seconds)

    def _start_later(self, uuid: str, pause_seconds: float) -> None:
        """Start a device's process after a pause, and try again later where the system has no room for a process."""

        def start() -> None:
            try:
                self._start_child(uuid)
            except OSError as error:
                log.error(f"no process for searches can be started: {error}", extra={"fields": {"device": uuid}})
                self._start_later(uuid, _LONGEST_PAUSE_SECONDS)

        timer = threading.Timer(pause_seconds, start)
        timer.daemon = True
        timer.start()

    def hosts(self) -> Sequence[Host]:
        """Return this machine, with the devices whose process runs; see ``Engine.hosts``."""
        return [Host(self._name, tuple(device for device in self._devices if self._is_running(device)))]

    def _is_running(self, device: Device) -> bool:
        child = self._children.get(device.uuid)
        return child is not None and child.is_alive

    def problems(self) -> Sequence[str]:
        """Return a line for each device whose process has ended; see ``Engine.problems``."""
        down = [device.label for device in self._devices if not self._is_running(device)]
        return [f"the process for searches on {label} has ended and is started again" for label in down]

    def start(self, work: Work, host: Host) -> Run:
        """Start a search in the process of its first device; see ``Engine.start``."""
        child = self._children.get(work.devices[0])
        if child is None:
            raise DeviceError(f"there is no device {work.devices[0]}", "autotune devices lists them")
        return child.begin(work)

    def find(self, work_id: str) -> Run | None:
        """See ``Engine.find``; always ``None``, since no search outlives the process that started it."""
        return None

    def close(self) -> None:
        """End all processes with their searches; see ``Engine.close``."""
        with self._guard:
            self._is_closing = True
            children = list(self._children.values())
        for child in children:
            child.tell_to_end()
        deadline = time.monotonic() + END_SECONDS
        for child in children:
            child.wait(max(0.1, deadline - time.monotonic()))
