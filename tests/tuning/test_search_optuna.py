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
from recorded import BATCHES, EFFECTIVE_64, ComputedRunner, RecordedRunner, fault, measurement, with_measured
from searching import FACTS, H200, Run, arms, ceiling_of, new_store, prepared, request, search

from autotune.core.candidate import Arm, Candidate
from autotune.core.errors import NothingFitsError
from autotune.core.options import SamplerName
from autotune.core.outcome import Completed, Failed, OutOfMemory
from autotune.core.units import GIB, MIB
from autotune.estimate.history import History
from autotune.results.optuna_trials import CONSTRAINT, TRIAL_ID_ATTRIBUTE, frozen_trials, over_line_gib
from autotune.space.arms import with_lever
from autotune.space.space import LARGEST_FREE_BATCH, Batches, Space
from autotune.store.records import TrialRecord
from autotune.store.repository import Store
from autotune.tuning.optuna_study import OptunaStudy, candidate_of, distributions, params_of
from autotune.tuning.plan import Plan
from autotune.tuning.policy import make_policy
from autotune.tuning.prepare import prepare

FOREIGN = ["tpe", "random"]
# Of what asks Optuna a hundred times, one sampler is enough of a sample.
SAMPLE = ["tpe", pytest.param("random", marks=pytest.mark.whole)]
Pair = tuple[TrialRecord, FrozenTrial]


def optuna_trials_by_id(run: Run) -> dict[str, FrozenTrial]:
    """A search's trials as the dashboard has them, by our id."""
    return {trial.user_attrs[TRIAL_ID_ATTRIBUTE]: trial for trial in frozen_trials(run.study, run.trials)}


@pytest.fixture(scope="module", params=["autotune", "grid", "tpe", "random"])
def pairs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Pair]:
    """Our trials with Optuna's, of a search in which all kinds of outcomes may occur."""
    runner = RecordedRunner(EFFECTIVE_64)
    runner.faults[Candidate(Arm("fp16"), 16, 4)] = [fault()]
    runner.faults[Candidate(Arm("fp16"), 32, 2)] = [fault()]
    with new_store(tmp_path_factory.mktemp("view")) as store:
        run = search(store, runner, sampler=request.param, trials=10)
    theirs = optuna_trials_by_id(run)
    return [(trial, theirs[trial.id]) for trial in run.trials]


class TestOptunasView:
    def test_has_every_trial_of_ours_with_its_number_and_parameters(self, pairs: list[Pair]) -> None:
        for ours, theirs in pairs:
            assert theirs.number == ours.number
            parameters = ours.candidate.recorded_parameters()
            assert theirs.user_attrs["gradient_accumulation_steps"] == parameters["gradient_accumulation_steps"]
            assert theirs.params.items() <= parameters.items()
            assert {"per_device_train_batch_size", "precision"} <= theirs.params.keys()
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
        theirs = optuna_trials_by_id(run)
        assert theirs[run.best.id].value == run.best.candidate.per_device_train_batch_size
        over = [t for t in run.trials if theirs[t.id].constraints[CONSTRAINT] > 0]
        assert [t.candidate.per_device_train_batch_size for t in over] == [320, 224]


@pytest.mark.parametrize(
    ("reserved_bytes", "expected_gib"), [(None, 3.0), (10 * GIB, 3.0), (99 * GIB, 3.0), (100 * GIB, 3.0)]
)
def test_running_out_is_over_the_line_by_the_headroom_at_least(reserved_bytes: int | None, expected_gib: float) -> None:
    outcome = OutOfMemory("CUDA out of memory", peak_reserved_bytes=reserved_bytes)
    assert over_line_gib(outcome, ceiling_of(100 * GIB)) == pytest.approx(expected_gib)
    no_headroom = over_line_gib(outcome, ceiling_of(100 * GIB, headroom=0))
    assert no_headroom > 0


class Foreign(NamedTuple):
    """A search by one of Optuna's samplers, with what it ran and all that Optuna was asked and told."""

    run: Run
    runner: RecordedRunner
    trials: list[FrozenTrial]


