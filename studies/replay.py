"""Trials answered from recorded landscapes instead of being run, with the seconds that they took.

A landscape is what ``studies/record.py`` writes: JSON lines, the first about the machine, then one
a trial. ``tests/landscapes`` holds two of an older form, whose first line says less. Beside a
landscape may lie its predictions (``studies/predictions.py``): what a search is told about memory.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import json
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autotune.core.candidate import Arm, Candidate, Document
from autotune.core.ceiling import Ceiling, Headroom
from autotune.core.device import Device
from autotune.core.inspection import Inspection, ModelFacts, Software
from autotune.core.messages import Answer, Progress
from autotune.core.outcome import Completed, Effort, Measurement, Outcome, OutOfMemory
from autotune.core.placement import Placement
from autotune.core.prediction import PredictionWork
from autotune.core.schema import decode, encode
from autotune.core.units import GIB, MIB
from autotune.core.workload import Workload
from autotune.devices.gpus import CHIPS
from autotune.execution import TrialJob
from autotune.execution.executor import run_to_end
from autotune.models.resolve import resolve_model
from autotune.space.space import Space
from autotune.tuning.prepare import Prepared, prepare
from autotune.tuning.request import SearchRequest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (ROOT / "tests" / "landscapes", ROOT / "studies" / "landscapes")

OOM_SECONDS = 1.0
"""Of an out-of-memory that was not recorded but follows from one that was; recorded ones took 0.8 to 1.1 s."""

BUSY_SECONDS = 0.2
"""What measuring the GPU's share of a step costs a trial: 0.06 to 0.19 s in searches of five workloads on an H200 (22
November 2026), and 0.4 to 0.8 s with Qwen2.5-0.5B."""
# Of the GPU's share of a step at the batch with the least time a sample: 0.92 with BERT-large at 32 × 2 in bf16.
_LARGEST_BUSY_SHARE = 0.95

# The older form was recorded for one model, as a 24 GiB card, and does not say so.
_OLDER = {
    "workload": {"model": "bert-large-uncased", "padding": 0.0, "dtype": "float32", "weights": None},
    "model": {
        "class": "BertForSequenceClassification",
        "parameters": 335_143_938,
        "trainable_parameters": 335_143_938,
        "attn_implementations": ["eager", "sdpa"],
        "gradient_checkpointing": True,
    },
    "environment": {"device_name": "NVIDIA H200", "device_memory_bytes": 140 * GIB, "device_capability": [9, 0]},
}

Cell = dict[str, Any]


def landscapes() -> list[Path]:
    """Return the files of all recorded grids at effective batch 64."""
    return sorted((path for folder in FOLDERS for path in folder.glob("*effective64.jsonl")), key=lambda p: p.name)


def micro_steps_run(candidate: Candidate, effort: Effort) -> int:
    """Return the number of micro-steps that a trial runs in each step: at least three, which stand for the others."""
    return min(candidate.gradient_accumulation_steps, max(3, effort.max_micro_steps))


def measurement(
    candidate: Candidate, step_seconds: float, allocated_bytes: int, reserved_bytes: int, run: int | None = None
) -> Measurement:
    """Return a measurement of a candidate with these figures; ``run`` is the number of micro-steps, by default all."""
    return Measurement(
        step_seconds=step_seconds,
        step_seconds_each=(step_seconds,) * 3,
        relative_spread=0.005,
        samples_per_second=candidate.samples_per_step / step_seconds,
        peak_allocated_bytes=allocated_bytes,
        peak_reserved_bytes=reserved_bytes,
        micro_steps_run=candidate.gradient_accumulation_steps if run is None else run,
        # What is recorded bears the inputs of the micro-steps that were run; those of text are next to nothing.
        micro_batch_bytes=0,
    )


def out_of_memory(reserved_bytes: int | None = None) -> OutOfMemory:
    """Return the outcome of a trial that ran out of GPU memory."""
    return OutOfMemory("CUDA out of memory", peak_reserved_bytes=reserved_bytes)


@dataclass(frozen=True)
class Replayed:
    """One trial that was answered."""

    candidate: Candidate
    outcome: Outcome
    ended_at_seconds: float
    """By the simulated clock."""


SIMULATED_GPU = Device("cuda", 0, "GPU-simulated", "simulated", 80 * GIB, 0, 0, 80 * GIB, None, (9, 0))


class SimulatedRunner:
    """An executor that runs nothing: the jobs, the simulated clock, faults on demand. Subclasses have the answers.

    Several trials under way take as long as each would alone. ``run`` runs one by itself.
    """

    def __init__(self, slots: int = 1) -> None:
        gpus = [replace(SIMULATED_GPU, index=index, uuid=f"GPU-simulated-{index}") for index in range(slots)]
        self.slots = tuple(Placement.of(gpu) for gpu in gpus)
        """One simulated GPU for each."""
        self.most_under_way = 0
        """How many trials were under way at the same time at most."""
        self._under_way: list[tuple[float, int, TrialJob, Outcome | BaseException]] = []
        self._events: deque[tuple[str, Progress]] = deque()
        self._order = itertools.count()
        self.jobs: list[TrialJob] = []
        self.replayed: list[Replayed] = []
        self.seconds = 0.0
        self.faults: dict[Candidate, list[Outcome | BaseException]] = {}
        """What to answer instead, one for each time that the candidate is run."""

    def clock(self) -> float:
        """Return the simulated time."""
        return self.seconds

    @property
    def candidates(self) -> list[Candidate]:
        """Return the candidates that were run, in order."""
        return [job.candidate for job in self.jobs]

    def submit(self, job: TrialJob) -> str:
        """See ``autotune.execution.Executor.submit``."""
        placements = [running.placement for _, _, running, _ in self._under_way]
        if len(placements) >= len(self.slots) or (job.placement is not None and job.placement in placements):
            raise RuntimeError("no slot is free")
        self.jobs.append(job)
        self._events.append((job.trial_id, Progress("train")))
        outcome: Outcome | BaseException
        if self.faults.get(job.candidate):
            outcome, seconds = self.faults[job.candidate].pop(0), OOM_SECONDS
        else:
            outcome, seconds = self.answer(job)
        heapq.heappush(self._under_way, (self.seconds + seconds, next(self._order), job, outcome))
        self.most_under_way = max(self.most_under_way, len(self._under_way))
        return job.trial_id

    def wait(self) -> tuple[str, Progress | Outcome]:
        """See ``autotune.execution.Executor.wait``; moves the clock on to the next end."""
        if self._events:
            return self._events.popleft()
        if not self._under_way:
            raise RuntimeError("no trial is under way")
        ends_at, _, job, outcome = heapq.heappop(self._under_way)
        self.seconds = max(self.seconds, ends_at)
        if isinstance(outcome, BaseException):
            raise outcome
        self.replayed.append(Replayed(job.candidate, outcome, self.seconds))
        return job.trial_id, outcome

    def close(self) -> None:
        """See ``autotune.execution.Executor.close``."""
        self._under_way.clear()
        self._events.clear()

    def run(self, job: TrialJob, progress: Callable[[Progress], None]) -> Outcome:
        """Answer one trial."""
        return run_to_end(self, job, progress)

    def answer(self, job: TrialJob) -> tuple[Outcome, float]:
        """Return the outcome of a job and the seconds that it takes."""
        raise NotImplementedError


class RecordedRunner(SimulatedRunner):
    """Answers from a recorded landscape, and from nothing else.

    A cell that was not recorded is an ``AssertionError`` that names it, but for what follows from
    the records: a batch above a recorded out-of-memory of the same arm is out of memory too, and so
    is a recorded one whose allocated bytes exceed the job's cap. ``between=True`` also draws
    straight lines through the two nearest recorded batches of the same arm: measured peaks are
    affine in the batch.

    A trial takes what it took when it was recorded, with the effort of a search's own trial; one that
    a search would cut short (a slow baseline, a candidate far behind) is charged in full. One that
    runs more micro-steps than were recorded is charged for them.
    """

    def __init__(self, path: Path, *, between: bool = False, slots: int = 1) -> None:
        super().__init__(slots)
        self.path = path
        self._between = between
        self._cells: dict[tuple[Arm, bool], dict[int, Cell]] = {}
        first, *lines = path.read_text(encoding="utf-8").splitlines()
        self.meta: Cell = {**_OLDER, **json.loads(first)}
        if "cap_bytes" not in self.meta:
            self.meta["cap_bytes"] = int(float(self.meta["allocator_cap_gib"]) * GIB)
        self.cap_bytes = int(self.meta["cap_bytes"])
        for line in lines:
            cell = json.loads(line)
            candidate = Candidate.from_parameters({"optim": self.meta.get("optim"), **cell})
            of_arm = self._cells.setdefault((candidate.arm, candidate.accumulates), {})
            of_arm[candidate.per_device_train_batch_size] = cell

    @property
    def recorded(self) -> list[tuple[Candidate, Cell]]:
        """Return every recorded cell with its candidate."""
        return [
            (Candidate(arm, batch, cell["gradient_accumulation_steps"]), cell)
            for (arm, _), cells in self._cells.items()
            for batch, cell in cells.items()
        ]

    def answer(self, job: TrialJob) -> tuple[Outcome, float]:
        """See ``SimulatedRunner.answer``."""
        candidate = job.candidate
        assert job.cap_bytes <= self.cap_bytes, f"recorded under {self.cap_bytes} bytes, asked for {job.cap_bytes}"
        cell = self._cell(candidate)
        seconds = float(cell.get("trial_wall_seconds", OOM_SECONDS))
        if cell["state"] == "oom" or cell["peak_allocated_mib"] * MIB > job.cap_bytes:
            return out_of_memory(min(job.cap_bytes, cell.get("peak_reserved_mib", 0) * MIB) or None), seconds
        reserved_bytes = min(job.cap_bytes, int(cell["peak_reserved_mib"] * MIB))
        run = micro_steps_run(candidate, job.effort)
        if run > cell.get("micro_steps_run", run):
            seconds += cell["phase_seconds"]["train"] * (run / cell["micro_steps_run"] - 1)
        allocated_bytes = int(cell["peak_allocated_mib"] * MIB)
        measured = measurement(candidate, cell["step_seconds"], allocated_bytes, reserved_bytes, run)
        # As many steps as a trial with this effort measures.
        measured = replace(measured, step_seconds_each=(measured.step_seconds,) * max(3, job.effort.min_steps))
        if job.effort.busy_steps:
            seconds += BUSY_SECONDS
            measured = replace(measured, gpu_busy_share=self._busy_share(candidate, cell))
        return Completed(measured), seconds

    def _busy_share(self, candidate: Candidate, cell: Cell) -> float:
        """Estimate the share of a step in which the GPU computes: its time a sample is taken for the arm's least."""
        plain = replace(candidate.arm, cpu_affinity=False)
        cells = [c for (arm, _), found in self._cells.items() if arm == plain for c in found.values()]
        least = min(_seconds_a_sample(c) for c in cells if c["state"] == "ok")
        return min(1.0, _LARGEST_BUSY_SHARE * least / _seconds_a_sample(cell))

    def _cell(self, candidate: Candidate) -> Cell:
        """Return the recorded cell of a candidate, or one that follows from others."""
        batch = candidate.per_device_train_batch_size
        # Nothing was recorded pinned to one core: it is answered as if that changed nothing.
        arm = replace(candidate.arm, cpu_affinity=False)
        cells = self._cells.get((arm, candidate.accumulates), {})
        cell = cells.get(batch)
        if cell is not None and cell["gradient_accumulation_steps"] == candidate.gradient_accumulation_steps:
            return cell
        if any(other["state"] == "oom" and at < batch for at, other in cells.items()):
            return {"state": "oom"}
        fitting = {at: other for at, other in cells.items() if other["state"] == "ok"}
        if self._between and not candidate.accumulates and len(fitting) >= 2:
            return _on_the_line(batch, fitting)
        raise AssertionError(f"not recorded: {candidate.describe()}")


