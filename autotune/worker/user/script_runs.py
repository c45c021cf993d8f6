"""Run a script several times at once, where the machine has room for that, with what runs in turn would show.

A run takes most of its time to import and to set up, on one core. What a run says beside others is believed unless they
may be the reason: where it fails for want of memory, a port or a device, it is run once more, by itself.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Generic, NoReturn, TypeVar

import torch

from autotune.core.scratch import Scratch
from autotune.devices.host import host_memory
from autotune.space.dataloader import usable_cores
from autotune.worker.process import Beside, append_output
from autotune.worker.user.protection import writes_apart

W = TypeVar("W")

Run = Callable[[Scratch, Callable[[W], NoReturn]], NoReturn]
"""Runs the script in a forked child; gets a folder for its files, and a function that sends what it showed."""

# So many cores that another user of the machine is not in the way, and so much memory for each of three runs that load
# a model of a billion weights in fp32. Choices.
_LEAST_CORES = 4
_LEAST_FREE_BYTES = 24 * 1024**3
# With less than this of the memory that was free at first, runs go on in turn. A choice.
_SCARCE_SHARE = 0.25
# Of the log of a run that was beside others. A choice.
_KEPT_LOG_BYTES = 1024**2


def have_room() -> bool:
    """Return whether runs are to be beside one another here: with cores and memory for it, and no file in common."""
    return writes_apart() and usable_cores() >= _LEAST_CORES and (host_memory().free_bytes or 0) >= _LEAST_FREE_BYTES


class ScriptRuns(Generic[W]):
    """Runs of a script, whose results are taken in their order."""

    def __init__(
        self, kind: type[W], runs: Sequence[Run[W]], scratch: Scratch, is_doubtful: Callable[[W], bool]
    ) -> None:
        self._kind, self._runs, self._scratch = kind, runs, scratch
        self._is_doubtful = is_doubtful
        """Whether a run may have shown that because of others beside it."""
        self._begun: dict[int, tuple[Beside[W], Scratch]] = {}
        self._least_free_bytes = 0.0

    def begin_all(self, scarce_share: float = _SCARCE_SHARE) -> None:
        """Begin every run now. Those after the first have folders and logs of their own until they are taken.

        They go on in turn where less than a share of the memory is left that is free now.
        """
        self._least_free_bytes = scarce_share * (host_memory().free_bytes or 0)
        threads = max(1, torch.get_num_threads() // len(self._runs))
        for at, run in enumerate(self._runs):
            scratch = self._scratch
            if at:
                scratch = Scratch(os.path.join(self._scratch.path, str(at)))
                os.makedirs(scratch.output_dir)
                os.mkdir(scratch.temporary)
            is_apart = at > 0
            child = Beside(self._kind, functools.partial(_run_beside, run, scratch, threads, is_apart=is_apart))
            self._begun[at] = child, scratch

    def take(self, at: int, limit_seconds: float = math.inf, *, must_answer: bool = True) -> W | None:
        """Return what a run showed; it begins now, unless all have begun. ``None`` where that took too long.

        Where it ended without a result, this process ends as it did, or gets ``None`` where it need not answer.
        """
        if at in self._begun:
            child, scratch = self._begun.pop(at)
            result = self._wait(child, limit_seconds)
            child.end()
            has_ended = result is not None or child.status is not None
            is_stopped = os.path.exists(scratch.stop_file)
            if not has_ended or is_stopped or (result is not None and not self._is_doubtful(result)):
                self._fetch(scratch)
                return self._answer(child, result, must_answer=must_answer)
            self.end()
        child = Beside(self._kind, functools.partial(self._runs[at], self._scratch))
        result = self._wait(child, limit_seconds)
        child.end()
        return self._answer(child, result, must_answer=must_answer)

    def end(self) -> None:
        """End the runs that have begun and were not taken; each begins again where it is taken after all."""
        for child, _ in self._begun.values():
            child.end()
        self._begun.clear()

    def _wait(self, child: Beside[W], limit_seconds: float) -> W | None:
        deadline = time.monotonic() + limit_seconds

        def is_over() -> bool:
            if self._begun and (host_memory().free_bytes or 0) < self._least_free_bytes:
                self.end()
            return time.monotonic() > deadline

        return child.wait(is_over)

    def _answer(self, child: Beside[W], result: W | None, *, must_answer: bool) -> W | None:
        if result is None and child.status is not None and must_answer:
            self.end()
            child.end_as_it_did()
        return result

    def _fetch(self, scratch: Scratch) -> None:
        """Put what a run beside others has left where it would be after a run in turn."""
        if scratch == self._scratch:
            return
        for name in ("kept_file", "stop_file"):
            with contextlib.suppress(FileNotFoundError):
                os.replace(getattr(scratch, name), getattr(self._scratch, name))
        with contextlib.suppress(OSError), open(_log_of(scratch), "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - _KEPT_LOG_BYTES))
            os.write(2, log.read())


def may_be_crowded_out(error: BaseException) -> bool:
    """Return whether a script may fail with an error for want of what other runs of it hold."""
    if isinstance(error, SystemExit):
        # Options that a script does not have: 2 by argparse.
        return error.code not in (None, 0, 2)
    return isinstance(error, (OSError, MemoryError, RuntimeError)) and not isinstance(
        error, (FileNotFoundError, PermissionError)
    )


def met_full_gpu() -> bool:
    """Return whether an allocation failed in this process, which the script may have made up for."""
    # Empty where the process has not used a GPU.
    return bool(torch.cuda.memory_stats().get("num_ooms", 0))


def _run_beside(
    run: Run[W], scratch: Scratch, threads: int, send: Callable[[W], NoReturn], *, is_apart: bool
) -> NoReturn:
    torch.set_num_threads(threads)
    if is_apart:
        append_output(_log_of(scratch))
        scratch.enter()
    run(scratch, send)


def _log_of(scratch: Scratch) -> str:
    return os.path.join(scratch.path, "log")
