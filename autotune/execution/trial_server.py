"""Send jobs to the trial server and receive their results: inspection, data, predictions, trials."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self, TypeVar

from autotune.core.code_interface import Protection, ProtectionKind
from autotune.core.dataset_spec import DataFacts, facts_in, publish_data
from autotune.core.device import Device
from autotune.core.errors import InvalidRequestError, TrainingSourceError, TrialServerError
from autotune.core.inspection import Inspection, InspectionAnswer
from autotune.core.look import LookAnswer, LookWork
from autotune.core.messages import (
    Answer,
    DataAnswer,
    DataWork,
    Ended,
    InspectionWork,
    Job,
    MalformedLine,
    Progress,
    ProgressLine,
    ResultLine,
    ServerLine,
    Work,
)
from autotune.core.placement import Placement
from autotune.core.prediction import ArmsToTrace, PredictionWork
from autotune.core.rehearsal import Rehearsal, RehearsalWork
from autotune.core.schema import decode
from autotune.core.scratch import Scratch, make_scratch
from autotune.core.workload import Workload
from autotune.execution.child_process import check_own_code, how_it_ended, tail
from autotune.execution.oneshot import GpuInspection, find_protection, with_gpu_facts
from autotune.execution.server_process import ServerProcess, WarmServer
from autotune.models.dataset_files import check_unchanged

# The server ends a job at its time limit; the controller stops waiting for the server a little later.
_GRACE_SECONDS = 20.0
_INSPECT_SECONDS = 180.0
# A core tokenizes a few thousand samples a second; an hour is for tens of millions of them.
_READ_DATA_SECONDS = 3600.0

T = TypeVar("T", DataAnswer, LookAnswer, Rehearsal)


@dataclass
class _UnderWay:
    """A running job, or an ended one whose result was not fetched yet."""

    deadline: float
    is_beside: bool
    """Whether it was submitted to run beside the trials; ``TrialServer.ended`` tells of its end."""
    answer: Answer = field(default_factory=Answer)
    """What is known of it so far."""
    progress: deque[Progress] = field(default_factory=deque)
    has_ended: bool = False


class TrialServer(ServerProcess):
    """A context manager that owns a server, and with it every process that runs a job.

    The server starts on entering, in the background, so that its imports overlap with whatever the caller does next;
    the first job waits for it. It is started again if it dies. Where ``on_start`` is given, the server starts with
    the first job, and ``on_start`` is called then. A device stands for the placement of one rank on it. An idle server
    of ``warm`` is used where there is a fitting one, and goes back there on leaving. The user's own code runs under a
    ``protection``, by default the best that this machine offers.
    """

    def __init__(
        self,
        placement: Placement | Device,
        workload: Workload,
        log_folder: Path,
        on_start: Callable[[], None] | None = None,
        warm: WarmServer | None = None,
        protection: ProtectionKind | None = None,
    ) -> None:
        placement = Placement.of(placement) if isinstance(placement, Device) else placement
        super().__init__(placement, workload, log_folder, on_start, warm)
        self._log_folder = log_folder
        self._jobs: dict[str, _UnderWay] = {}
        self.data_folder: Path | None = None
        """The folder of the prepared dataset; ``None`` without one."""
        self._looks = 0
        self._protection = protection
        self._layer: Scratch | None = None
        """The folder of the files that the inspection of the user's own code wrote; its trials find them in place."""
        inspection_of = GpuInspection if warm is None else warm.inspection
        self._gpu = inspection_of(placement, convolves=not workload.is_text)

    def __enter__(self) -> Self:
        self._log_folder.mkdir(parents=True, exist_ok=True)
        if self._on_start is None:
            self.start_process()
        return self

    def __exit__(self, *_: object) -> None:
        self._gpu.close()
        if any(not job.has_ended for job in self._jobs.values()):
            self.close()
        self.release()
        if self._layer is not None:
            self._layer.remove()
            self._layer = None

    def start(self, *, inspects: bool = False) -> None:
        """Start the server if needed. Its imports overlap with the caller's next work.

        With ``inspects``, the GPU is inspected at the same time.
        """
        if self._server is None:
            self.start_process()
        if inspects:
            self._gpu.begin(self._log_folder)

    def close(self) -> None:
        """End the server and all its jobs; leave no process behind. The next job starts a new server."""
        self.end_process()
        self._lose_jobs(overdue=False)

    # Jobs of any kind

    def begin(self, job: Job) -> None:
        """Send a job to the server, after its imports, without waiting for the job."""
        self._send_job(job, is_beside=False)

    def _send_job(self, job: Job, *, is_beside: bool) -> None:
        """Send a job once the server is ready. Jobs of a server that has died since are lost."""
        if self.await_ready():
            self._lose_jobs(overdue=False)
        if self.workload.source is not None:
            job = replace(job, protection=self._protected())
        deadline = time.monotonic() + job.timeout_seconds + _GRACE_SECONDS
        self._jobs[job.id] = _UnderWay(deadline, is_beside)
        if not self.send({"job": job.document()}, deadline):
            self.close()

    def _protected(self) -> Protection:
        """Return the protection of the user's files from their own code: that asked for, else the best there is."""
        if self._protection is None:
            self._protection = self._find_protection()
        if self._layer is None:
            self._layer = make_scratch("autotune-layer-")
        return Protection(self._protection, self._layer.output_dir)

    def _find_protection(self) -> ProtectionKind:
        """Return the protection that works here, or raise ``TrainingSourceError``."""
        source, protection = self.workload.source, find_protection()
        assert source is not None
        why = protection.why_not_better if protection.kind == "none" else None
        if protection.kind == "landlock" and os.path.realpath(source.cwd).startswith("/dev/shm/"):
            why = f"Landlock does not protect {source.cwd}, which is shared memory"
        if why is None:
            return protection.kind
        raise TrainingSourceError(
            f"nothing keeps {source.name} from your files here: {why}",
            "search as root or on Linux 5.13 or newer, outside of /dev/shm; with --unprotected it writes, renames and "
            "deletes in every trial as it would by itself",
        )

    def seconds_left(self) -> float | None:
        """Return the seconds until the first deadline of the running jobs; ``None`` without any.

        Prediction jobs are left out: who waits for them sets a limit.
        """
        deadlines = [job.deadline for job in self._jobs.values() if not job.has_ended and not job.is_beside]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def listen(self, wait_seconds: float | None) -> bool:
        """Read messages of the server, waiting for one at most ``wait_seconds``; return whether any came.

        A server that is gone, or silent beyond the time limit of a job, loses all its jobs.
        """
        if self._server is None or all(job.has_ended for job in self._jobs.values()):
            return False
        messages = self.read(time.monotonic() + (wait_seconds or 0.0))
        if messages is None:
            self.close()
        elif messages:
            for line in messages:
                self._take(line)
        elif self.seconds_left() == 0:
            self.end_process()
            self._lose_jobs(overdue=True)
        return bool(messages)

    def progress_of(self, job_id: str) -> Progress | None:
        """Return the next progress report of a job, in order; ``None`` without a new report."""
        progress = self._jobs[job_id].progress
        return progress.popleft() if progress else None

    def end_of(self, job_id: str) -> Answer | None:
        """Return a job's final answer, once; ``None`` before its end, and while it has unread progress reports."""
        job = self._jobs[job_id]
        return self._jobs.pop(job_id).answer if job.has_ended and not job.progress else None

    def _take(self, line: ServerLine) -> None:
        """Add a message to its job; drop the messages of unknown and ended jobs."""
        match line:
            case Ended(job_id):
                job = self._jobs.get(job_id)
            case ProgressLine() | ResultLine() | MalformedLine():
                job = self._jobs.get(line.id or "")
            case _:
                job = None
        if job is None or job.has_ended:
            return
        job.answer = job.answer.after(line)
        if isinstance(line, Ended):
            job.has_ended = True
        elif isinstance(line, ProgressLine) and not job.is_beside:
            job.progress.append(line.progress)

    def _lose_jobs(self, *, overdue: bool) -> None:
        """Mark the running jobs as lost with their server."""
        for job in self._jobs.values():
            if not job.has_ended:
                job.answer = replace(job.answer, lost=True, overdue=overdue)
                job.has_ended = True

    def _run_to_end(self, job: Job) -> Answer:
        """Run a job, wait for its end and return its answer."""
        self.begin(job)
        try:
            while (answer := self.end_of(job.id)) is None:
                self._jobs[job.id].progress.clear()
                self.listen(self.seconds_left())
        except BaseException:
            # Who stops waiting for a job must not leave it running beside the next.
            self.close()
            self._jobs.pop(job.id, None)
            raise
        return answer

    # Jobs beside the trials

    def submit(self, job_id: str, work: PredictionWork, timeout_seconds: float) -> None:
        """Start a prediction job, after the server's imports, without waiting; see ``ended``."""
        log_path = self._prediction_log(job_id)
        self._send_job(Job(job_id, self.workload, work, timeout_seconds, str(log_path)), is_beside=True)

    def ended(self, wait_seconds: float = 0.0) -> dict[str, Answer]:
        """Return the answers of prediction jobs that ended since the last call, by id.

        Waits at most ``wait_seconds`` for the first of them.
        """
        deadline = time.monotonic() + wait_seconds
        while self._prediction_jobs(has_ended=False) and not self._prediction_jobs(has_ended=True):
            if not self.listen(max(0.0, deadline - time.monotonic())) or time.monotonic() >= deadline:
                break
        ended = {}
        for job_id in self._prediction_jobs(has_ended=True):
            answer = self._jobs.pop(job_id).answer
            if answer.result is None:
                answer = replace(answer, last_words=tail(self._prediction_log(job_id), 1))
            ended[job_id] = answer
        return ended

    def _prediction_log(self, job_id: str) -> Path:
        return self._log_folder / f"predict-{job_id}.log"

    def _prediction_jobs(self, *, has_ended: bool) -> list[str]:
        return [job_id for job_id, job in self._jobs.items() if job.is_beside and job.has_ended is has_ended]

    # Questions before the first trial

    def read_data(self, folder: Path, check: Callable[[Workload], None] = lambda workload: None) -> Workload:
        """Read the workload's dataset into ``folder``, unless it is there; return the workload with its facts.

        ``check`` may raise an error for that workload, after which nothing is left in ``folder``. Raises
        ``InvalidRequestError`` for invalid data, ``TrialServerError`` when no answer comes.
        """
        facts = facts_in(folder)
        if facts is not None:
            check(self.workload.with_facts(facts))
        else:
            partial = folder.with_name(f"{folder.name}.partial-{uuid.uuid4().hex}")
            try:
                facts = self._read_anew(partial)
                check(self.workload.with_facts(facts))
                publish_data(partial, folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
                # After an error, leave no folder that was not there before.
                with contextlib.suppress(OSError):
                    folder.parent.rmdir()
        self.data_folder = folder
        self.workload = self.workload.with_facts(facts)
        return self.workload

    def run_as_inspected(self, workload: Workload) -> None:
        """Use this workload, with the result of its inspection, for trials; end an inspection of the GPU."""
        # With a remembered result, the process that inspects the GPU may still run. It would disturb the first trial.
        self._gpu.close()
        self.workload = workload

    def _read_anew(self, folder: Path) -> DataFacts:
        """Read the dataset into a new folder in a job; return its facts. Raises the errors of ``read_data``."""
        assert self.workload.data is not None
        # The folder is named after the content of the data when the search first looked at it.
        check_unchanged(self.workload.data, of_processor=self.workload.task == "image-text-to-text")
        answer = self._ask("read_data", DataWork(str(folder)), DataAnswer, _READ_DATA_SECONDS)
        if isinstance(answer, str):
            where = f"see {self._log_folder / 'read_data.log'} and {self.server_log}"
            raise TrialServerError(f"the data could not be read: {answer}", where)
        if answer.problem is not None:
            raise InvalidRequestError(answer.problem.message, answer.problem.hint)
        assert answer.facts is not None
        return answer.facts

    def _ask(self, name: str, work: Work, kind: type[T], timeout_seconds: float) -> T | str:
        """Run a job and return its decoded answer, or the reason in words why there is none."""
        log_path = str(self._log_folder / f"{name}.log")
        answer = self._run_to_end(Job(name, self.workload, work, timeout_seconds, log_path))
        try:
            return how_it_ended(answer, log_path) if answer.result is None else decode(answer.result, kind)
        except ValueError as error:
            return str(error)

    def inspect(self, timeout_seconds: float = _INSPECT_SECONDS, arms: ArmsToTrace | None = None) -> Inspection:
        """Return the inspection of this environment and workload by ``autotune.worker.facts.inspect``.

        The memory of the user's own code is traced for some ``arms`` where the chip is known, see
        ``autotune.worker.user.trainer_memory``.

        Raises ``TrialServerError`` when no answer comes, ``TrainingSourceError`` where the user's own code is the
        reason.
        """
        if self.workload.source is not None:
            self._protected()
        self.start(inspects=True)
        # Wait first: the user's own code may use the GPU, and its memory would count as part of the context.
        of_gpu = self._gpu.finish() if self.workload.source is not None else None
        log_path = self._log_folder / "inspect.log"
        if arms is not None:
            # The rest of the time is for the end of the job.
            within_seconds = 0.8 * timeout_seconds
            arms = replace(arms, chip=of_gpu.chip, within_seconds=within_seconds) if of_gpu is not None else None
        work = InspectionWork(self.placement.rank_devices, arms)
        job = Job("inspect", self.workload, work, timeout_seconds, str(log_path))
        answer = self._run_to_end(job)
        is_answered = answer.result is not None or answer.timed_out or answer.overdue
        if not is_answered and (answer.signal or answer.lost):
            # The process may have been killed from outside. A second kill is no coincidence.
            answer = self._run_to_end(job)
        try:
            answered = InspectionAnswer() if answer.result is None else decode(answer.result, InspectionAnswer)
        except ValueError as error:
            raise self._inspection_error(str(error), log_path) from error
        if self.workload.source is not None:
            check_own_code(self.workload.source.name, answer, answered.problem, log_path, timeout_seconds)
        found = answered.inspection
        if found is None:
            raise self._inspection_error(how_it_ended(answer, str(log_path)), log_path)
        if found.model is not None and self._protection is not None:
            interface = replace(found.model.interface, protection=self._protection)
            found = replace(found, model=replace(found.model, interface=interface))
        return with_gpu_facts(found, self._gpu.finish() if of_gpu is None else of_gpu)

    def look(self, work: LookWork, timeout_seconds: float = _INSPECT_SECONDS) -> LookAnswer:
        """Return the first steps with some settings, or the reason why there are none."""
        self._looks += 1
        answer = self._ask(f"look-{self._looks}", work, LookAnswer, timeout_seconds)
        return LookAnswer(problem=answer) if isinstance(answer, str) else answer

    def rehearse(self, work: RehearsalWork, timeout_seconds: float = _INSPECT_SECONDS) -> Rehearsal:
        """Return what a long run needs beyond its first steps, or the reason why this is unknown."""
        answer = self._ask("rehearsal", work, Rehearsal, timeout_seconds)
        return Rehearsal(problem=answer) if isinstance(answer, str) else answer

    def _inspection_error(self, why: str, log_path: Path) -> TrialServerError:
        return TrialServerError(
            f"the device {self.placement.label} could not be inspected: {why}",
            f"see {log_path} and {self.server_log}",
        )
