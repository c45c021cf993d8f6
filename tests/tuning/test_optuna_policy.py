"""Test what a search runs of what Optuna's samplers propose."""

from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState
from recorded import ComputedRunner, run_candidate
from searching import arms, ceiling_of

from autotune.core.candidate import Candidate
from autotune.core.units import GIB
from autotune.estimate.history import History
from autotune.space.space import Batches, Space
from autotune.tuning.optuna_study import CONSTRAINT, OptunaPolicy, distributions, make_sampler, params_of

SPACE = Space(arms("bf16", "tf32"), Batches(64))
BASELINE = SPACE.baseline("sdpa")
NAMES = distributions(SPACE, BASELINE, "tpe")


class Skips(list[tuple[str, float | None]]):
    """What was refused, and how far it was over the line."""

    def __call__(self, params: dict[str, Any], why: str, excess: float | None) -> None:
        self.append((why, excess))


def policy_of(sampler: optuna.samplers.BaseSampler, skips: Skips) -> OptunaPolicy:
    return OptunaPolicy(sampler, SPACE, NAMES, "throughput", skips)


def history_of(cap_gib: float = 20) -> History:
    return History(ceiling_of(int(cap_gib * GIB)))


def test_runs_nothing_twice_and_ends() -> None:
    runner, history, skips = ComputedRunner(lambda c: GIB * c.per_device_train_batch_size / 2), history_of(), Skips()
    policy = policy_of(make_sampler("tpe", 1, is_parallel=False), skips)
    while (candidate := policy.next(history)) is not None:
        run_candidate(candidate, runner, history)
    assert len(set(runner.candidates)) == len(runner.candidates) > 3
    assert len(skips) >= 64
    assert all((excess is not None) == (why == "known not to fit") for why, excess in skips)
    asked = len(skips)
    run_candidate(runner.candidates[0], runner, history)
    assert policy.next(history) is None
    assert len(skips) == asked, "a sampler that had nothing new is asked no more"


def test_a_proposal_waits_while_something_else_is_run() -> None:
    policy, history = policy_of(make_sampler("random", 3, is_parallel=False), Skips()), history_of()
    first = policy.next(history)
    assert first is not None
    other = next(c for c in (SPACE.candidate(arm, 8) for arm in SPACE.arms) if c != first)
    run_candidate(other, ComputedRunner(lambda _: GIB), history)
    assert policy.next(history) == first


def test_what_is_refused_beside_a_trial_may_be_worth_one_after_it() -> None:
    policy, history = policy_of(make_sampler("random", 3, is_parallel=True), Skips()), history_of()
    under_way: list[Candidate] = []
    while (candidate := policy.next(history)) is not None:
        history.begin(candidate)
        under_way.append(candidate)
    for each in under_way:
        history.end(each)
    assert policy.next(history) in under_way


def test_a_sampler_learns_from_every_trial_whoever_asked_for_it() -> None:
    seen: list[list[FrozenTrial]] = []

    class Noting(optuna.samplers.RandomSampler):
        def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
            seen.append([each for each in study.trials if each.state.is_finished()])

    history = history_of(1)
    # A batch that the sampler itself never proposes.
    run_candidate(BASELINE, ComputedRunner(lambda _: 30 * GIB), history)
    assert policy_of(Noting(), Skips()).next(history) is not None
    baseline, *_ = seen[-1]
    assert baseline.state is TrialState.PRUNED
    assert baseline.params == params_of(BASELINE, NAMES)
    assert list(baseline.constraints) == [CONSTRAINT]
