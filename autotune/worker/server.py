"""Serve trials: import torch and transformers once, fork a child for each job, and report how it ended.

Both sides write lines of JSON (``autotune.core.messages``). The controller writes to standard input: first the
workload and, once the server is ``ready``, any number of jobs::

    {"workload": {…} | null, "is_plain": true | false}
    {"job": {"id": …, "kind": "trial", "work": {…}, "workload": {…}, "log_path": …, "timeout_seconds": …}}

The server writes to the file descriptor named on the command line. It sends ``ready`` or ``import_error`` once. For
each job it sends ``started`` (with ``pids``, and ``folder``, which the server removes at the end), any number of
``progress``, and exactly one ``ended`` with the ``answer``: the result, if there is one, and how the process ended.
Where no process could be started, ``ended`` with the reason is all. When standard input closes or the controller dies,
the server kills every descendant and exits.

A ready server that runs nothing can be told another workload, with ``log_path``: where its own output goes from then
on. It imports that model's class, so that no trial has to, and answers ``adopted``. A server without a workload has
imported for any; one that is also told that it ``is_plain``, for those without a dataset and adapters.

A job with ``ranks`` above one, a trial or an inspection of the user's own code, is that many processes in one process
group. The first rank that fails ends the job: the others are killed at once, and the job's result is that rank's, which
the answer names as ``rank``. Otherwise the job has the result of rank 0 once every rank has one.

The server itself only imports. A tensor operation or a ``torch.cuda`` call before a fork would leave children with
dead thread pools or an unusable CUDA.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import time
import traceback
from dataclasses import replace
from typing import Any, NoReturn

from autotune.core.errors import AutotuneError
from autotune.core.look import LookWork
from autotune.core.messages import (
    Adopted,
    Answer,
    DataWork,
    Ended,
    ImportFailed,
    InspectionWork,
    Job,
    JobLine,
    Problem,
    Progress,
    ProgressLine,
    Ready,
    ServerLine,
    Started,
    TrialWork,
)
from autotune.core.outcome import outcome_document
from autotune.core.pipes import LineReader, LineWriter, wait_until_ready
from autotune.core.placement import rank_log
from autotune.core.prediction import PredictionWork
from autotune.core.rehearsal import Rehearsal, RehearsalWork
from autotune.core.schema import decode, encode
from autotune.core.scratch import Scratch, make_scratch
from autotune.worker import process
from autotune.worker.failures import chain_of, first_line, package_of
from autotune.worker.imports import COLD_VARIABLE, CudaStartedError, import_compiler, import_everything, import_model
from autotune.worker.rendezvous import Ranks, open_store, rank_variables
from autotune.worker.user.protection import Room, protect, take_kept

# Most bytes of one line from a job. Results are far shorter, but the user's own code may write anything.
_LINE_LIMIT_BYTES = 16 * 1024**2
_FOLDER_PREFIX = "autotune-trial-"


class _Rank:
    """A process of a job: one of several ranks, or all of it."""

    def __init__(self, number: int, pid: int, result_fd: int, log_path: str) -> None:
        self.number = number
        self.pid = pid
        self.lines = LineReader(result_fd, _LINE_LIMIT_BYTES)
        self.log_path = log_path
        self.answer: JobLine | None = None
        """The first line with a result or a problem that the process wrote; ``None`` before."""
        self.malformed: str | None = None
        """The beginning of a line that is no ``JobLine``."""
        self.status: int | None = None
        """Its wait status, once it has ended."""

    def reap(self) -> bool:
        """Record the wait status if the process has ended; return whether it has ended since the last call."""
        if self.status is not None:
            return False
        try:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:
            pid, status = self.pid, 0
        if pid == self.pid:
            self.status = status
        return self.status is not None

    @property
    def result(self) -> Any:
        """The result of the process; ``None`` before the process wrote one."""
        return None if self.answer is None else self.answer.result

    @property
    def state(self) -> Any:
        """The state in an outcome, as ``out_of_memory``; of another result ``completed``. ``None`` without a result."""
        if not isinstance(self.result, dict):
            return None
        # In a rehearsal, the other ranks may wait for a failed one.
        return "failed" if self.result.get("failed_rank") is not None else self.result.get("state", "completed")

    @property
    def has_failed(self) -> bool:
        """Whether the process ended without a result, or with another state than ``completed``."""
        return self.status is not None if self.answer is None else self.state != "completed"


def _order_of_blame(failed: _Rank) -> tuple[bool, float, int]:
    """Return a key that is smallest for the rank whose failure caused the others', see ``_RunningJob.blame``."""
    # A rank that ended without an answer has no time, and comes before those with one.
    failed_at = failed.answer.at if failed.answer is not None else None
    return failed.state != "out_of_memory", failed_at or 0.0, failed.number


