"""A process of its own for one job: started cold, told one thing, heard once, gone."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from autotune.core.candidate import Document
from autotune.core.errors import TrialServerError
from autotune.core.pipes import wait_until_ready, write_all
from autotune.core.scratch import make_scratch
from autotune.devices import Device
from autotune.execution import launch
from autotune.execution.process_environment import server_environment
from autotune.execution.process_outcome import tail


def run_fresh(
    module: str,
    job: Document,
    device: Device,
    log_path: Path,
    timeout_seconds: float,
    variables: Mapping[str, str] | None = None,
) -> Document:
    """Run ``python -m module`` on a job and return what it answers; no process and no file of it is left.

    The job gets ``output_dir``, an empty temporary folder. The process sees ``device`` alone and has ``variables`` in
    its environment. Raises ``TrialServerError`` where no answer comes in time.
    """
    scratch = make_scratch("autotune-")
    variables = {**(variables or {}), "TMPDIR": scratch.temporary}
    try:
        said = _said_by(module, {**job, "output_dir": scratch.output_dir}, device, log_path, timeout_seconds, variables)
    finally:
        scratch.remove()
    if said is None:
        raise TrialServerError(f"no answer came within {timeout_seconds:.0f} s", f"see {log_path}")
    try:
        answer: Document = json.loads(said)
    except ValueError as error:
        last = tail(log_path, 1) or "it said nothing"
        raise TrialServerError(f"the process ended without an answer: {last}", f"see {log_path}") from error
    return answer


def _said_by(
    module: str, job: Document, device: Device, log_path: Path, timeout_seconds: float, variables: Mapping[str, str]
) -> bytes | None:
    """All that the process wrote to its pipe; ``None`` where it took too long. It has ended by then."""
    deadline = time.monotonic() + timeout_seconds
    read_fd, write_fd = os.pipe()
    environment = server_environment(device, os.environ, offline=job["workload"]["weights"] is None)
    try:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with open(log_path, "wb") as log:
            process = launch.start_module(module, write_fd, log, {**environment, **variables})
    except OSError as error:
        os.close(read_fd)
        raise TrialServerError(f"no process could be started: {error}", f"make room beside {log_path}") from error
    finally:
        os.close(write_fd)
    try:
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        # One that ended at once has closed its end; its log says why.
        write_all(process.stdin.fileno(), json.dumps(job).encode() + b"\n", deadline)
        with contextlib.suppress(OSError):
            process.stdin.close()
        return _read_to_end(read_fd, deadline)
    finally:
        os.close(read_fd)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _read_to_end(fd: int, deadline: float) -> bytes | None:
    """All that is written until the other end is closed; ``None`` when that takes too long."""
    said = b""
    while wait_until_ready([fd], timeout_seconds=max(0.0, deadline - time.monotonic())):
        chunk = os.read(fd, 1 << 16)
        if not chunk:
            return said
        said += chunk
    return None
