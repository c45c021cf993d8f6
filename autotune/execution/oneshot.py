"""Run one job in a new child process, which ends with its answer: an inspection of the GPU, say, or a real training."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self, TypeVar

from autotune.core.code_interface import FoundProtection
from autotune.core.errors import TrialServerError
from autotune.core.inspection import GpuFacts, GpuWork, Inspection
from autotune.core.placement import Placement
from autotune.core.real_training import VARIABLE, RealTraining, Recovery
from autotune.core.schema import decode, encode
from autotune.core.scratch import make_scratch, private_opener
from autotune.core.signals import signals_delayed
from autotune.devices.nvml import current_session
from autotune.execution.child_process import ChildProcess, server_environment, tail

# A job that fits into the pipe is written at once. The rest of a longer job is read after torch was imported.
_WRITE_SECONDS = 180.0
_SAME_VERSION = "see whether autotune was updated in the meantime, and start the command again"

T = TypeVar("T")


class NoAnswerError(TrialServerError):
    """The process ended without an answer."""


class TooLateError(TrialServerError):
    """The process gave no answer in time."""


class OneShot:
    """A child process for one job. Closing it, or leaving it as a context, ends it and removes every file of it."""

    def __init__(self, module: str, work: object, environment: Mapping[str, str], log_path: Path) -> None:
        """Start ``python -m module`` and send it the ``work``, with the path of an empty ``output_dir``.

        Raises ``TrialServerError`` where no process can be started.
        """
        self._log_path = log_path
        with contextlib.ExitStack() as stack:
            scratch = make_scratch("autotune-")
            stack.callback(scratch.remove)
            try:
                log_path.parent.mkdir(parents=True, exist_ok=True)
                with open(log_path, "wb", opener=private_opener) as log, signals_delayed():
                    self._process = ChildProcess(module, log, {**environment, "TMPDIR": scratch.temporary})
                    stack.callback(self._process.end)
            except OSError as error:
                raise TrialServerError(
                    f"no process could be started: {error}", f"make room beside {log_path}"
                ) from error
            job = {"work": encode(work), "output_dir": scratch.output_dir}
            # Sending fails where the process ended at once; its log says why.
            self._process.send(job, time.monotonic() + _WRITE_SECONDS)
            self._process.close_input()
            self.close = stack.pop_all().close
            """Ends the process, and removes its files."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def kill(self) -> None:
        """End the process; an ``answer`` that waits in another thread raises ``NoAnswerError``."""
        self._process.kill()

    def answer(self, kind: type[T], timeout_seconds: float) -> T:
        """Wait for the process's answer, and return it decoded as ``kind``.

        Raises ``TooLateError`` after ``timeout_seconds``, ``NoAnswerError`` where the process ended without an answer,
        and ``TrialServerError`` where the answer is no ``kind``.
        """
        said = self._process.read_to_end(time.monotonic() + timeout_seconds)
        if said is None:
            raise TooLateError(f"no answer came within {timeout_seconds:.0f} s", f"see {self._log_path}")
        try:
            document = json.loads(said)
        except ValueError as error:
            last = tail(self._log_path, 1) or "it said nothing"
            raise NoAnswerError(f"the process ended without an answer: {last}", f"see {self._log_path}") from error
        try:
            return decode(document, kind)
        except ValueError as error:
            raise TrialServerError(f"the process gave no answer that can be read: {error}", _SAME_VERSION) from error


def run_fresh(
    module: str,
    work: object,
    kind: type[T],
    placement: Placement,
    log_path: Path,
    timeout_seconds: float,
    *,
    offline: bool,
    variables: Mapping[str, str] | None = None,
) -> T:
    """Run ``python -m module`` on some work and return its decoded answer; leave no process, and no file but its log.

    The process sees only the devices of ``placement``, with ``variables`` in its environment. An ``offline`` process
    never asks the Hugging Face hub. Raises ``TrialServerError`` where it cannot be started, or gives no readable answer
    in time.
    """
    environment = {**server_environment(placement, os.environ, offline=offline), **(variables or {})}
    with OneShot(module, work, environment, log_path) as process:
        return process.answer(kind, timeout_seconds)


MOST_RESTARTS = 3


def run_recovering(
    words: Sequence[str], variables: Mapping[str, str], training: RealTraining, say: Callable[[str], None]
) -> int:
    """Run the command ``words`` of a training, again with smaller batches after out of memory; return its exit code.

    ``training``, in an environment variable, tells the child which settings to train with. It is restarted at most
    ``MOST_RESTARTS`` times; ``say`` gets a line for each.
    """
    with tempfile.TemporaryDirectory(prefix="autotune-recover-") as folder:
        # The time now on the clock of files: checkpoints of earlier runs are older.
        since = os.stat(folder).st_mtime
        for attempt in range(MOST_RESTARTS + 1):
            # The child creates this file where it runs out of memory.
            mark_file = os.path.join(folder, str(attempt))
            training = replace(training, recovery=Recovery(mark_file, since, attempt))
            code = _run(words, {**variables, VARIABLE: json.dumps(encode(training))})
            smaller = training.with_smaller_batch()
            if not os.path.exists(mark_file) or attempt == MOST_RESTARTS:
                return code
            if smaller is None:
                say("out of memory, and there is no smaller batch")
                return code
            training = smaller
            candidate = training.candidate
            pair = f"{candidate.per_device_train_batch_size} × {candidate.gradient_accumulation_steps}"
            say(
                f"out of memory: started again from its last checkpoint with {pair}, "
                f"restart {attempt + 1} of at most {MOST_RESTARTS}"
            )
    raise AssertionError("the last attempt returns")