class _RunningJob:
    """A job whose processes are running."""

    def __init__(self, job: Job, ranks: list[_Rank], scratch: Scratch, store: Any) -> None:
        self.id = job.id
        self.work = job.work
        self.ranks = ranks
        self.deadline = time.monotonic() + job.timeout_seconds
        self.timed_out = False
        self.scratch = scratch
        is_inspection = isinstance(job.work, InspectionWork)
        self.layer = job.protection.layer if job.protection is not None and is_inspection else None
        """The folder that gets what the inspection of the user's own code writes, instead of the user's folders."""
        self.room = None if job.protection is None else Room(scratch.path)
        self.store = store
        """Kept open for as long as ranks need it to find each other."""
        self.culprit: _Rank | None = None
        """The rank that failed first, where there are several."""

    def blame(self) -> bool:
        """Record the first of several ranks that failed, once; return whether this call recorded one.

        A rank that ran out of memory, or ended without an answer, causes the others' errors about closed connections.
        Otherwise the earliest answer is the cause.
        """
        if self.culprit is not None or len(self.ranks) == 1:
            return False
        failed = [rank for rank in self.ranks if rank.has_failed]
        self.culprit = min(failed, key=_order_of_blame, default=None)
        return self.culprit is not None

    def kill(self) -> None:
        """Kill every process of the job with its process group."""
        process.kill_group(self.ranks[0].pid)
        for rank in self.ranks:
            if rank.status is None:
                process.kill_group(rank.pid)

    @property
    def has_ended(self) -> bool:
        """Whether every process has ended."""
        return all(rank.status is not None for rank in self.ranks)


