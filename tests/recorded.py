"""Runners that run nothing: trials answered from recorded landscapes, or computed from a formula.

``tests/landscapes`` holds real Trainer steps of BERT-large on an H200 whose allocator was capped at
23.5 GiB; ``studies/replay.py`` answers from them. Both kinds of runner count the seconds that the
trials would have taken, so that tests speak of simulated seconds, and keep the jobs that they were given.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from replay import OOM_SECONDS, RecordedRunner, SimulatedRunner, job_of, measurement, micro_steps_run, out_of_memory

from autotune.core.candidate import Candidate
from autotune.core.outcome import Completed, Effort, Failed, Outcome, OutOfMemory
from autotune.estimate.history import History, Tried, ran_in_full
from autotune.execution.executor import TrialJob
from autotune.tuning.policy import Policy

__all__ = ["RecordedRunner", "job_of", "measurement", "out_of_memory"]

LANDSCAPES = Path(__file__).parent / "landscapes"
EFFECTIVE_64 = LANDSCAPES / "bert-large-uncased_h200_cap23.5GiB_effective64.jsonl"
BATCHES = LANDSCAPES / "bert-large-uncased_h200_cap23.5GiB_batches.jsonl"

_FIXED_SECONDS = 0.5
_STEPS_A_TRIAL = 5


def fault(message: str = "ValueError: broken") -> Failed:
    """An error inside a trial."""
    return Failed("error", message, during="train")


class ComputedRunner(SimulatedRunner):
    """Answers from formulas: peak bytes and step seconds of a candidate; above the cap it is out of memory."""

    def __init__(
        self,
        peak_bytes: Callable[[Candidate], float],
        step_seconds: Callable[[Candidate], float] | None = None,
        busy_share: Callable[[Candidate], float | None] | None = None,
        slots: int = 1,
    ) -> None:
        super().__init__(slots)
        self._busy_share = busy_share or (lambda _: None)
        self._peak_bytes = peak_bytes
        self._step_seconds = step_seconds or (lambda candidate: 0.01 * candidate.samples_per_step)

    def answer(self, job: TrialJob) -> tuple[Outcome, float]:
        candidate = job.candidate
        peak_bytes = int(self._peak_bytes(candidate))
        if peak_bytes > job.cap_bytes:
            return out_of_memory(job.cap_bytes), OOM_SECONDS
        step_seconds = self._step_seconds(candidate)
        run = micro_steps_run(candidate, job.effort)
        measured = measurement(candidate, step_seconds, peak_bytes, peak_bytes, run)
        if job.effort.busy_steps:
            measured = dataclasses.replace(measured, gpu_busy_share=self._busy_share(candidate))
        outcome = Completed(measured)
        return outcome, _FIXED_SECONDS + _STEPS_A_TRIAL * step_seconds * run / candidate.gradient_accumulation_steps


Runner = TypeVar("Runner", bound=SimulatedRunner)


def with_measured(runner: Runner, **changes: Any) -> Runner:
    """The runner, with these values in whatever it measures."""
    answer = runner.answer

    def changed(job: TrialJob) -> tuple[Outcome, float]:
        outcome, seconds = answer(job)
        if isinstance(outcome, Completed):
            outcome = dataclasses.replace(outcome, measurement=dataclasses.replace(outcome.measurement, **changes))
        return outcome, seconds

    runner.answer = changed  # type: ignore[method-assign]
    return runner


def run_policy(policy: Policy, runner: SimulatedRunner, history: History, most: int = 200) -> History:
    """Let a policy run to its end on a runner; it must not repeat itself nor try what is known not to fit."""
    while (candidate := policy.next(history)) is not None:
        assert not history.outcomes_of(candidate), f"tried twice: {candidate.describe()}"
        assert history.ruled_out_by(candidate) is None, f"known not to fit: {candidate.describe()}"
        run_candidate(candidate, runner, history)
        assert len(history.tried) <= most, f"no end after {most} trials"
    return history


def run_candidate(candidate: Candidate, runner: SimulatedRunner, history: History) -> Tried:
    """Run one candidate and take it down; a search, too, has the GPU's share of a step measured."""
    effort = Effort(busy_steps=1)
    outcome = runner.run(job_of(candidate, history.ceiling.cap_bytes, effort), lambda _: None)
    tried = Tried(f"trial-{len(history.tried)}", candidate, outcome, ran_in_full(candidate, outcome))
    history.add(tried)
    return tried


def count_out_of_memory(history: History) -> int:
    """How many trials ran out of memory."""
    return sum(isinstance(tried.outcome, OutOfMemory) for tried in history.tried)
