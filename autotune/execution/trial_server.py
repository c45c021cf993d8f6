"""Send jobs to the trial server and receive their results: inspection, data, predictions, trials."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Self, TypeVar

from autotune.core.code_interface import Protection, ProtectionKind
from autotune.core.dataset_spec import DataFacts, facts_in, publish_data
from autotune.core.device import Device
from autotune.core.errors import InvalidRequestError, TrainingSourceError, TrialServerError
from autotune.core.inspection import Inspection
from autotune.core.look import LookAnswer, LookWork
from autotune.core.messages import Answer, DataWork, InspectionWork, Job, Work
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

_INSPECT_SECONDS = 180.0
# A core tokenizes a few thousand samples a second; an hour is for tens of millions of them.
_READ_DATA_SECONDS = 3600.0

T = TypeVar("T", DataFacts, Inspection, LookAnswer, Rehearsal)


class TrialServer(ServerProcess):
    """A context manager that owns a trial server: a process with torch imported, which forks one for each job.

    The server starts on entering, in the background, so that its imports overlap with whatever the caller does next;
    the first job waits for it. It is started again if it dies. Where ``on_start`` is given, the server starts with
    the first job, and ``on_start`` is called then. A device stands for the placement of one rank on it. An idle server
    of ``warm`` is used where there is a fitting one, and goes back there on leaving. A ``protection`` keeps the user's
    own code from writing to their files; by default it is the best that this machine offers.
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
        self.data_folder: Path | None = None
        """The folder of the prepared dataset; ``None`` without one."""
        self._look_count = 0
        self._protection = protection
        self._layer: Scratch | None = None
        """The folder of the files that the inspection of the user's own code wrote; its trials find them in place."""
        inspection_of = GpuInspection if warm is None else warm.inspection
        self._gpu = inspection_of(placement, convolves=not workload.is_text)

    def __enter__(self) -> Self:
        self._log_folder.mkdir(parents=True, exist_ok=True)
        if self._on_start is None:
            try:
                self.start_process()
            except BaseException:
                # Such as a Ctrl-C. Without a return from here, ``__exit__`` is not called.
                self.close()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self._gpu.close()
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

    def begin(self, job: Job) -> None:
        """Send a job to the server, after its imports, with the protection of the user's files from their own code."""
        super().begin(job if self.workload.source is None else replace(job, protection=self._protected()))

    def _protected(self) -> Protection:
        """Return the protection of the user's files from their own code: the requested one, else the best there is."""
        if self._protection is None:
            self._protection = self._find_protection()
        if self._layer is None:
            self._layer = make_scratch("autotune-layer-")
        return Protection(self._protection, self._layer.output_dir)

    def _find_protection(self) -> ProtectionKind:
        """Return the best protection that works here; raise ``TrainingSourceError`` where none does."""
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

    # Jobs beside the trials

    def submit(self, job_id: str, work: PredictionWork, timeout_seconds: float) -> None:
        """Start a prediction job, after the server's imports, without waiting; ``ended`` returns its answer."""
        log_path = str(self._log_folder / f"predict-{job_id}.log")
        self.begin(Job(job_id, self.workload, work, timeout_seconds, log_path))

    def ended(self, wait_seconds: float = 0.0) -> dict[str, Answer]:
        """Return the answers of prediction jobs that ended since the last call, by id of the job.

        Waits at most ``wait_seconds`` for the first answer. A job without a result has the last line of its log.
        """
        deadline = time.monotonic() + wait_seconds
        predictions = [sent for sent in self._jobs.values() if sent.is_prediction]
        while predictions and all(sent.answer is None for sent in predictions):
            if not self.listen(max(0.0, deadline - time.monotonic())) or time.monotonic() >= deadline:
                break
        ended = {}
        for sent in predictions:
            if sent.answer is not None:
                del self._jobs[sent.job.id]
                last_words = tail(sent.job.log_path, 1) if sent.answer.result is None else ""
                ended[sent.job.id] = replace(sent.answer, last_words=last_words)
        return ended

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
        """Use ``workload``, which holds what its inspection found, for trials; end an inspection of the GPU."""
        # Where that is remembered, the process that inspects the GPU may still run. It would disturb the first trial.
        self._gpu.close()
        self.workload = workload

    def _read_anew(self, folder: Path) -> DataFacts:
        """Read the dataset into a new folder in a job; return its facts. Raises the errors of ``read_data``."""
        assert self.workload.data is not None
        # The folder is named after the content of the data when the search first looked at it.
        check_unchanged(self.workload.data, of_processor=self.workload.task == "image-text-to-text")
        facts, answer = self._ask("read_data", DataWork(str(folder)), DataFacts, _READ_DATA_SECONDS)
        if answer.problem is not None:
            raise InvalidRequestError(answer.problem.message, answer.problem.hint)
        if isinstance(facts, str):
            raise TrialServerError(f"the data could not be read: {facts}", self._where("read_data"))
        return facts

    def _ask(self, name: str, work: Work, kind: type[T], timeout_seconds: float) -> tuple[T | str, Answer]:
        """Run a job to its end; return its result as ``kind``, or in words why there is none, and the raw answer."""
        log_path = str(self._log_folder / f"{name}.log")
        answer = self.run_to_end(Job(name, self.workload, work, timeout_seconds, log_path))
        try:
            return how_it_ended(answer, log_path) if answer.result is None else decode(answer.result, kind), answer
        except ValueError as error:
            return str(error), answer

    def _where(self, name: str) -> str:
        """Return the part of an error message that says in which logs to read about a failed job."""
        return f"see {self._log_folder / name}.log and {self.server_log}"

    def inspect(self, timeout_seconds: float = _INSPECT_SECONDS, arms: ArmsToTrace | None = None) -> Inspection:
        """Return the inspection (library versions, the GPU, the model) by ``autotune.worker.facts.inspect``.

        The memory of the user's own code is traced for the settings of ``arms`` where the chip is known, see
        ``autotune.worker.user.trainer_memory``. Raises ``TrialServerError`` when no answer comes,
        ``TrainingSourceError`` where the user's own code is the reason.
        """
        if self.workload.source is not None:
            self._protected()
        self.start(inspects=True)
        # Wait first: the user's own code may use the GPU, and its memory would count as part of the context.
        of_gpu = self._gpu.finish() if self.workload.source is not None else None
        if arms is not None:
            # The rest of the timeout is for the end of the job.
            within_seconds = 0.8 * timeout_seconds
            arms = replace(arms, chip=of_gpu.chip, within_seconds=within_seconds) if of_gpu is not None else None
        work = InspectionWork(self.placement.rank_devices, arms)
        found, answer = self._ask("inspect", work, Inspection, timeout_seconds)
        is_answered = answer.result is not None or answer.problem is not None or answer.timed_out or answer.overdue
        if not is_answered and (answer.signal or answer.lost):
            # The process may have been killed from outside. A second kill is no coincidence.
            found, answer = self._ask("inspect", work, Inspection, timeout_seconds)
        if self.workload.source is not None:
            check_own_code(self.workload.source.name, answer, self._log_folder / "inspect.log", timeout_seconds)
        if isinstance(found, str):
            device = f"the device {self.placement.label}"
            raise TrialServerError(f"{device} could not be inspected: {found}", self._where("inspect"))
        if found.model is not None and self._protection is not None:
            interface = replace(found.model.interface, protection=self._protection)
            found = replace(found, model=replace(found.model, interface=interface))
        return with_gpu_facts(found, self._gpu.finish() if of_gpu is None else of_gpu)

    def look(self, work: LookWork, timeout_seconds: float = _INSPECT_SECONDS) -> LookAnswer | str:
        """Train one step with each candidate of the work; return these steps, or in words why there are none."""
        self._look_count += 1
        return self._ask(f"look-{self._look_count}", work, LookAnswer, timeout_seconds)[0]

    def rehearse(self, work: RehearsalWork, timeout_seconds: float = _INSPECT_SECONDS) -> Rehearsal:
        """Run once what a long run does beyond its first steps; return what it needs, or a ``problem`` in its place."""
        answer, _ = self._ask("rehearsal", work, Rehearsal, timeout_seconds)
        return Rehearsal(problem=answer) if isinstance(answer, str) else answer
