"""Test searches in random worlds: they end, answer where anything fits, and keep their promises.

``make bench`` runs 10,000 of these worlds. On recorded speeds, slowed down by simulated processes, no wrong answer is
given with certainty.
"""

import bisect
import math
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import searching
from histories import measured_at
from replay import RecordedRunner, SimulatedRunner, ceiling_of, feasible, landscapes, prepared_for
from searching import RecordingObserver, new_store
from worlds import Machine, World, draw, figures, play

from autotune.core.candidate import Arm, Candidate
from autotune.core.errors import NoResultError, NothingFitsError
from autotune.core.measured_steps import is_enough, mean_step
from autotune.core.outcome import Completed, Outcome
from autotune.core.units import GIB
from autotune.devices.lock import Presence
from autotune.estimate.history import History
from autotune.estimate.noise import too_noisy
from autotune.execution import TrialJob
from autotune.execution.gpu_monitor import WatchedExecutor
from autotune.store.records import TrialRecord
from autotune.tuning.effort import effort_of
from autotune.tuning.loop import Search
from autotune.tuning.plan import Plan
from autotune.tuning.policy import make_policy


@pytest.fixture(scope="module", params=[40, pytest.param(120, marks=pytest.mark.whole)])
def worlds(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def found(worlds: int) -> dict[str, Any]:
    return figures([play(draw(seed)) for seed in range(worlds)])


def test_every_search_ends_and_answers_where_anything_fits(found: dict[str, Any], worlds: int) -> None:
    assert found["endless"] == 0
    assert found["possible"] > worlds * 2 / 3
    assert found["unanswered"] == 0


def test_answers_are_near_the_best(found: dict[str, Any]) -> None:
    assert found["regret_within_1_percent"] >= 0.95
    assert found["regret_within_5_percent_and_noise"] >= 0.995


def test_one_more_process_runs_as_was_promised(found: dict[str, Any]) -> None:
    # Of so few worlds the share itself is known to 4 %, and all may be kept. Promises that are too wide show as width:
    # the median of 400 worlds is 8.7 %, of which 6.9 to 9.8 % are the machine's own change of speed.
    assert found["coverage"] >= 0.90
    assert found["half_width_median"] <= 0.1


def test_the_figures_would_show_a_search_that_gives_up_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that is done after one proposal leaves regret and unanswered worlds behind."""
    from autotune.tuning.policy import Acquisition

    whole = Acquisition.next
    monkeypatch.setattr(Acquisition, "next", lambda self, h: whole(self, h) if len(h.tried) < 2 else None)
    found = figures([play(draw(seed)) for seed in range(30)])
    assert found["unanswered"] > 0
    assert found["regret_within_1_percent"] < 0.9


def test_with_two_trials_at_a_time_searches_end_and_answer_too() -> None:
    found = figures([play(draw(seed), slots=2) for seed in range(30)])
    assert found["endless"] == 0
    assert found["possible"] > 20
    assert found["unanswered"] == 0
    # All but one of them.
    assert found["regret_within_5_percent_and_noise"] >= 0.96


class _Trials(SimulatedRunner):
    """Trials of a world, as a search asks for them."""

    def __init__(self, world: World, slots: int = 1) -> None:
        super().__init__(slots)
        self.machine = Machine(world)

    def answer(self, job: TrialJob) -> tuple[Outcome, float]:
        before = self.machine.seconds
        outcome = self.machine.run(job.candidate, job.effort)
        return outcome, self.machine.seconds - before


@pytest.mark.parametrize(
    ("sampler", "slots", "worlds"),
    [
        *(("autotune", slots, 3) for slots in (1, 2)),
        *(("random", slots, 1) for slots in (1, 2)),
        *(pytest.param("random", slots, 3, marks=pytest.mark.whole) for slots in (1, 2)),
    ],
)
def test_the_whole_search_with_its_database_answers_too(tmp_path: Path, sampler: str, slots: int, worlds: int) -> None:
    """With Optuna's samplers, the judge refuses what it refuses the policy; none may end a search early."""
    with new_store(tmp_path) as store:
        for seed in range(worlds):
            world = replace(draw(seed), trials=None)
            prepared = world.prepared()
            request = replace(prepared.request, sampler=sampler, study=f"{sampler}-{seed}", trials=None)  # type: ignore[arg-type]
            given = replace(prepared, request=request)
            runner, possible = _Trials(world, slots), any(world.fits(c) for c in world.candidates(prepared))
            try:
                study = Search(given, runner, store, RecordingObserver(), tmp_path, clock=runner.clock).run()
                assert study.best_trial_id is not None
            except (NothingFitsError, NoResultError):
                # A random sampler has a budget and may spend it on what does not fit.
                assert not possible or sampler == "random"


CORES = 2
QUIET_DEVIATION = 0.01
"""Between steps, and between processes."""


class BusyRunner(RecordedRunner):
    """Answers with recorded speeds on a machine of two cores, which 0, 1, 2 or 4 busy processes use in turns.

    A trial has as many threads as there are cores, and gets its fair share of each. It tells how long its threads
    waited, as the kernel does, to a tenth.
    """

    def __init__(self, path: Path, rng: random.Random, busy: tuple[int, ...], turn_seconds: float) -> None:
        super().__init__(path)
        self._rng, self._busy, self._turn = rng, busy, turn_seconds
        self._ends: list[float] = []
        self._counts: list[int] = []

    def _slowdown(self, at: float) -> float:
        while not self._ends or self._ends[-1] <= at:
            begins = self._ends[-1] if self._ends else 0.0
            self._ends.append(begins + self._rng.expovariate(1 / self._turn))
            self._counts.append(self._rng.choice(self._busy))
        return (CORES + self._counts[bisect.bisect_right(self._ends, at)]) / CORES

    def answer(self, job: TrialJob) -> tuple[Outcome, float]:
        outcome, seconds = super().answer(job)
        if not isinstance(outcome, Completed):
            return outcome, seconds
        rng, effort, steps, at = self._rng, job.effort, [], self.seconds + seconds / 2
        process, waited = math.exp(rng.gauss(0, QUIET_DEVIATION)), 0.0
        while True:
            quiet = outcome.measurement.step_seconds * process * math.exp(rng.gauss(0, QUIET_DEVIATION))
            steps.append(quiet * self._slowdown(at))
            at, waited = at + steps[-1], waited + steps[-1] - quiet
            estimate = mean_step(steps)
            if is_enough(steps, effort, estimate.relative_half_width() if len(steps) > 1 else math.inf):
                break
            if effort.behind_step_seconds and len(steps) > 1 and min(steps) > effort.behind_step_seconds:
                break
        measured = replace(
            outcome.measurement,
            step_seconds=estimate.mean,
            step_seconds_each=tuple(steps),
            relative_spread=estimate.relative_half_width(),
            samples_per_second=job.candidate.samples_per_step / estimate.mean,
            gpu_busy_share=None,
            core_wait_share=max(0.0, waited / sum(steps) + rng.gauss(0, 0.02)) * rng.uniform(0.9, 1.1),
        )
        return Completed(measured), seconds / 2 + at - self.seconds


@dataclass(frozen=True)
class Answer:
    candidate: Candidate
    regret: float
    """By how much slower it is than the best, when the machine is quiet."""
    too_noisy: str | None


def search(path: Path, seed: int, busy: tuple[int, ...], turn_seconds: float) -> Answer:
    runner = BusyRunner(path, random.Random(f"{path.name} {seed} {busy}"), busy, turn_seconds)
    prepared = prepared_for(runner, "simulated", seed)
    executor = WatchedExecutor(runner, 0, print, presence=Presence("simulated"))
    history = History(ceiling_of(runner), tolerance=prepared.request.tolerance)
    plan = Plan(prepared, history, make_policy("autotune", "throughput", prepared.space), runner.clock)
    number = 0
    while (step := plan.next()) is not None and number < 60:
        effort = effort_of(prepared.request, step.candidate, step.stage, plan.best(), history)
        job = TrialJob(str(number), step.candidate, ceiling_of(runner).cap_bytes, effort, 42, 60, "")
        record = TrialRecord("s", number, step.candidate, "w", "e", step.stage, str(number))
        plan.begin(record)
        began = runner.seconds
        executor.submit(job)
        outcome = None
        while outcome is None:
            _, report = executor.wait()
            outcome = report if isinstance(report, Outcome) else None
        plan.take(replace(record, outcome=outcome, seconds=runner.seconds - began))
        number += 1
    best = plan.best()
    quiet = {candidate: cell["samples_per_second"] for candidate, cell in feasible(runner, ceiling_of(runner))}
    among = {tried.candidate for tried in history.believed(plan.in_space)}
    regret = 1 - quiet[best.candidate] / max(quiet.values())
    return Answer(best.candidate, regret, too_noisy(history, best.candidate, among))


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(5), marks=pytest.mark.whole)], ids=len)
def test_on_a_busy_machine_no_slow_answer_is_certain_and_on_a_quiet_one_every_answer_is(
    monkeypatch: pytest.MonkeyPatch, seeds: range
) -> None:
    """Five recorded landscapes. The turns are shorter than a trial, as long as a few, and as long as a search."""
    monkeypatch.delenv("AUTOTUNE_ACCEPT_NOISE")
    seeded = [(path, seed) for path in landscapes() for seed in seeds]
    assert not [told for path, seed in seeded if (told := search(path, seed, (0,), 60.0).too_noisy)]
    busy = [search(path, seed, (0, 1, 2, 4), turn) for path, seed in seeded for turn in (5.0, 30.0, 300.0)]
    assert not [answer for answer in busy if answer.regret > 0.1 and not answer.too_noisy]
    # Without the verdict there would be such answers, and with it there are answers still.
    assert [answer for answer in busy if answer.regret > 0.1]
    assert [answer for answer in busy if not answer.too_noisy]


@pytest.mark.parametrize(("unexplained", "is_noisy"), [(0.003, False), (0.3, True)])
def test_lengths_and_new_shapes_are_no_noise(unexplained: float, is_noisy: bool) -> None:
    """The interval of a mean step is wide since few shapes were new, and what each takes is hardly known."""
    history = History(searching.ceiling_of(24 * GIB))
    for seconds, arm in ((1.0, Arm("bf16")), (1.1, Arm("bf16", length_multiple=64))):
        steps = {"step_seconds_each": (seconds, 2 * seconds, seconds), "batches_vary": True, "relative_spread": 0.7}
        history.add(measured_at(Candidate(arm, 8), seconds, **steps, steady_error=unexplained))
    among = [tried.candidate for tried in history.tried]
    assert (too_noisy(history, among[0], among) is not None) == is_noisy
