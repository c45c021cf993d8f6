"""Run a module in a child process: its environment, the lines that it reads and writes, how it ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen, TimeoutExpired
from typing import IO

from autotune.core.candidate import Document
from autotune.core.device import CAPABILITY_VARIABLE
from autotune.core.errors import TrainingSourceError
from autotune.core.messages import Answer
from autotune.core.outcome import Failed, Outcome, outcome_from_document
from autotune.core.pipes import LineReader, wait_until_ready, write_all
from autotune.core.placement import Placement, rank_log
from autotune.core.scratch import keep_compiled
from autotune.core.units import lines_with_words

# Left in place by torchrun, accelerate launch, MPI and Slurm wrappers; any of them makes the
# Trainer believe that it is one of several ranks (accelerate.utils.get_int_from_env looks for them).
_DISTRIBUTED = frozenset({
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "NODE_RANK", "PMI_RANK",
    "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS",
})  # fmt: skip
_DISTRIBUTED_PREFIXES = ("MASTER_", "ACCELERATE_", "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_", "TORCHELASTIC_", "FSDP_",
                         "PARALLELISM_CONFIG_")  # fmt: skip
# Prefix of autotune's own variables, which stay with the process that searches: they hold tokens, and addresses of
# databases with passwords.
_OWN_PREFIX = "AUTOTUNE_"
_RAY_TOKENS = frozenset({"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"})


def without_secrets(variables: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables for the user's code: without autotune's own (``AUTOTUNE_…``) and Ray's tokens."""
    return {
        name: value for name, value in variables.items() if name not in _RAY_TOKENS and not name.startswith(_OWN_PREFIX)
    }


def server_environment(
    placement: Placement, current: Mapping[str, str], *, offline: bool, own_code: bool = False
) -> dict[str, str]:
    """Return the environment of a process that trains only on the devices of ``placement``, made from ``current``.

    Variables of autotune itself, of Ray's tokens and of distributed launchers are left out. ``offline`` keeps the
    Hugging Face hub's client from network requests. ``own_code``: it trains the user's own code, which keeps its
    ``TOKENIZERS_PARALLELISM``.
    """
    environment = {
        name: value
        for name, value in without_secrets(current).items()
        if name not in _DISTRIBUTED and not name.startswith(_DISTRIBUTED_PREFIXES)
    }
    # By UUID, since CUDA and NVML count devices differently; -1 is what CUDA reads as "none".
    environment["CUDA_VISIBLE_DEVICES"] = ",".join(placement.uuids) if placement.kind == "cuda" else "-1"
    # torch.cuda.is_available() would otherwise start CUDA in the server, whose forked children could not use it then.
    environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    if placement.ranks > 1:
        # As torchrun sets it for several processes on a host; read when OpenMP is loaded, before any fork.
        environment.setdefault("OMP_NUM_THREADS", "1")
    if not own_code:
        environment["TOKENIZERS_PARALLELISM"] = "false"
    capability = placement.device.capability
    if capability is not None:
        environment[CAPABILITY_VARIABLE] = ".".join(map(str, capability))
    # The process can import what this one can; an empty entry means the working directory.
    environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    keep_compiled(environment)
    if offline:
        environment["HF_HUB_OFFLINE"] = "1"
    return environment


# Tests replace ``Popen``: to start another program, or to fork from an interpreter that has imported torch.


