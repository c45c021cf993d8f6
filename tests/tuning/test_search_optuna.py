"""Test searches that Optuna records: its samplers, what is run of their proposals, its search space and parameters."""

import dataclasses
import warnings
from pathlib import Path
from typing import Any, NamedTuple, get_args

import optuna
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState
from recorded import BATCHES, EFFECTIVE_64, ComputedRunner, RecordedRunner, fault, run_candidate, with_measured
from searching import FACTS, H200, Run, arms, ceiling_of, new_store, prepared, request, search
from sqlalchemy import event

from autotune.core.candidate import Arm, Candidate
from autotune.core.errors import NothingFitsError
from autotune.core.options import SamplerName
from autotune.core.outcome import Completed, Failed, OutOfMemory
from autotune.core.units import GIB, MIB
from autotune.estimate.history import History, Tried
from autotune.space.levers import with_lever
from autotune.space.space import LARGEST_FREE_BATCH, Batches, Space
from autotune.store.records import TRIAL_ID_ATTRIBUTE, TrialRecord
from autotune.store.repository import Store
from autotune.tuning.optuna_study import (
    CONSTRAINT,
    OptunaPolicy,
    OptunaStudy,
    candidate_of,
    distributions,
    make_sampler,
    over_line_gib,
    params_of,
)
from autotune.tuning.prepare import prepare

FOREIGN = ["tpe", "random"]
# Of what asks Optuna a hundred times, one sampler is enough of a sample.
SAMPLE = ["tpe", pytest.param("random", marks=pytest.mark.whole)]
Pair = tuple[TrialRecord, FrozenTrial]


def optuna_trials_by_id(store: Store) -> dict[str, FrozenTrial]:
    """Optuna's trials by our id; those that were not run have none of ours."""
    study = optuna.load_study(study_name="bert", storage=store.optuna)
    return {trial.user_attrs[TRIAL_ID_ATTRIBUTE]: trial for trial in study.get_trials()}


@pytest.mark.usefixtures("optuna_tables")
def test_a_trial_is_written_at_once(store: Store) -> None:
    ready = prepared()
    space = distributions(ready.space, ready.baseline, "autotune")
    study = OptunaStudy("bert", store, space, "throughput", ready.ceiling)
    # The first one reads what is recorded.
    study.ask(ready.baseline, "baseline")
    commits: list[object] = []
    event.listen(store.optuna.engine, "commit", commits.append)
    asked = study.ask(ready.baseline, "baseline")
    assert len(commits) == 1
    _, written = optuna.load_study(study_name="bert", storage=store.optuna).get_trials()
    assert written.state is TrialState.RUNNING
    assert written.number == asked[1]
    assert written.params == params_of(ready.baseline, space)
    assert written.user_attrs == {TRIAL_ID_ATTRIBUTE: asked[0], "stage": "baseline"}


@pytest.mark.usefixtures("optuna_tables")
def test_warnings_of_other_threads_are_left_alone(store: Store, recwarn: pytest.WarningsRecorder) -> None:
    """A search changes for no moment what its process warns of: ``catch_warnings`` would do so for all threads."""
    seen: list[object] = []

    class Noting(optuna.samplers.RandomSampler):
        def infer_relative_search_space(self, *_: Any) -> dict[str, Any]:
            seen.append(warnings.filters)
            return {}

        def after_trial(self, *_: Any) -> None:
            seen.append(warnings.filters)

    ready = prepared(sampler="random")
    space = distributions(ready.space, ready.baseline, "random")
    warnings.filterwarnings("error")
    filters = warnings.filters
    study = OptunaStudy("bert", store, space, "throughput", ready.ceiling)
    # A batch that the sampler itself never proposes.
    unusual = Candidate(Arm("fp32"), 1, 64)
    trial_id, _ = study.ask(unusual, "baseline")
    study.describe(trial_id, unusual, OutOfMemory("full"))
    study.tell(trial_id, unusual, OutOfMemory("full"))
    history = History(ready.ceiling, [Tried(trial_id, unusual, OutOfMemory("full"))])
    assert OptunaPolicy(Noting(), ready.space, space, "throughput", study.skip).next(history) is not None
    assert seen
    assert all(each is filters for each in seen)
    assert recwarn.list == []