class Server:
    """Waits for the controller, its children's messages and their ends all at once, and never for one of them alone."""

    def __init__(self, report_fd: int, control: LineReader, torch_threads: int) -> None:
        self._reports = LineWriter(report_fd)
        self._torch_threads = torch_threads
        self._control = control
        self._jobs: list[_RunningJob] = []
        self._layers: set[str] = set()
        """Folders with what inspections have written. The server removes them too, in case the controller is killed."""
        self._parent = os.getppid()
        self._told_to_leave = False
        # Every signal writes a byte to this pipe, which ends the waiting.
        self._wake_read, wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(wake_write, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._leave)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)

    def _leave(self, *_: object) -> None:
        self._told_to_leave = True

    def report(self, line: ServerLine) -> None:
        """Send a line to the controller, now or as soon as it reads again."""
        self._reports.put(json.dumps(encode(line)).encode())

    def serve(self) -> None:
        """Run jobs until the controller is gone."""
        try:
            while os.getppid() == self._parent and not self._control.closed and not self._told_to_leave:
                self._wait_and_act()
        finally:
            for job in self._jobs:
                job.kill()
            process.end_children()
            for scratch in (*(job.scratch for job in self._jobs), *map(Scratch, self._layers)):
                scratch.remove()

    def _wait_and_act(self) -> None:
        """Wait for messages, ends of processes and deadlines, for a second at most, and handle them."""
        reading = [self._control.fd, self._wake_read]
        # While the controller does not read, jobs have to wait.
        if not self._reports.is_full:
            reading += [rank.lines.fd for job in self._jobs for rank in job.ranks if not rank.lines.closed]
        writing = [self._reports.fd] if self._reports.has_waiting else []
        deadlines = [job.deadline for job in self._jobs if not job.timed_out]
        patience_seconds = max(0.0, min([1.0, *(deadline - time.monotonic() for deadline in deadlines)]))
        ready = wait_until_ready(reading, writing, patience_seconds)
        self._reports.flush()
        if self._wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
        for job in list(self._jobs):
            self._attend(job)
        if self._control.fd in ready:
            for line in self._control.read():
                self._obey(json.loads(line))

    def _obey(self, message: dict[str, Any]) -> None:
        """Do what a message of the controller asks for: start a job, or serve another search from now on."""
        if "job" in message:
            document = message["job"]
            try:
                asked = Job.from_document(document)
            except ValueError as error:
                # This version of the worker cannot read it.
                job_id = document.get("id") if isinstance(document, dict) else None
                self.report(Ended(str(job_id), Answer(refused=str(error))))
            else:
                self._start(asked)
        elif "log_path" in message:
            process.append_output(message["log_path"])
            import_model(message["workload"])
            self.report(Adopted(os.getpid()))

    def _start(self, job: Job) -> None:
        """Start the processes of a job, and report the start, or why it was refused."""
        # Made and removed by the server, since a job may be killed at any point.
        try:
            scratch = make_scratch(_FOLDER_PREFIX)
        except AutotuneError as error:
            self.report(Ended(job.id, Answer(refused=f"{error.message}; {error.hint}")))
            return
        if isinstance(job.work, TrialWork) and job.work.candidate.arm.torch_compile:
            import_compiler()
        process.flush_output()
        ranks: list[_Rank] = []
        store = None
        try:
            store = open_store() if job.ranks > 1 else None
            for number in range(job.ranks):
                ranks.append(self._fork(job, number, scratch, store, ranks))
        except (OSError, RuntimeError) as error:
            for rank in ranks:
                process.kill_group(rank.pid)
            process.end_children(spared=self._pids())
            for rank in ranks:
                os.close(rank.lines.fd)
            scratch.remove()
            why = getattr(error, "strerror", None) or error
            self.report(Ended(job.id, Answer(refused=f"no process can be started: {why}")))
            return
        self._jobs.append(_RunningJob(job, ranks, scratch, store))
        if job.protection is not None and job.protection.layer is not None:
            self._layers.add(os.path.dirname(job.protection.layer))
        self.report(Started(job.id, tuple(rank.pid for rank in ranks), scratch.path))

    def _fork(self, job: Job, number: int, scratch: Scratch, store: Any, others: list[_Rank]) -> _Rank:
        """Fork the process of rank ``number`` of a job, after the ``others``; the child runs the rank and exits here.

        Raises ``OSError`` where no process can be started.
        """
        server = os.getpid()
        read_fd, write_fd = os.pipe()
        try:
            pid = os.fork()
        except OSError:
            os.close(read_fd)
            os.close(write_fd)
            raise
        if pid == 0:
            os.close(read_fd)
            if store is not None:
                os.environ.update(rank_variables(number, job.ranks, store.port))
            self._become_child(job, number, scratch, server, write_fd, others)
        os.close(write_fd)
        if store is not None:
            # The child does the same. Also here, so that no rank is outside the group when all are killed.
            with contextlib.suppress(OSError):
                os.setpgid(pid, others[0].pid if others else pid)
        return _Rank(number, pid, read_fd, rank_log(job.log_path, number))

    def _become_child(
        self, job: Job, number: int, scratch: Scratch, server: int, result_fd: int, others: list[_Rank]
    ) -> NoReturn:
        """Run one rank of a job in the forked child, with its own log, and exit without clean-up.

        A job of one process gets a session of its own; several ranks get the process group of the first.
        """
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for caught in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
                signal.signal(caught, signal.SIG_DFL)
            if job.ranks > 1:
                os.setpgid(0, others[0].pid if others else 0)
            else:
                os.setsid()
            process.die_with(server)
            process.redirect_output(rank_log(job.log_path, number))
            for fd in (self._reports.fd, self._wake_read, *(rank.lines.fd for rank in others)):
                os.close(fd)
            scratch.enter()
            _run_job(job, number, scratch, result_fd, self._torch_threads)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            process.leave(code)

    def _pids(self) -> list[int]:
        """Return the process ids of all running jobs' ranks."""
        return [rank.pid for job in self._jobs for rank in job.ranks]

    def _attend(self, job: _RunningJob) -> None:
        """Forward a job's messages, and handle its deadline, failures and end."""
        for rank in job.ranks:
            # A job that writes faster than the controller reads has to wait, until its timeout if necessary.
            if not self._reports.is_full:
                self._read_lines(job, rank)
            process.bound_log(rank.log_path)
        if not job.timed_out and time.monotonic() >= job.deadline:
            job.timed_out = True
            job.kill()
        # The user's code may not fill the disk.
        if job.room is not None and (why := job.room.why_exceeded()) is not None:
            with contextlib.suppress(OSError), open(job.scratch.stop_file, "w", encoding="utf-8") as file:
                json.dump(encode(Problem(why, "set TMPDIR to a folder of a larger disk")), file)
            job.kill()
        for rank in job.ranks:
            if rank.reap():  # It may have written its result right before its end.
                self._read_lines(job, rank)
        if not job.timed_out and job.blame():
            job.kill()
        if job.has_ended:
            self._end(job)

    def _end(self, job: _RunningJob) -> None:
        """Clean up after a job whose processes have ended, and report its end."""
        process.kill_group(job.ranks[0].pid)
        for rank in job.ranks:
            process.bound_log(rank.log_path)
        self._jobs.remove(job)
        # Processes that the job left behind are orphans, which this process has adopted. Other jobs go on.
        process.end_children(spared=self._pids())
        for rank in job.ranks:
            os.close(rank.lines.fd)
        # The result of the rank that failed, or else of rank 0, whose measurement is of all ranks.
        rank = job.culprit or job.ranks[0]
        is_whole = rank is job.culprit or len(job.ranks) == 1 or all(rank.state == "completed" for rank in job.ranks)
        result = problem = malformed = None
        if rank.answer is not None and is_whole:
            said = rank.answer if job.culprit is None else _naming_rank(rank.number, rank.answer)
            result, problem = said.result, said.problem
            if job.layer is not None:
                take_kept(job.scratch, job.layer)
        elif (problem := _why_stopped(job)) is None:
            malformed = rank.malformed
        job.scratch.remove()
        code = os.waitstatus_to_exitcode(rank.status or 0)
        exit_code, number = (code, None) if code >= 0 else (None, -code)
        culprit = None if job.culprit is None else job.culprit.number
        answer = Answer(
            result, problem, malformed, exit_code=exit_code, signal=number, timed_out=job.timed_out, rank=culprit
        )
        self.report(Ended(job.id, answer))

    def _read_lines(self, job: _RunningJob, rank: _Rank) -> None:
        """Forward the progress that the first rank reports, and keep a rank's result until all ranks have ended."""
        for line in rank.lines.read():
            # The user's own code may write anything into the pipe.
            try:
                said = decode(json.loads(line), JobLine)
            except ValueError:
                said = JobLine()
            if said.result is not None or said.problem is not None:
                rank.answer = rank.answer or said
            elif said.progress is None:
                rank.malformed = line[:200].decode(errors="replace")
            elif rank.number == 0:
                self.report(ProgressLine(said.progress, job.id))