def _run(words: Sequence[str], variables: Mapping[str, str]) -> int:
    """Run a command, passing SIGTERM on to it; return its exit code, 128 plus the number of a signal that ended it."""
    before = signal.getsignal(signal.SIGTERM)
    # A terminal sends Ctrl-C to both processes; only the child is to react.
    ignored = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = subprocess.Popen(
            words, env=dict(variables), preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler)
        )
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        code = process.wait()
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, ignored)
    return code if code >= 0 else 128 - code


_MODULE = "autotune.worker.gpu_facts"
# Importing torch and starting CUDA took 5 to 8 s on slow hosts (H200, 16 virtual cores).
_TIMEOUT_SECONDS = 180.0


class GpuInspection:
    """Measures the memory of a CUDA context and reads the GPU's properties, in a process; a CPU has no such process.

    The answer is kept for later searches, unless the memory in use on the GPU changed meanwhile: another process may
    then have been counted as part of the context. ``convolves``: the context has cuDNN's convolution kernels.
    """

    def __init__(self, placement: Placement, convolves: bool) -> None:
        self._placement = placement
        self._work = GpuWork(placement.device.uuid, convolves=convolves, ranks=placement.ranks)
        self._process: OneShot | None = None
        self._used_bytes_before: int | None = None
        """Memory in use on the GPU when the process was started."""
        self._kept_facts: GpuFacts | None = None
        self._log_folder: Path | None = None
        self._has_log = False

    def begin(self, log_folder: Path | None = None) -> None:
        """Start the process for a GPU, unless it runs or its answer is kept. Without ``log_folder`` it has no log."""
        self._log_folder = log_folder
        if self._placement.kind == "cuda" and self._process is None and self._kept_facts is None:
            self._used_bytes_before = current_session().used_bytes(self._work.device_uuid)
            self._has_log = log_folder is not None
            log_path = log_folder / "inspect_gpu.log" if log_folder is not None else Path(os.devnull)
            environment = server_environment(self._placement, os.environ, offline=True)
            self._process = OneShot(_MODULE, self._work, environment, log_path)

    def finish(self) -> GpuFacts | None:
        """Wait for the GPU's facts and end the process; ``None`` where none was started, as for a CPU.

        Raises ``TrialServerError`` where the process gives no answer.
        """
        if self._kept_facts is not None or self._process is None:
            return self._kept_facts
        try:
            facts = self._process.answer(GpuFacts, _TIMEOUT_SECONDS)
        except TrialServerError as error:
            if not self._has_log and self._log_folder is not None:
                # A ``WarmServer`` began the process without a log, before a search. Start another, whose log says why.
                self.close()
                self.begin(self._log_folder)
                return self.finish()
            what = "device" if self._placement.ranks == 1 else "devices"
            hint = error.hint
            if isinstance(error, NoAnswerError):
                hint += "; if torch has no CUDA, install it as pytorch.org says, or choose --device cpu"
            raise TrialServerError(
                f"the {what} {self._placement.label} could not be inspected: {error.message}", hint
            ) from error
        finally:
            self.close()
        before = self._used_bytes_before
        if before is not None and current_session().used_bytes(self._work.device_uuid) == before:
            self._kept_facts = facts
        return facts

    def close(self) -> None:
        """End the process if it still runs."""
        process, self._process = self._process, None
        if process is not None:
            process.close()


def with_gpu_facts(inspection: Inspection, of_gpu: GpuFacts | None) -> Inspection:
    """Return the trial server's inspection with the facts of the GPU; unchanged where ``of_gpu`` is ``None``."""
    if of_gpu is None:
        return inspection
    software = replace(inspection.software, cuda=of_gpu.cuda, cudnn=of_gpu.cudnn, cublas=of_gpu.cublas)
    context_bytes, chip, calibration = of_gpu.context_bytes, of_gpu.chip, of_gpu.calibration
    return replace(inspection, software=software, context_bytes=context_bytes, chip=chip, calibration=calibration)


# The test takes a tenth of a second. A network file system that does not answer would also keep trials from starting.
_WAIT_SECONDS = 20.0


@functools.cache
def find_protection() -> FoundProtection:
    """Return the best protection of the user's files from their own code that works here, tried in a process."""
    command = [sys.executable, "-P", "-m", "autotune.worker.user.protection"]
    try:
        said = subprocess.run(command, capture_output=True, timeout=_WAIT_SECONDS, check=False).stdout
    except subprocess.TimeoutExpired as error:
        said = error.stdout or b""
    except OSError:
        said = b""
    lines = said.decode(errors="replace").splitlines()
    # What timed out may have written a part of its answer.
    with contextlib.suppress(ValueError):
        if lines:
            return decode(json.loads(lines[-1]), FoundProtection)
    return FoundProtection("none", "the process that tries it out ended without an answer")
