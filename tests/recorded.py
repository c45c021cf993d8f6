"""Runners that run nothing: trials answered from recorded landscapes, or computed from a formula.

``RecordedRunner`` reads ``tests/landscapes``: real Trainer steps of BERT-large on an H200 whose
allocator was capped at 23.5 GiB. Both runners count the seconds that the trials would have taken,
so that tests speak of simulated seconds, and keep the jobs that they were given.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autotune.history import History, Tried, ran_in_full
from autotune.policy import Policy
from autotune.runner.local import TrialJob
from autotune.trial import Arm, Candidate, Completed, Document, Effort, Failed, Measurement, Outcome, OutOfMemory
from autotune.units import MIB

LANDSCAPES = Path(__file__).parent / "landscapes"
EFFECTIVE_64 = "bert-large-uncased_h200_cap23.5GiB_effective64.jsonl"
BATCHES = "bert-large-uncased_h200_cap23.5GiB_batches.jsonl"

_OOM_SECONDS = 1.0
_FIXED_SECONDS = 0.5
_STEPS_A_TRIAL = 5

Cell = dict[str, Any]


def micro_steps_run(candidate: Candidate, effort: Effort) -> int:
    """How many micro-steps a trial process runs in each step: three stand for all that follow."""
    return min(candidate.gradient_accumulation_steps, max(3, effort.max_micro_steps))


def measurement(
    candidate: Candidate, step_seconds: float, allocated_bytes: int, reserved_bytes: int, run: int | None = None
) -> Measurement:
    """A measurement of a candidate with these figures, in full unless ``run`` says otherwise."""
    return Measurement(
        step_seconds=step_seconds,
        step_seconds_each=(step_seconds,) * 3,
        relative_spread=0.005,
        samples_per_second=candidate.samples_per_step / step_seconds,
        peak_allocated_bytes=allocated_bytes,
        peak_reserved_bytes=reserved_bytes,
        micro_steps_run=candidate.gradient_accumulation_steps if run is None else run,
    )


class _Runner:
    """What the runners share: the jobs, the simulated clock, faults on demand."""

    def __init__(self) -> None:
        self.jobs: list[TrialJob] = []
        self.seconds = 0.0
        self.faults: dict[Candidate, list[Outcome | BaseException]] = {}
        """What to answer instead, one for each time that the candidate is run."""

    def clock(self) -> float:
        """The simulated time."""
        return self.seconds

    @property
    def candidates(self) -> list[Candidate]:
        """What was run, in order."""
        return [job.candidate for job in self.jobs]

    def run(self, job: TrialJob, progress: Callable[[Document], None]) -> Outcome:
        """Answer one trial."""
        self.jobs.append(job)
        progress({"phase": "train"})
        if self.faults.get(job.candidate):
            fault = self.faults[job.candidate].pop(0)
            self.seconds += _OOM_SECONDS
            if isinstance(fault, BaseException):
                raise fault
            return fault
        outcome, seconds = self.answer(job)
        self.seconds += seconds
        return outcome

    def answer(self, job: TrialJob) -> tuple[Outcome, float]:
        """The outcome of a job and the seconds that it takes."""
        raise NotImplementedError


def out_of_memory(reserved_bytes: int | None = None) -> OutOfMemory:
    """An out-of-memory as a trial process tells it."""
    return OutOfMemory("CUDA out of memory", peak_reserved_bytes=reserved_bytes)


def fault(message: str = "ValueError: broken") -> Failed:
    """An error inside a trial."""
    return Failed("error", message, during="train")


class RecordedRunner(_Runner):
    """Answers from a recorded landscape, and from nothing else.

    A cell that was not recorded is an ``AssertionError`` that names it, but for what follows from
    the records: a batch above a recorded out-of-memory of the same arm is out of memory too, and so
    is a recorded one whose allocated bytes exceed the job's cap. ``between=True`` also draws
    straight lines through the two nearest recorded batches of the same arm: measured peaks are
    affine in the batch.
    """

    def __init__(self, name: str, *, between: bool = False) -> None:
        super().__init__()
        self._between = between
        self._cells: dict[tuple[Arm, bool], dict[int, Cell]] = {}
        first, *lines = (LANDSCAPES / name).read_text().splitlines()
        self.meta: Cell = json.loads(first)
        self.cap_bytes = int(float(self.meta["allocator_cap_gib"]) * 2**30)
        for line in lines:
            cell = json.loads(line)
            candidate = Candidate.from_parameters({**cell, "optim": self.meta["optim"]})
            self._cells.setdefault((candidate.arm, candidate.accumulates), {})[
                candidate.per_device_train_batch_size
            ] = cell

    @property
    def recorded(self) -> list[tuple[Candidate, Cell]]:
        """Every recorded cell with its candidate."""
        return [
            (Candidate(arm, batch, cell["gradient_accumulation_steps"]), cell)
            for (arm, _), cells in self._cells.items()
            for batch, cell in cells.items()
        ]

    def answer(self, job: TrialJob) -> tuple[Outcome, float]:
        """See ``_Runner.answer``."""
        candidate = job.candidate
        assert job.cap_bytes <= self.cap_bytes, f"recorded under {self.cap_bytes} bytes, asked for {job.cap_bytes}"
        cell = self._cell(candidate)
        seconds = float(cell.get("trial_wall_seconds", _OOM_SECONDS))
        if cell["state"] == "oom" or cell["peak_allocated_mib"] * MIB > job.cap_bytes:
            return out_of_memory(min(job.cap_bytes, cell.get("peak_reserved_mib", 0) * MIB) or None), seconds
        reserved_bytes = min(job.cap_bytes, int(cell["peak_reserved_mib"] * MIB))
        run = micro_steps_run(candidate, job.effort)
        allocated_bytes = int(cell["peak_allocated_mib"] * MIB)
        return Completed(measurement(candidate, cell["step_seconds"], allocated_bytes, reserved_bytes, run)), seconds

    def _cell(self, candidate: Candidate) -> Cell:
        batch = candidate.per_device_train_batch_size
        cells = self._cells.get((candidate.arm, candidate.accumulates), {})
        cell = cells.get(batch)
        if cell is not None and cell["gradient_accumulation_steps"] == candidate.gradient_accumulation_steps:
            return cell
        if any(other["state"] == "oom" and at < batch for at, other in cells.items()):
            return {"state": "oom"}
        fitting = {at: other for at, other in cells.items() if other["state"] == "ok"}
        if self._between and not candidate.accumulates and len(fitting) >= 2:
            return _on_the_line(batch, fitting)
        raise AssertionError(f"not recorded: {candidate.describe()}")


def _on_the_line(batch: int, cells: dict[int, Cell]) -> Cell:
    """A cell on the straight line through the two recorded batches nearest to this one."""
    one, other = sorted(sorted(cells, key=lambda at: abs(at - batch))[:2])
    share = (batch - one) / (other - one)
    names = ("step_seconds", "peak_allocated_mib", "peak_reserved_mib", "trial_wall_seconds")
    return {"state": "ok", **{n: cells[one][n] + share * (cells[other][n] - cells[one][n]) for n in names}}


class ComputedRunner(_Runner):
    """Answers from formulas: peak bytes and step seconds of a candidate; above the cap it is out of memory."""

    def __init__(
        self, peak_bytes: Callable[[Candidate], float], step_seconds: Callable[[Candidate], float] | None = None
    ) -> None:
        super().__init__()
        self._peak_bytes = peak_bytes
        self._step_seconds = step_seconds or (lambda candidate: 0.01 * candidate.samples_per_step)

    def answer(self, job: TrialJob) -> tuple[Outcome, float]:
        """See ``_Runner.answer``."""
        candidate = job.candidate
        peak_bytes = int(self._peak_bytes(candidate))
        if peak_bytes > job.cap_bytes:
            return out_of_memory(job.cap_bytes), _OOM_SECONDS
        step_seconds = self._step_seconds(candidate)
        run = micro_steps_run(candidate, job.effort)
        outcome = Completed(measurement(candidate, step_seconds, peak_bytes, peak_bytes, run))
        return outcome, _FIXED_SECONDS + _STEPS_A_TRIAL * step_seconds * run / candidate.gradient_accumulation_steps


def job_of(candidate: Candidate, cap_bytes: int, effort: Effort | None = None) -> TrialJob:
    """A job as a search makes it."""
    return TrialJob("0" * 32, candidate, cap_bytes, effort or Effort(), seed=42, timeout_seconds=60, log_path="")


def run_policy(policy: Policy, runner: _Runner, history: History, most: int = 200) -> History:
    """Let a policy run to its end on a runner; it must not repeat itself nor try what is known not to fit."""
    while (candidate := policy.next(history)) is not None:
        assert not history.outcomes_of(candidate), f"tried twice: {candidate.describe()}"
        assert history.ruled_out_by(candidate) is None, f"known not to fit: {candidate.describe()}"
        run_candidate(candidate, runner, history)
        assert len(history.tried) <= most, f"no end after {most} trials"
    return history


def run_candidate(candidate: Candidate, runner: _Runner, history: History) -> Tried:
    """Run one candidate and take it down."""
    outcome = runner.run(job_of(candidate, history.ceiling.cap_bytes), lambda _: None)
    tried = Tried(f"trial-{len(history.tried)}", candidate, outcome, ran_in_full(candidate, outcome))
    history.add(tried)
    return tried


def ooms(history: History) -> int:
    """How many trials ran out of memory."""
    return sum(isinstance(tried.outcome, OutOfMemory) for tried in history.tried)