def _why_stopped(job: _RunningJob) -> Problem | None:
    """Return the problem for which the server stopped a job, from the job's stop file; ``None`` without that file."""
    with contextlib.suppress(OSError, ValueError), open(job.scratch.stop_file, encoding="utf-8") as file:
        return decode(json.load(file), Problem)
    return None


def _naming_rank(number: int, said: JobLine) -> JobLine:
    """Return the answer of a failed rank with its number in the message."""
    if said.problem is not None:
        return replace(said, problem=replace(said.problem, message=f"rank {number}: {said.problem.message}"))
    message = said.result.get("message") if isinstance(said.result, dict) else None
    named = {**said.result, "message": f"rank {number}: {message}"} if isinstance(message, str) else said.result
    return replace(said, result=named)


def _run_job(job: Job, rank: int, scratch: Scratch, result_fd: int, torch_threads: int) -> None:
    """Run the work of a job in the forked child, as one rank of it, and write progress and result to ``result_fd``."""
    import torch

    def send(said: Any) -> None:
        """Write progress, a problem or a result to the server, as a line of JSON."""
        # By this time the server finds the rank that failed first.
        at = time.monotonic() if job.ranks > 1 else None
        field = {Progress: "progress", Problem: "problem"}.get(type(said), "result")
        data = json.dumps(encode(JobLine(**{field: said}, at=at))).encode() + b"\n"
        while data:
            data = data[os.write(result_fd, data) :]

    ranks = Ranks.join(rank, job.ranks, job.timeout_seconds)
    if job.protection is not None and job.workload.source is not None:
        # Trials and ranks see each other's files; other runs of an inspection begin with the user's.
        shares = isinstance(job.work, TrialWork | LookWork | RehearsalWork) or job.ranks > 1
        protect(job.protection, scratch, job.workload.source.cwd, ranks, shares=shares)
        # Set again: the kernel clears this setting where a process gets other rights.
        process.die_with(os.getppid())
    torch.set_num_threads(torch_threads)
    if job.ranks == 1 and (visible := os.environ.get("CUDA_VISIBLE_DEVICES")):
        # A Trainer copies its model to every GPU that it sees.
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[0]
    match job.work:
        case PredictionWork() as work:
            # Patches torch permanently, so it is imported only in this process.
            from autotune.worker.fake.step import predict

            send(predict(work, job.workload))
        case DataWork(folder):
            from autotune.worker.dataset.reading import read_data

            send(read_data(job.workload, folder))
        case work if job.workload.source is not None:
            from autotune.worker.user.run import run_own

            run_own(job.workload, work, scratch, send, ranks)
        case LookWork() as work:
            from autotune.worker.trial.look import look

            send(look(job.workload, work, scratch.output_dir))
        case RehearsalWork() as work:
            from autotune.worker.user.rehearsal import NamedRehearsal

            def end(found: Rehearsal | Problem) -> NoReturn:
                send(found)
                process.leave(0)

            NamedRehearsal(job.workload, work, scratch, end, ranks).run_and_end()
        case InspectionWork() as work:
            from autotune.worker.facts import inspect

            send(inspect(job.workload, work))
        case TrialWork() as work:
            from autotune.worker.trial.run import Trial

            trial = Trial(job.workload, work, scratch, send, ranks)
            send(outcome_document(trial.run()))


