"""Start agents as processes, one for each device of this machine, and end them together."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from autotune.core.options import AGENT_STORAGE_VARIABLE
from autotune.devices import list_devices

# For the searches of an agent to go back to the queue.
_END_SECONDS = 20.0


def start_agents(
    server: str, storage: str, allow: Path | None, *, is_shared: bool, variables: Mapping[str, str]
) -> list[subprocess.Popen[bytes]]:
    """Start an agent for each GPU of this machine, or for its CPU where there is none.

    ``is_shared`` says that ``storage`` is the service's own database. ``variables`` are set for the agents.
    """
    devices = list_devices()
    words = [sys.executable, "-m", "autotune", "agent", "--server", server, "--with-parent"]
    words += ["--shared"] if is_shared else []
    words += ["--allow", str(allow)] if allow is not None else []
    environment = {**os.environ, **variables, AGENT_STORAGE_VARIABLE: storage}
    return [
        subprocess.Popen([*words, "--device", device.uuid], stdin=subprocess.PIPE, env=environment)
        for device in [device for device in devices if device.kind == "cuda"] or devices[:1]
    ]


def run_agents(server: str, storage: str, allow: Path | None) -> None:
    """Run agents with a database of their own until they are told to stop."""
    processes = start_agents(server, storage, allow, is_shared=False, variables={})

    def stop(number: int, frame: object) -> None:
        for process in processes:
            process.terminate()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    for process in processes:
        process.wait()


def stop_agents(agents: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the agents; their searches go back to the queue."""
    for agent in agents:
        agent.terminate()
    deadline = time.monotonic() + _END_SECONDS
    for agent in agents:
        try:
            agent.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            agent.kill()
            agent.wait()


def end_with_parent() -> None:
    """End this process when the process at the other end of its standard input ends."""

    def wait() -> None:
        # Not sys.stdin: Python aborts when it exits while another thread holds the lock of its buffer.
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="parent", daemon=True).start()