@pytest.fixture(scope="module", params=SAMPLE)
def foreign(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Foreign:
    """The example, searched to the end of the budget that such samplers have."""
    runner, studies = RecordedRunner(EFFECTIVE_64), list[optuna.Study]()
    create = optuna.create_study

    def kept(**options: Any) -> optuna.Study:
        studies.append(create(**options))
        return studies[-1]

    with new_store(tmp_path_factory.mktemp("foreign")) as store, pytest.MonkeyPatch.context() as patch:
        patch.setattr(optuna, "create_study", kept)
        run = search(store, runner, sampler=request.param)
    return Foreign(run, runner, studies[0].trials)


class TestOptunasSamplers:
    def test_find_the_winner_within_their_budget(self, foreign: Foreign) -> None:
        assert foreign.run.best.candidate.describe() == "32 × 2  bf16"
        assert len(foreign.runner.jobs) <= 32

    def test_end_after_64_proposals_of_nothing_new_in_a_row(self, foreign: Foreign) -> None:
        assert foreign.run.study.stopped_because == "the sampler proposed nothing new 64 times in a row"
        assert len(foreign.trials) >= 64 + len(foreign.runner.jobs)

    def test_are_told_what_was_refused_and_how_all_else_ended(self, foreign: Foreign) -> None:
        assert all(trial.state.is_finished() for trial in foreign.trials)
        told = [trial.value for trial in foreign.trials if trial.value is not None]
        outcomes = [trial.outcome for trial in foreign.run.trials]
        assert told == [o.measurement.samples_per_second for o in outcomes if isinstance(o, Completed)]
        assert any(trial.constraints.get(CONSTRAINT, 0) > 0 for trial in foreign.trials)

    def test_never_run_what_is_known(self, foreign: Foreign) -> None:
        candidates = [trial.candidate for trial in foreign.run.trials if trial.stage != "final"]
        assert len(set(candidates)) == len(candidates)
        assert all(c.samples_per_step == 64 for c in candidates)
        # bf16 and fp16 need the same bytes, so do tf32 and fp32: of six that do not fit, three are run at most.
        assert sum(isinstance(trial.outcome, OutOfMemory) for trial in foreign.run.trials) <= 3

    def test_do_not_try_batches_of_4_where_8_fits(self, foreign: Foreign) -> None:
        assert min(c.per_device_train_batch_size for c in foreign.runner.candidates) == 8

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
BASELINE = Candidate(Arm(), *SPACE.batches.baseline())
NAMES = distributions(SPACE, BASELINE, "tpe")


def driven(sampler: SamplerName, **options: Any) -> tuple[Plan, OptunaStudy]:
    """A search that is asked and told by hand."""
    given = dataclasses.replace(prepared(sampler=sampler, **options), space=SPACE)
    history = History(ceiling_of(20 * GIB))
    plan = Plan(given, history, make_policy(sampler, "throughput", SPACE))
    return plan, OptunaStudy(given, plan, seed=3)


def ask(plan: Plan, study: OptunaStudy, number: int) -> tuple[TrialRecord, optuna.Trial] | None:
    asked = study.ask()
    if asked is None:
        return None
    record = TrialRecord("study", number, asked[0].candidate, "w", "e", asked[0].stage)
    plan.begin(record)
    return record, asked[1]


def tell(plan: Plan, study: OptunaStudy, record: TrialRecord, trial: optuna.Trial) -> None:
    outcome = OutOfMemory("full") if record.candidate.per_device_train_batch_size > 8 else Failed("error", "none")
    study.tell(trial, record.candidate, outcome)
    plan.take(dataclasses.replace(record, outcome=outcome))


@pytest.mark.parametrize("sampler", ["autotune", "grid", "tpe"])
def test_every_sampler_is_asked_and_told_alike(sampler: SamplerName) -> None:
    plan, study = driven(sampler)
    tried = []
    while (asked := ask(plan, study, len(tried))) is not None:
        record, trial = asked
        if record.stage == "search":
            assert candidate_of(trial.params, SPACE) == record.candidate
        tried.append(record.candidate)
        tell(plan, study, record, trial)
    assert tried[0] == BASELINE
    assert len(set(tried)) == len(tried) > 3
    assert plan.done() is not None


def test_what_is_refused_beside_a_trial_may_be_worth_one_after_it() -> None:
    plan, study = driven("random")
    under_way = []
    while (asked := ask(plan, study, len(under_way))) is not None:
        under_way.append(asked)
    assert plan.done() is None
    tell(plan, study, *under_way[0])
    assert plan.next() == "draw"


def test_what_the_parameters_cannot_express_teaches_a_sampler_nothing() -> None:
    """The baseline's batch need not be a multiple that Optuna's samplers draw."""
    _, study = driven("tpe", effective_batch=None, batch_multiple=16)
    asked = study.ask()
    step, trial = asked
    other = Candidate(step.candidate.arm, 7, 1)
    study.tell(trial, other, Completed(measurement(other, 1.0, GIB, GIB)))
    assert study._study.trials[0].state is TrialState.FAIL


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
        baseline = Candidate(Arm(), *space.batches.baseline())
        names = distributions(space, baseline, sampler)
        for candidate in [*every_candidate(space), baseline]:
            assert contains(names, params_of(candidate, names))

    def test_hold_multiples_that_follow_from_the_samples(self) -> None:
        space = Space(
            arms("bf16"), Batches(64), late=frozenset({"length_multiple", "padding_free"}), multiples=(32, 512)
        )
        names = distributions(space, Candidate(Arm(), *space.batches.baseline()), "autotune")
        for lever in space.late:
            arm = with_lever(space.arms[0], lever, space.late, space.multiples)
            assert arm.length_multiple in space.multiples
            assert contains(names, params_of(space.candidate(arm, 64), names))

    @pytest.mark.parametrize("sampler", SAMPLERS)
    def test_a_lone_gpu_has_one_strategy_beside_none(self, sampler: SamplerName) -> None:
        offloaded = Arm("bf16", strategy="zero2-offload")
        space = Space((*arms("bf16"), offloaded), Batches(64))
        names = distributions(space, Candidate(Arm(), *space.batches.baseline()), sampler)
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
        batch = distributions(space, Candidate(Arm(), *space.batches.baseline()), sampler)[
            "per_device_train_batch_size"
        ]
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