@pytest.fixture(scope="module", params=["autotune", "grid", "tpe", "random"])
def pairs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Pair]:
    """Our trials with Optuna's, of a search in which all kinds of outcomes may occur."""
    runner = RecordedRunner(EFFECTIVE_64)
    runner.faults[Candidate(Arm("fp16"), 16, 4)] = [fault()]
    runner.faults[Candidate(Arm("fp16"), 32, 2)] = [fault()]
    with new_store(tmp_path_factory.mktemp("view"), optuna_tables=True) as store:
        run = search(store, runner, sampler=request.param, trials=10)
        theirs = optuna_trials_by_id(store)
    return [(trial, theirs[trial.id]) for trial in run.trials]


class TestOptunasView:
    def test_has_every_trial_of_ours_with_its_number_and_parameters(self, pairs: list[Pair]) -> None:
        for ours, theirs in pairs:
            assert theirs.number == ours.number
            # Without what there is nothing to choose of with one GPU.
            parameters = ours.candidate.recorded_parameters()
            assert theirs.user_attrs["gradient_accumulation_steps"] == parameters.pop("gradient_accumulation_steps")
            # No parameters of Optuna's: they are tried for the winner alone.
            assert theirs.user_attrs["dataloader_num_workers"] == parameters.pop("dataloader_num_workers")
            del parameters["dataloader_prefetch_factor"], parameters["cpu_affinity"]
            assert theirs.params == parameters
            assert theirs.user_attrs["stage"] == ours.stage

    def test_has_values_constraints_and_states(self, pairs: list[Pair]) -> None:
        line_bytes = prepared().ceiling.line_bytes
        seen = set()
        for ours, theirs in pairs:
            match ours.outcome:
                case Completed(measurement=measured):
                    assert theirs.state == TrialState.COMPLETE
                    assert theirs.value == measured.samples_per_second
                    excess = theirs.constraints[CONSTRAINT]
                    assert (excess <= 0) is (measured.peak_reserved_bytes <= line_bytes)
                    assert theirs.user_attrs["peak_reserved_gib"] == measured.peak_reserved_bytes / GIB
                    assert theirs.user_attrs["step_seconds"] == measured.step_seconds
                    assert theirs.user_attrs["samples_per_second"] == measured.samples_per_second
                case OutOfMemory():
                    assert theirs.state == TrialState.PRUNED
                    assert theirs.value is None
                    assert theirs.constraints[CONSTRAINT] > 0
                case Failed():
                    assert theirs.state == TrialState.FAIL
                    assert theirs.constraints == {}
                case None:
                    pytest.fail("a trial without an end")
            seen.add(ours.state)
        assert seen >= {"completed"}

    def test_has_plain_numbers_for_dashboards_to_plot(self, pairs: list[Pair]) -> None:
        for _, theirs in pairs:
            for name, value in theirs.user_attrs.items():
                assert isinstance(value, int | float | str), name

    def test_has_the_same_parameters_in_every_trial(self, pairs: list[Pair]) -> None:
        assert len({tuple(sorted(theirs.params)) for _, theirs in pairs}) == 1

    def test_of_the_largest_batch_is_the_batch(self, store: Store) -> None:
        run = search(
            store, RecordedRunner(BATCHES, between=True), effective_batch=None, objective="max-batch",
            precisions=("bf16",), gradient_checkpointing="on",
        )  # fmt: skip
        theirs = optuna_trials_by_id(store)
        assert theirs[run.best.id].value == run.best.candidate.per_device_train_batch_size
        over = [t for t in run.trials if theirs[t.id].constraints[CONSTRAINT] > 0]
        assert [t.candidate.per_device_train_batch_size for t in over] == [224]