def _seconds_a_sample(cell: Cell) -> float:
    samples = int(cell["per_device_train_batch_size"]) * int(cell["gradient_accumulation_steps"])
    return float(cell["step_seconds"]) / samples


def _on_the_line(batch: int, cells: dict[int, Cell]) -> Cell:
    """Return a cell on the straight line through the two recorded batches nearest to this one."""
    one, other = sorted(sorted(cells, key=lambda at: abs(at - batch))[:2])
    share = (batch - one) / (other - one)
    names = ("step_seconds", "peak_allocated_mib", "peak_reserved_mib", "trial_wall_seconds")
    made = {"state": "ok", "per_device_train_batch_size": batch, "gradient_accumulation_steps": 1}
    return {**made, **{n: cells[one][n] + share * (cells[other][n] - cells[one][n]) for n in names}}


def job_of(candidate: Candidate, cap_bytes: int, effort: Effort | None = None) -> TrialJob:
    """Return a trial job as a search makes it."""
    return TrialJob("0" * 32, candidate, cap_bytes, effort or Effort(), seed=42, timeout_seconds=60, log_path="")


# A search over a landscape


def ceiling_of(runner: RecordedRunner) -> Ceiling:
    """Return the memory ceiling of a recording; for the older form that of a 24 GiB card, which is lower."""
    if "ceiling" in runner.meta:
        return decode(runner.meta["ceiling"], Ceiling)
    contexts = (cell["cuda_context_mib"] for _, cell in runner.recorded if "cuda_context_mib" in cell)
    return Ceiling(24 * GIB, 139 * GIB, next(contexts) * MIB, Headroom())


