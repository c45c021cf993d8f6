"""Run trials, as many at a time as there are slots: the protocol, and its implementation on this host."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from autotune.core.candidate import Candidate
from autotune.core.messages import Answer, Job, Progress, TrialWork
from autotune.core.outcome import Effort, Failed, Outcome, OutOfMemory
from autotune.core.pipes import wait_until_ready
from autotune.core.placement import Placement
from autotune.devices.host import oom_kills
from autotune.execution.child_process import outcome_of
from autotune.execution.trial_server import TrialServer


@dataclass(frozen=True)
class TrialJob:
    """What an executor needs to run one trial."""

    trial_id: str
    candidate: Candidate
    cap_bytes: int
    """Limit on what torch's allocator may reserve."""
    effort: Effort
    seed: int
    timeout_seconds: float
    log_path: str
    unmodified: bool = False
    """Run the user's own code with its own settings, not the candidate's."""
    placement: Placement | None = None
    """The devices to run on, one of the executor's slots. ``None``: the executor chooses a free slot."""


class Executor(Protocol):
    """Runs trials, one in each slot at a time.

    A trial that fails ends with an outcome that says how. ``submit`` and ``wait`` raise only what keeps all trials from
    running: ``TrialServerError`` where no server can be started, ``DeviceError`` where a GPU is lost.
    """

    @property
    def slots(self) -> tuple[Placement, ...]:
        """Placements of concurrent trials. Two slots may be equal, such as two on one CPU."""

    def submit(self, job: TrialJob) -> str:
        """Start a trial in a free slot without waiting; return its id."""

    def wait(self) -> tuple[str, Progress | Outcome]:
        """Wait for the next report of any running trial; return the trial's id and the report.

        The last report of a trial is its outcome.
        """

    def close(self) -> None:
        """End every running trial without further reports, and leave no process behind."""


class LocalExecutor:
    """Runs trials as processes of this host: one slot for each trial server, a process that forks them."""

    def __init__(self, servers: Sequence[TrialServer]) -> None:
        self._servers = tuple(servers)
        self.slots = tuple(server.placement for server in servers)
        self._running: dict[str, _Running] = {}

    def submit(self, job: TrialJob) -> str:
        """Start a trial in a free slot without waiting; see ``Executor.submit``."""
        server = self._free_server(job.placement)
        for each in self._servers:
            # Start all servers now, so that their imports overlap: ``begin`` waits for the imports of one.
            each.start()
        running = _Running(job, server, oom_kills())
        work = TrialWork(
            job.candidate,
            server.placement.rank_devices,
            job.cap_bytes,
            job.effort,
            job.seed,
            unmodified=job.unmodified,
            data_folder=str(server.data_folder) if server.data_folder else None,
        )
        server.begin(Job(job.trial_id, server.workload, work, job.timeout_seconds, job.log_path))
        self._running[job.trial_id] = running
        return job.trial_id

    def _free_server(self, placement: Placement | None) -> TrialServer:
        """Return a server without a running trial, on these devices if any are given; else raise ``RuntimeError``."""
        busy = [running.server for running in self._running.values()]
        for server in self._servers:
            if server not in busy and placement in (None, server.placement):
                return server
        raise RuntimeError("a trial was submitted although no slot for it is free")

    def wait(self) -> tuple[str, Progress | Outcome]:
        """Return the next report of a running trial with the trial's id; see ``Executor.wait``."""
        if not self._running:
            raise RuntimeError("no trial is under way")
        while True:
            for trial_id, running in self._running.items():
                progress = running.server.progress_of(trial_id)
                if progress is not None:
                    running.progress.append((time.monotonic(), progress))
                    return trial_id, progress
                answer = running.server.end_of(trial_id)
                if answer is not None:
                    del self._running[trial_id]
                    return trial_id, running.outcome(answer)
            self._listen()

    def _listen(self) -> None:
        """Wait until a server sends something or reaches its deadline, and have each server take its messages."""
        servers = [running.server for running in self._running.values()]
        timeout_seconds = min(server.seconds_left() or 0.0 for server in servers)
        wait_until_ready([server.fd for server in servers if server.fd is not None], timeout_seconds=timeout_seconds)
        for server in servers:
            server.listen(0.0)

    def pids_of(self, trial_id: str) -> frozenset[int]:
        """Return the process ids of a running trial, one for each rank."""
        running = self._running.get(trial_id)
        return frozenset(running.server.pids_of(trial_id) if running is not None else ())

    def close(self) -> None:
        """End all trials and servers, see ``Executor.close``; the next trial starts another server."""
        self._running.clear()
        for server in self._servers:
            server.close()