def main() -> None:
    """Run ``python -m autotune.worker.server REPORT_FD``."""
    report_fd = int(sys.argv[1])
    os.set_inheritable(report_fd, False)
    process.adopt_orphans()
    control = LineReader(0)
    # The first line is not needed where trials import by themselves. It may have been read before this process started
    # itself again.
    message: dict[str, Any] = {}
    while not message and COLD_VARIABLE not in os.environ:
        wait_until_ready([control.fd])
        message = next(map(json.loads, control.read()), {})
        if control.closed and not message:
            raise SystemExit(0)
    # Nearly all that is imported lives to the end: collections took a quarter of the time of the imports.
    gc.disable()
    try:
        threads = import_everything(message.get("workload"), is_plain=bool(message.get("is_plain")))
    except CudaStartedError:
        print("an installed package starts CUDA when it is imported, so every trial imports by itself", flush=True)
        os.set_inheritable(report_fd, True)
        os.execve(sys.executable, sys.orig_argv, {**os.environ, COLD_VARIABLE: "1"})
    except BaseException as error:
        traceback.print_exc()
        first = chain_of(error)[-1]
        failed = ImportFailed(first_line(first), package_of(first))
        os.write(report_fd, json.dumps(encode(failed)).encode() + b"\n")
        raise SystemExit(1) from error
    # Else a trial's garbage collections go through everything that was imported. That takes half a second a trial, and
    # copies 100 MB of memory, since collecting writes to every page. The garbage of the imports stays as well: 8 MiB,
    # and to collect it takes 0.2 to 0.4 s.
    gc.freeze()
    gc.enable()
    server = Server(report_fd, control, threads)
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        server.report(Ready(os.getpid()))
        server.serve()
    # All children have ended. Skip Python's clean-up, since tearing torch down module by module takes a second.
    process.leave(0)


if __name__ == "__main__":
    main()