@pytest.mark.parametrize(
    ("reserved_bytes", "expected_gib"), [(None, 3.0), (10 * GIB, 3.0), (99 * GIB, 3.0), (100 * GIB, 3.0)]
)
def test_running_out_is_over_the_line_by_the_headroom_at_least(reserved_bytes: int | None, expected_gib: float) -> None:
    outcome = OutOfMemory("CUDA out of memory", peak_reserved_bytes=reserved_bytes)
    assert over_line_gib(outcome, ceiling_of(100 * GIB)) == pytest.approx(expected_gib)
    no_headroom = over_line_gib(outcome, ceiling_of(100 * GIB, headroom=0))
    assert no_headroom is not None
    assert no_headroom > 0


class Foreign(NamedTuple):
    """A search by one of Optuna's samplers, with what it ran and all that Optuna has."""

    run: Run
    runner: RecordedRunner
    trials: list[FrozenTrial]


@pytest.fixture(scope="module", params=SAMPLE)
def foreign(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Foreign:
    """The example, searched to the end of the budget that such samplers have."""
    runner = RecordedRunner(EFFECTIVE_64)
    with new_store(tmp_path_factory.mktemp("foreign")) as store:
        run = search(store, runner, sampler=request.param)
        return Foreign(run, runner, optuna.load_study(study_name="bert", storage=store.optuna).get_trials())


class TestOptunasSamplers:
    def test_find_the_winner_within_their_budget(self, foreign: Foreign) -> None:
        assert foreign.run.best.candidate.describe() == "32 × 2  bf16"
        assert len(foreign.runner.jobs) <= 32

    def test_end_after_64_proposals_of_nothing_new_in_a_row(self, foreign: Foreign) -> None:
        assert foreign.run.study.stopped_because == "the sampler proposed nothing new 64 times in a row"
        searched = [trial for trial in foreign.trials if trial.user_attrs["stage"] != "final"]
        is_skipped = ["skipped" in trial.user_attrs for trial in searched]
        assert all(is_skipped[-64:])
        assert not is_skipped[-65]

    def test_never_run_what_is_known(self, foreign: Foreign) -> None:
        candidates = [trial.candidate for trial in foreign.run.trials if trial.stage != "final"]
        assert len(set(candidates)) == len(candidates)
        assert all(c.samples_per_step == 64 for c in candidates)
        # bf16 and fp16 need the same bytes, so do tf32 and fp32: of six that do not fit, three are run at most.
        assert sum(isinstance(trial.outcome, OutOfMemory) for trial in foreign.run.trials) <= 3

    def test_do_not_try_batches_of_4_where_8_fits(self, foreign: Foreign) -> None:
        assert min(c.per_device_train_batch_size for c in foreign.runner.candidates) == 8

    def test_a_proposal_that_is_not_run_says_why(self, foreign: Foreign) -> None:
        skipped = [trial for trial in foreign.trials if "skipped" in trial.user_attrs]
        reasons = {trial.user_attrs["skipped"] for trial in skipped}
        assert reasons <= {"tried before", "known not to fit", "a batch of a larger multiple may fit"}
        assert "tried before" in reasons
        assert len(skipped) + len(foreign.runner.jobs) == len(foreign.trials)
        for trial in skipped:
            assert trial.state == TrialState.PRUNED
            assert (trial.constraints.get(CONSTRAINT, 0) > 0) is (trial.user_attrs["skipped"] == "known not to fit")

    @pytest.mark.parametrize("sampler", [*FOREIGN, "grid"])
    def test_go_down_where_nothing_larger_fits(self, store: Store, sampler: str) -> None:
        runner = ComputedRunner(lambda c: 9 * GIB * c.per_device_train_batch_size)
        run = search(
            store, runner, sampler=sampler, effective_batch=8, precisions=("bf16",), gradient_checkpointing="off",
            trials=5,
        )  # fmt: skip
        assert run.best.candidate.per_device_train_batch_size == 2
        assert [note for note in run.observer.notes if "going down" in note] != []

    @pytest.mark.parametrize("sampler", ["random", pytest.param("tpe", marks=pytest.mark.whole)])
    def test_end_where_there_is_nothing_new_with_the_winner_measured_in_full(self, store: Store, sampler: str) -> None:
        run = search(
            store, with_measured(RecordedRunner(EFFECTIVE_64), gpu_busy_share=0.95), sampler=sampler,
            precisions=("bf16",), gradient_checkpointing="off", trials=500, memory_limit_bytes=int(15.5 * GIB),
        )  # fmt: skip
        assert run.study.stopped_because == "the sampler proposed nothing new 64 times in a row"
        assert run.study.state == "finished"
        assert len(run.trials) <= 6
        assert run.best.candidate == Candidate(Arm("bf16"), 16, 4)
        assert run.best.stage == "final"
        assert run.observer.stages().count("final") == 1

    @pytest.mark.parametrize("sampler", FOREIGN)
    @pytest.mark.parametrize("multiple", [None, 3, 2048])
    def test_a_free_batch(self, store: Store, sampler: str, multiple: int | None) -> None:
        runner = ComputedRunner(lambda c: GIB + MIB * c.per_device_train_batch_size)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run = search(
                store, runner, sampler=sampler, effective_batch=None, batch_multiple=multiple, trials=5,
                precisions=("bf16",),
            )  # fmt: skip
        assert len(runner.jobs) == 5
        searched = [trial.candidate.per_device_train_batch_size for trial in run.trials[1:]]
        assert all(batch % (multiple or 8) == 0 for batch in searched)
        assert run.trials[0].candidate.per_device_train_batch_size == 8

    @pytest.mark.parametrize("sampler", FOREIGN)
    def test_nothing_fits(self, store: Store, sampler: str) -> None:
        with pytest.raises(NothingFitsError, match="nothing that was tried fits"):
            search(store, ComputedRunner(lambda _: 30 * GIB), sampler=sampler, trials=3)

    def test_the_same_seed_proposes_the_same(self, tmp_path: Path) -> None:
        runs = []
        for name in ("one.db", "two.db"):
            with new_store(tmp_path, name) as other:
                runner = RecordedRunner(EFFECTIVE_64)
                search(other, runner, sampler="tpe", seed=5, trials=8)
                runs.append(runner.candidates)
        assert runs[0] == runs[1]


def test_on_a_cpu_there_are_fewer_arms(store: Store) -> None:
    cpu = dataclasses.replace(
        H200, kind="cpu", index=None, uuid="cpu", name="CPU", capability=None, driver=None, memory_free_bytes=16 * GIB
    )
    facts = dataclasses.replace(FACTS, context_bytes=0)
    given = prepare(dataclasses.replace(request(memory_limit_bytes=None), device=cpu), facts)
    run = search(store, ComputedRunner(lambda c: GIB * c.per_device_train_batch_size), given=given)
    assert {trial.candidate.arm.precision for trial in run.trials} == {"fp32"}
    assert run.best.candidate.per_device_train_batch_size == 8


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
        history.pending.append(candidate)
        under_way.append(candidate)
    for each in under_way:
        history.pending.remove(each)
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


SAMPLERS = get_args(SamplerName)


def every_candidate(space: Space) -> list[Candidate]:
    batches = [b for level in space.batches.levels() for b in space.batches.at_level(level)]
    return [space.candidate(arm, batch) for arm in space.arms for batch in batches]


def contains(space: dict[str, BaseDistribution], params: dict[str, Any]) -> bool:
    return all(space[name]._contains(space[name].to_internal_repr(value)) for name, value in params.items())


class TestDistributions:
    @given(st.integers(1, 512), st.sampled_from(SAMPLERS))
    def test_hold_every_candidate_and_the_baseline(self, effective_batch: int, sampler: SamplerName) -> None:
        space = Space(arms("bf16", "tf32"), Batches(effective_batch))
        baseline = space.baseline("sdpa")
        names = distributions(space, baseline, sampler)
        for candidate in [*every_candidate(space), baseline]:
            assert contains(names, params_of(candidate, names))

    def test_hold_multiples_that_follow_from_the_samples(self) -> None:
        space = Space(
            arms("bf16"), Batches(64), late=frozenset({"length_multiple", "padding_free"}), multiples=(32, 512)
        )
        names = distributions(space, space.baseline("sdpa"), "autotune")
        for lever in space.late:
            arm = with_lever(space.arms[0], lever, space.late, space.multiples)
            assert arm.length_multiple in space.multiples
            assert contains(names, params_of(space.candidate(arm, 64), names))

    @pytest.mark.parametrize("sampler", SAMPLERS)
    def test_a_lone_gpu_has_one_strategy_beside_none(self, sampler: SamplerName) -> None:
        offloaded = Arm("bf16", strategy="zero2-offload")
        space = Space((*arms("bf16"), offloaded), Batches(64))
        names = distributions(space, space.baseline("sdpa"), sampler)
        for candidate in every_candidate(space):
            params = params_of(candidate, names)
            assert contains(names, params)
            assert candidate_of(params, space) == candidate

    @given(
        st.none() | st.integers(1, LARGEST_FREE_BATCH),
        st.none() | st.integers(1, 2 * LARGEST_FREE_BATCH),
        st.sampled_from(SAMPLERS),
    )
    def test_of_a_free_batch_are_well_formed(
        self, multiple: int | None, samples: int | None, sampler: SamplerName
    ) -> None:
        most = LARGEST_FREE_BATCH if samples is None else min(samples, LARGEST_FREE_BATCH)
        # Such a search is refused.
        assume(multiple is None or multiple <= most)
        space = Space(arms("bf16"), Batches(None, multiple=multiple, samples=samples))
        batch = distributions(space, space.baseline("sdpa"), sampler)["per_device_train_batch_size"]
        assert isinstance(batch, IntDistribution)
        assert 1 <= batch.low <= batch.high <= most
        assert (batch.high - batch.low) % batch.step == 0
        if sampler in ("autotune", "grid"):
            assert all(contains({"b": batch}, {"b": c.per_device_train_batch_size}) for c in every_candidate(space))
        else:
            assert space.batches.valid(batch.low)
            assert space.batches.valid(batch.high)

    def test_do_not_depend_on_what_is_tried_so_that_a_study_can_go_on(self) -> None:
        assert distributions(SPACE, BASELINE, "tpe") == distributions(SPACE, BASELINE, "tpe")
        precision = distributions(SPACE, BASELINE, "tpe")["precision"]
        assert precision == CategoricalDistribution(["bf16", "fp32", "tf32"])


class TestParameters:
    def test_of_every_candidate_lead_back_to_it(self) -> None:
        names = distributions(SPACE, BASELINE, "autotune")
        for candidate in every_candidate(SPACE):
            params = params_of(candidate, names)
            assert "gradient_accumulation_steps" not in params
            assert candidate_of(params, SPACE) == candidate

    @pytest.mark.parametrize(
        "change",
        [
            {"precision": "fp32"},
            {"per_device_train_batch_size": 24},
            {"per_device_train_batch_size": 0},
            {"attn_implementation": "eager"},
            {"optim": "sgd"},
        ],
    )
    def test_of_something_else_are_no_candidate(self, change: dict[str, Any]) -> None:
        names = distributions(SPACE, BASELINE, "tpe")
        params = params_of(SPACE.candidate(Arm("bf16"), 32), names)
        assert candidate_of({**params, **change}, SPACE) is None