def prepared_for(runner: RecordedRunner, study: str, seed: int = 42) -> Prepared:
    """Return the prepared search whose grid was recorded, on the machine of the recording."""
    meta, ceiling = runner.meta, ceiling_of(runner)
    facts = {"task": meta.get("task"), "seq_len": meta.get("seq_len"), **meta["workload"]}
    workload = Workload.from_document({**facts, "config": resolve_model(facts["model"]).config})
    environment = {"packages": {}, "driver": meta.get("driver"), **meta["environment"]}
    device = Device(
        kind="cuda",
        index=0,
        uuid=environment.get("device_uuid", "GPU-0"),
        name=environment["device_name"],
        memory_total_bytes=environment["device_memory_bytes"],
        memory_reserved_bytes=0,
        memory_used_bytes=0,
        memory_free_bytes=ceiling.free_bytes,
        driver=environment["driver"],
        capability=tuple(environment["device_capability"]),
    )
    request = SearchRequest(
        workload=workload,
        device=device,
        effective_batch=64,
        memory_limit_bytes=ceiling.limit_bytes,
        seed=seed,
        # The runs of other seeds are in the same database.
        fresh=True,
        study=study,
    )
    packages, fields = environment["packages"], tuple(environment.get("training_arguments_fields", ()))
    software = Software(environment.get("python", ""), packages, fields, cuda=environment.get("cuda"))
    inspected = Inspection(
        software, context_bytes=ceiling.context_bytes, model=_model_facts(meta["model"]), chip=CHIPS["h200"]
    )
    prepared = prepare(request, inspected)
    recorded = {candidate.arm for candidate, _ in runner.recorded}
    arms = tuple(arm for arm in prepared.space.arms if arm in recorded)
    return replace(prepared, space=Space(arms, prepared.space.batches), ceiling=ceiling)