class ChildProcess:
    """Runs ``python -P -m MODULE FD ARGUMENTS…`` in a session of its own, which writes lines to the descriptor FD.

    It reads lines from its standard input. Ctrl-C in a terminal reaches the whole foreground group; with a session of
    its own the process does not get it, and whoever started it alone decides when it ends.
    """

    def __init__(
        self, module: str, log: IO[bytes] | int, environment: Mapping[str, str], arguments: tuple[str, ...] = ()
    ) -> None:
        """Start the process. Its output goes to ``log``; with ``subprocess.PIPE`` it is read from ``output``.

        Call it within ``signals_delayed``, and store the object there: a signal's exception could otherwise lose the
        process. Raises ``OSError`` where no process can be started.
        """
        read_fd, write_fd = os.pipe()
        try:
            self._process = Popen(
                [sys.executable, "-P", "-m", module, str(write_fd), *arguments],
                stdin=PIPE,
                stdout=log,
                stderr=STDOUT,
                pass_fds=[write_fd],
                env=dict(environment),
                start_new_session=True,
            )
        except BaseException:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
        assert self._process.stdin is not None
        self._stdin = self._process.stdin
        os.set_blocking(self._stdin.fileno(), False)
        self.output = self._process.stdout
        self.reports = LineReader(read_fd)
        self._writing = threading.Lock()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def send(self, message: Document, deadline: float) -> bool:
        """Send a line. Return ``False`` where the process is gone or does not read before the deadline."""
        with self._writing:
            if self._stdin.closed:
                return False
            return write_all(self._stdin.fileno(), json.dumps(message).encode() + b"\n", deadline)

    def read_to_end(self, deadline: float) -> bytes | None:
        """Return all bytes that the process writes to FD until its end; ``None`` where the deadline comes first."""
        said = b""
        while wait_until_ready([self.reports.fd], timeout_seconds=max(0.0, deadline - time.monotonic())):
            chunk = os.read(self.reports.fd, 1 << 16)
            if not chunk:
                return said
            said += chunk
        return None

    def close_input(self) -> None:
        """Close the standard input of the process, which tells it to end."""
        with contextlib.suppress(OSError):
            self._stdin.close()

    def wait(self, seconds: float | None = None) -> int | None:
        """Wait for the process's end and return its exit status; ``None`` where it still runs after ``seconds``."""
        with contextlib.suppress(TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def kill(self) -> None:
        """Kill the process and all processes of its session, and wait for its end."""
        # After the process was waited for, its id may belong to another process.
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def end(self, seconds: float = 0.0) -> None:
        """Tell the process to end, kill it after ``seconds``, and close its pipes."""
        self.close_input()
        if not seconds or self.wait(seconds) is None:
            self.kill()
        if self.output is not None:
            self.output.close()
        self.close()

    def close(self) -> None:
        """Close the pipe from the process."""
        if self.reports.fd >= 0:
            os.close(self.reports.fd)
            self.reports.fd = -1


def tail(path: str | Path, lines: int = 3) -> str:
    """Return the last ``lines`` lines with words of a log, joined by bars; an empty string without a log."""
    try:
        with open(path, "rb") as log:
            log.seek(0, os.SEEK_END)
            # The last 8 KiB hold these lines.
            log.seek(max(0, log.tell() - 8192))
            text = log.read().decode(errors="replace")
    except OSError:
        return ""
    return " | ".join(lines_with_words(text)[-lines:])


def check_own_code(name: str, answer: Answer, log_path: Path, timeout_seconds: float) -> None:
    """Raise ``TrainingSourceError`` where the user's own code, called ``name``, did not reach its training.

    The message is the problem in the answer or, without one, says how the process ended.
    """
    if answer.problem is not None:
        message, hint = answer.problem.message, answer.problem.hint
    elif answer.result is not None or answer.lost or answer.refused is not None:
        return
    elif answer.timed_out:
        message = f"{name} had not begun to train after {timeout_seconds:.3g} s"
        hint = "give it more time with --trial-timeout"
    elif answer.signal:
        message, hint = f"{name} was killed by {_signal_name(answer.signal)} before it trained", ""
    else:
        message = f"{name} ended its process before it trained"
        hint = "it has to train in the process that it is started as, not in one in the background"
    log_path = Path(rank_log(str(log_path), answer.rank or 0))
    last_words = tail(log_path)
    where = f"its log {log_path} ends: {last_words}" if last_words else f"its log is {log_path}"
    raise TrainingSourceError(message, "; ".join(filter(None, (hint, where))))


def how_it_ended(answer: Answer, log_path: str) -> str:
    """Return in a few words how a process without a result ended."""
    if answer.refused is not None:
        return answer.refused
    if answer.problem is not None:
        return answer.problem.message
    if answer.overdue:
        return "the trial server did not answer"
    if answer.lost:
        return "the trial server died"
    if answer.timed_out:
        return "it was still at work when its time limit was over"
    if answer.signal:
        return f"killed by {_signal_name(answer.signal)}"
    last_words = tail(rank_log(log_path, answer.rank or 0))
    return (
        f"its process ended with exit code {answer.exit_code}{f'; its last words: {last_words}' if last_words else ''}"
    )


def _signal_name(number: int) -> str:
    """Return the name of a signal, such as ``SIGKILL`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def outcome_of(answer: Answer, timeout_seconds: float, log_path: str) -> Outcome:
    """Return the outcome of a trial: the result that its process sent, else a failure that says how it ended."""
    if answer.result is not None:
        try:
            return outcome_from_document(answer.result)
        except ValueError as error:
            return Failed("malformed", str(error))
    if answer.problem is not None:
        return Failed("error", answer.problem.message)
    # The phase of the trial in which it failed.
    during = answer.during
    if answer.refused is not None:
        return Failed("error", answer.refused, during)
    if answer.timed_out:
        return Failed("timeout", f"stopped after the time limit of {timeout_seconds:.3g} s", during)
    if answer.lost:
        return Failed("lost", "the trial server died during the trial", during)
    # Of several ranks, the answer names the one that failed first.
    rank = f"rank {answer.rank}: " if answer.rank is not None else ""
    if answer.signal:
        hint = ", perhaps by the kernel for want of host memory" if answer.signal == signal.SIGKILL else ""
        return Failed("killed", f"{rank}killed by {_signal_name(answer.signal)}{hint}", during)
    if answer.malformed is not None:
        return Failed("malformed", f"{rank}not a result: {answer.malformed!r}", during)
    return Failed("error", rank + how_it_ended(answer, log_path), during)