@dataclass(frozen=True)
class _Running:
    """A trial under way."""

    job: TrialJob
    server: TrialServer
    kills_before: int | None
    """How many processes the kernel had ended for want of memory before the trial; ``None`` where it does not say."""
    started_at: float = field(default_factory=time.monotonic)
    progress: list[tuple[float, Progress]] = field(default_factory=list)
    """The trial's progress reports, each with the ``time.monotonic`` of its arrival."""

    def outcome(self, answer: Answer) -> Outcome:
        """Return the trial's outcome from the answer of its server.

        A killed trial is out of host memory where the kernel counted one more process that it ended for that. A
        timeout's message says how long the trial would have needed.
        """
        outcome = outcome_of(answer, self.job.timeout_seconds, self.job.log_path)
        kills_now = oom_kills()
        if isinstance(outcome, Failed) and outcome.reason == "killed" and kills_now != self.kills_before:
            # It hardly killed another process in the same seconds.
            count = (kills_now or 0) - (self.kills_before or 0)
            message = f"the kernel ended {count} process for want of host memory, this trial"
            return OutOfMemory(message, where="host", during=outcome.during)
        if isinstance(outcome, Failed) and outcome.reason == "timeout":
            return replace(outcome, message=f"{outcome.message}{self._needed_seconds_in_words()}")
        return outcome

    def _needed_seconds_in_words(self) -> str:
        """Return the end of a timeout's message: how long the trial would have needed, estimated from its steps.

        It is empty where the trial ended as many steps as any trial must: then a longer timeout was no help.
        """
        effort = self.job.effort
        # A measurement takes two steps at least, one where ``max_steps`` is one.
        fewest_steps = effort.warmup_steps + min(2, effort.max_steps) + effort.busy_steps
        # Keyed by step, since each of several ranks reports every step.
        ended_at = list({progress.step: at for at, progress in self.progress if progress.step is not None}.values())
        if not ended_at:
            return ", before its first step ended; --trial-timeout gives it longer"
        if len(ended_at) >= fewest_steps:
            return ""
        # The last phase that a trial reports is its training.
        training_at = max([self.started_at, *(at for at, progress in self.progress if progress.phase is not None)])
        step_seconds = (ended_at[-1] - training_at) / len(ended_at)
        seconds = ended_at[-1] - self.started_at + (fewest_steps - len(ended_at)) * step_seconds
        steps = f"{len(ended_at)} of at least {fewest_steps} steps"
        return f" with {steps} done: it would have needed about {seconds:.3g} s (--trial-timeout)"


def run_to_end(executor: Executor, job: TrialJob, progress: Callable[[Progress], None] = lambda _: None) -> Outcome:
    """Run one trial on an idle executor and return its outcome; ``progress`` gets each earlier report."""
    try:
        executor.submit(job)
        while True:
            _, report = executor.wait()
            if not isinstance(report, Progress):
                return report
            progress(report)
    except BaseException:
        # A caller that is interrupted must not leave the trial running.
        executor.close()
        raise


def run_trial(server: TrialServer, job: TrialJob, progress: Callable[[Progress], None] = lambda _: None) -> Outcome:
    """Run one trial on a server, wait for its end, and return its outcome."""
    return run_to_end(LocalExecutor([server]), job, progress)