def _model_facts(recorded: Document) -> ModelFacts:
    """Decode the facts of a recorded model; older recordings have its labels, too, and its class under another name."""
    told = {"class_name" if name == "class" else name: value for name, value in recorded.items()}
    told.pop("num_labels", None)
    return decode(told, ModelFacts)


def predictions_path(landscape: Path) -> Path:
    """Return the file of the recorded predictions for a landscape."""
    return ROOT / "studies" / "landscapes" / f"{landscape.stem}.predictions.json"


class RecordedPredictions:
    """A ``Submitter`` that answers from a file; a question that is not there is answered as by a process that failed.

    An answer is there so many seconds after it was asked for: whoever waits for one moves the clock on to that.
    """

    def __init__(self, path: Path, runner: SimulatedRunner, ready_seconds: float) -> None:
        answers = json.loads(path.read_text(encoding="utf-8"))["answers"] if path.exists() else []
        self._answers = {_key(answer["question"]): answer["result"] for answer in answers}
        self._submitted: dict[str, Answer] = {}
        self._there_at = 0.0
        self._runner = runner
        self._ready_seconds = ready_seconds if answers else 0.0

    def submit(self, job_id: str, work: PredictionWork, timeout_seconds: float) -> None:
        """See ``autotune.tuning.forecast.Submitter``."""
        result = self._answers.get(_key(encode(work)))
        self._there_at = self._runner.seconds + self._ready_seconds
        self._submitted[job_id] = Answer(exit_code=1) if result is None else Answer(result)

    def ended(self, wait_seconds: float = 0.0) -> dict[str, Answer]:
        """See ``autotune.tuning.forecast.Submitter``. Nothing ends before somebody waits for it."""
        if wait_seconds <= 0:
            return {}
        self._runner.seconds = max(self._runner.seconds, self._there_at)
        ended, self._submitted = self._submitted, {}
        return ended


def _key(question: Document) -> str:
    """Return a question's key among those of a landscape: all its fields but the GPU, which is the same.

    What is not set is left out, since questions that were recorded earlier do not have the newer names.
    """
    asked = {name: value for name, value in question.items() if name != "chip" and value is not None}
    return json.dumps({**asked, "arm": dataclasses.asdict(Arm(**question["arm"]))}, sort_keys=True)


def feasible(runner: RecordedRunner, ceiling: Ceiling) -> Iterator[tuple[Candidate, Cell]]:
    """Yield the recorded cells that completed with a peak under the memory line."""
    for candidate, cell in runner.recorded:
        if cell["state"] == "ok" and ceiling.bounds.fits(cell["peak_reserved_mib"] * MIB):
            yield candidate, cell
