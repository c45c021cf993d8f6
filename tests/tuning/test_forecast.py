"""Test predictions beside trials: asked a few at a time, corrected by measurements, used by the search."""

import dataclasses
import json
from typing import Any

import pytest
from recorded import EFFECTIVE_64, RecordedRunner
from searching import FACTS, RecordingObserver, new_store, request

from autotune.core.candidate import Arm, Candidate
from autotune.core.messages import Answer
from autotune.core.outcome import Completed, Failed, Measurement, Outcome, OutOfMemory
from autotune.core.prediction import MemoryPrediction, Operations, PredictionAnswer, PredictionWork
from autotune.core.schema import decode, encode
from autotune.core.units import GIB, MIB
from autotune.devices.gpus import CHIPS
from autotune.devices.host import HostMemory
from autotune.estimate.chance import Chances
from autotune.estimate.history import History, Tried
from autotune.estimate.memory import MemoryModel, Question, questions, reserved_interval
from autotune.execution.executor import TrialJob
from autotune.space.arms import changed
from autotune.space.space import Batches, Space
from autotune.store.repository import Store
from autotune.tuning.answer_cache import AnswerCache, KeptPredictions
from autotune.tuning.forecast import Forecast, Target, forecast_of
from autotune.tuning.loop import Search
from autotune.tuning.policy import Acquisition, MaxBatchPolicy, Policy
from autotune.tuning.prepare import Prepared, prepare

# bf16 and tf32, sdpa, with and without checkpointing and accumulation, predicted for 24 GiB on an H200:
# intercept and slope of the peak of allocated MiB, as the recorded landscape has them above its floor.
PREDICTED = {
    ("fp16", False, False): (4543, 514.5),
    ("fp16", False, True): (5880, 512.5),
    ("fp16", True, False): (3930, 78.6),
    ("fp16", True, True): (5240, 78.0),
    ("fp32", False, False): (3924, 808.9),
    ("fp32", False, True): (5200, 808.9),
    ("fp32", True, False): (3926, 91.0),
    ("fp32", True, True): (5200, 91.0),
}


class Answers:
    """A submitter that answers from the table above; the real one is tested with real processes."""

    def __init__(self, failing: int = 0) -> None:
        self.submitted: list[str] = []
        self.works: list[PredictionWork] = []
        self.most_at_once = 0
        self._running: dict[str, PredictionWork] = {}
        self._failing = failing

    def submit(self, job_id: str, work: PredictionWork, timeout_seconds: float) -> None:
        self.submitted.append(job_id)
        self.works.append(work)
        self._running[job_id] = work
        self.most_at_once = max(self.most_at_once, len(self._running))

    def ended(self, wait_seconds: float = 0.0) -> dict[str, Answer]:
        ended = {job_id: self._answer(work) for job_id, work in self._running.items()}
        self._running = {}
        return ended

    def _answer(self, work: PredictionWork) -> Answer:
        if self._failing:
            self._failing -= 1
            return Answer(exit_code=1, last_words="RuntimeError: no.")
        precision = {"bf16": "fp16", "tf32": "fp32"}.get(work.arm.precision, work.arm.precision)

        def predicted(batch: int, accumulation: int) -> MemoryPrediction:
            base, slope = PREDICTED[precision, work.arm.gradient_checkpointing, accumulation > 1]
            allocated = round((base + slope * batch) * MIB)
            over = allocated * 1.02 > work.line_bytes
            return MemoryPrediction(batch, accumulation, 0, allocated, round(allocated * 1.02), over, not over, {})

        fitting = [b for b in range(8, 1024, 8) if predicted(b, 1).fits] if work.multiple else []
        largest = max(fitting, default=0) if work.multiple else None
        return Answer(encode(PredictionAnswer(tuple(predicted(*batch) for batch in work.batches), largest)))


def prepared(**options: Any) -> Prepared:
    """The example's search on a GPU whose chip is known."""
    return prepare(request(**options), dataclasses.replace(FACTS, chip=CHIPS["h200"]))


def test_a_search_with_predictions_meets_no_out_of_memory(store: Store) -> None:
    ready = prepared()
    forecast = forecast_of(ready, Answers())
    assert forecast is not None
    runner = RecordedRunner(EFFECTIVE_64)
    Search(ready, runner, store, RecordingObserver(), store.path.parent, clock=runner.clock, forecast=forecast).run()
    study = store.study("bert")
    trials = store.trials(study.id)
    assert [trial.state for trial in trials].count("out_of_memory") == 0
    assert len(trials) <= 7
    best = store.trial(study.best_trial_id or "")
    assert best.candidate == Candidate(Arm("bf16"), 32, 2)


def test_twins_are_asked_once_and_accumulation_apart() -> None:
    arms = [Arm("bf16"), Arm("fp16"), Arm("tf32"), Arm("fp32")]
    asked = questions(arms, [(64, 1), (32, 2), (16, 4)], None)
    batches = ((16, 4), (32, 2), (64, 1))
    assert [(q.arm.precision, q.batches) for q in asked] == [("bf16", batches), ("tf32", batches)]


def test_speed_under_fsdp_alone_is_predicted_from_the_operations_of_ddp() -> None:
    fsdp = Arm("bf16", strategy="fsdp", ranks=2, transformer_layer_cls_to_wrap="BertLayer")
    syncing = dataclasses.replace(fsdp, sync_each_batch=True)
    alone = questions([fsdp, syncing], [(32, 1)], None)
    assert [(q.arm.strategy, q.batches) for q in alone] == [("fsdp", ((32, 1),)), ("fsdp", ((32, 1),)), ("ddp", ())]
    both = questions([Arm("bf16", strategy="ddp", ranks=2), fsdp], [(32, 1)], None)
    assert [(q.arm.strategy, q.batches) for q in both] == [("ddp", ((32, 1),)), ("fsdp", ((32, 1),))]
    answers = Answers()
    forecast = Forecast(answers, [Target(CHIPS["h200"], prepared().ceiling, alone)], parallel=1)
    # A search waits for both before the first trial of the arm.
    forecast.settle(lambda: fsdp)
    assert len(answers.submitted) == 2
    model = forecast.model
    counted = Operations((), {"forward": 1}, 1, 4)
    model.add(alone[-1], PredictionAnswer((), None, counted))
    assert model.operations(fsdp) is model.operations(syncing) is counted


def test_only_so_many_are_asked_at_once_and_a_failure_is_gone_without() -> None:
    ready = prepared()
    asked = questions(ready.space.arms, [(64, 1), (32, 2)], None)
    answers = Answers(failing=1)
    forecast = Forecast(answers, [Target(CHIPS["h200"], ready.ceiling, asked)], parallel=2)
    forecast.complete()
    assert forecast.is_complete
    assert answers.most_at_once == 2
    assert len(answers.submitted) == len(asked) == 4
    assert len(forecast.unanswered) == 1
    whys = [forecast.model.why_missing(arm) for arm in ready.space.arms]
    assert {why for why in whys if why} == {"tracing a step failed: RuntimeError: no"}


class TestReserve:
    """Questions about what saves memory, in a search for causal language models."""

    def forecast(self, *, limit_gib: int) -> tuple[Forecast, Answers, Prepared]:
        workload = dataclasses.replace(request().workload, task="causal-lm")
        ready = prepared(workload=workload, memory_limit_bytes=limit_gib * GIB, search_effort="default")
        answers = Answers()
        forecast = forecast_of(ready, answers)
        return forecast, answers, ready

    def asked(self, answers: Answers) -> list[bool]:
        return [work.arm.fused_loss or work.arm.uncached_casts for work in answers.works]

    def test_they_wait_while_something_is_predicted_to_fit(self) -> None:
        forecast, answers, ready = self.forecast(limit_gib=24)
        forecast.settle(lambda: ready.space.arms[0])
        forecast.complete()
        assert answers.works
        assert not any(self.asked(answers))
        assert not forecast.is_complete

    def test_they_are_asked_where_nothing_is(self) -> None:
        forecast, answers, ready = self.forecast(limit_gib=6)
        forecast.settle(lambda: ready.space.arms[0])
        assert forecast.is_complete
        asked = self.asked(answers)
        # What is without comes first.
        assert asked == sorted(asked)
        assert any(asked)

    def test_they_are_asked_before_a_trial_that_is_about_them(self) -> None:
        forecast, answers, ready = self.forecast(limit_gib=24)
        arm = changed(ready.space.arms[0], fused_loss=True, unpadded=True, gradient_checkpointing=True)
        forecast.settle(lambda: changed(arm, checkpointed_layers=3))
        fused = [work.arm.gradient_checkpointing for work in answers.works if work.arm.fused_loss]
        assert sorted(fused) == [False, True]


def test_what_gpus_share_is_asked_once_and_filed_for_each() -> None:
    ready = prepared()
    asked = questions(ready.space.arms, [(64, 1), (32, 2)], None)
    answers = Answers()
    same = [Target(CHIPS[name], ready.ceiling, asked) for name in ("v100-16gb", "v100-32gb")]
    other = Target(CHIPS["a100-80gb"], ready.ceiling, asked[:1])
    forecast = Forecast(answers, [*same, other], parallel=2)
    forecast.complete()
    assert len(answers.submitted) == len(set(answers.submitted)) == len(asked) + 1
    candidate = Candidate(asked[-1].arm, 32, 2)
    first, second, third = (model.prediction(candidate) for model in forecast.models)
    assert first is not None
    assert first == second
    assert third is None


def test_what_was_predicted_is_not_asked_again(store: Store) -> None:
    ready = prepared()
    kept = KeptPredictions(AnswerCache(store.answers), ready.request.workload)
    first = forecast_of(ready, Answers(), kept)
    first.complete()
    nobody = Answers()
    second = forecast_of(ready, nobody, KeptPredictions(AnswerCache(store.answers), ready.request.workload))
    assert second.is_complete
    for arm in ready.space.arms:
        candidate = Candidate(arm, 16, 4)
        assert second.model.prediction(candidate) == first.model.prediction(candidate)
        assert second.model.prediction(candidate) is not None
    narrower = forecast_of(prepared(memory_limit_bytes=23 * GIB), nobody, kept)
    assert not narrower.is_complete
    assert nobody.submitted == []


def test_a_failed_prediction_is_not_kept(store: Store) -> None:
    ready = prepared()
    kept = KeptPredictions(AnswerCache(store.answers), ready.request.workload)
    first = forecast_of(ready, Answers(failing=1), kept)
    first.complete()
    assert len(first.unanswered) == 1
    answers = Answers()
    second = forecast_of(ready, answers, kept)
    second.complete()
    assert len(answers.submitted) == 1


def test_a_search_whose_predictions_were_made_asks_for_none_and_goes_the_same_way(store: Store, tmp_path: Any) -> None:
    ready = prepared()
    tried = []
    for name, answers in (("first", Answers()), ("second", Answers())):
        with new_store(tmp_path, f"{name}.db") as own:
            # Nothing is reused but what was predicted.
            forecast = forecast_of(ready, answers, KeptPredictions(AnswerCache(store.answers), ready.request.workload))
            runner = RecordedRunner(EFFECTIVE_64)
            Search(ready, runner, own, RecordingObserver(), tmp_path, clock=runner.clock, forecast=forecast).run()
        tried.append((runner.candidates, bool(answers.submitted)))
    (first, was_asked), (second, is_asked) = tried
    assert was_asked
    assert not is_asked
    assert first == second


class Slow(Answers):
    """Answers once somebody waits."""

    def ended(self, wait_seconds: float = 0.0) -> dict[str, Answer]:
        return super().ended(wait_seconds) if wait_seconds > 0 else {}

    @property
    def is_busy(self) -> bool:
        return bool(self._running)


class Beside(RecordedRunner):
    """Notes which trials ran beside a prediction."""

    def __init__(self, answers: Slow) -> None:
        super().__init__(EFFECTIVE_64)
        self.answers = answers
        self.disturbed: list[Candidate] = []

    def submit(self, job: TrialJob) -> str:
        if self.answers.is_busy:
            self.disturbed.append(job.candidate)
        return super().submit(job)


@pytest.mark.parametrize(("cores", "task", "at_first"), [(2, None, 1), (16, None, 4), (2, "image-classification", 0)])
def test_only_a_baseline_of_text_runs_beside_predictions(
    cores: int, task: Any, at_first: int, store: Store, tmp_path: Any
) -> None:
    ready = prepared()
    if task is not None:
        workload = dataclasses.replace(ready.request.workload, task=task)
        ready = dataclasses.replace(ready, request=dataclasses.replace(ready.request, workload=workload))
    answers = Slow()
    forecast = forecast_of(ready, answers, cores=cores)
    runner = Beside(answers)
    Search(ready, runner, store, RecordingObserver(), tmp_path, clock=runner.clock, forecast=forecast).run()
    assert runner.disturbed == ([ready.baseline] if at_first else [])
    assert runner.candidates[0] == ready.baseline
    # bf16 without checkpointing is all that the search is about; with many cores the rest costs no time.
    assert len(answers.submitted) == max(at_first, 1)


def test_what_comes_when_patience_is_spent_still_counts() -> None:
    ready, answers = prepared(), Slow()
    asked = questions(list(ready.space.arms), [(32, 2), (16, 4)], None)
    target = Target(CHIPS["h200"], ready.ceiling, asked)
    forecast = Forecast(answers, [target], parallel=1, patience_seconds=0.0)
    arms = iter([Arm("bf16"), Arm("tf32")])
    for arm in arms:
        forecast.settle(lambda arm=arm: arm)
    assert len(answers.submitted) == 2, "each was asked for though nobody waits any more"
    answers.ended = lambda _wait=0.0: Answers.ended(answers)  # type: ignore[method-assign]
    forecast.complete()
    assert forecast.model.prediction(Candidate(Arm("tf32"), 32, 2)) is not None


def test_what_comes_when_patience_is_spent_is_kept(store: Store) -> None:
    ready, answers = prepared(), Answers()
    target = Target(CHIPS["h200"], ready.ceiling, questions([Arm("bf16")], [(32, 2)], None))
    kept = KeptPredictions(AnswerCache(store.answers), ready.request.workload)
    forecast = Forecast(answers, [target], parallel=1, kept=kept, patience_seconds=0.0)
    forecast.complete()
    forecast.complete()
    assert forecast.is_complete
    assert Forecast(answers, [target], parallel=1, kept=kept).is_complete


@pytest.mark.parametrize(("asks_ahead", "asked"), [(True, 3), (False, 1)])
def test_whoever_waits_for_one_arm_has_others_predicted_meanwhile(asks_ahead: bool, asked: int) -> None:
    ready, answers = prepared(), Answers()
    every = questions(list(ready.space.arms), [(32, 2), (16, 4)], None)
    target = Target(CHIPS["h200"], ready.ceiling, every)
    forecast = Forecast(answers, [target], parallel=3, asks_ahead=asks_ahead)
    forecast.settle(lambda: Arm("tf32"))
    assert (len(answers.submitted), answers.most_at_once) == (asked, asked)
    assert forecast.model.prediction(Candidate(Arm("tf32"), 32, 2)) is not None


def test_of_several_ranks_sixteen_bits_are_predicted_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.tuning.forecast.host_memory", lambda: HostMemory(64 * GIB, 64 * GIB))
    second = dataclasses.replace(request().device, uuid="GPU-1", index=1)
    several = request(others=(second,), world_size=2, precisions=("fp32", "tf32", "bf16"))
    layered = dataclasses.replace(FACTS.model, layer_classes=("BertLayer",)) if FACTS.model else None
    ready = prepare(several, dataclasses.replace(FACTS, model=layered, chip=CHIPS["h200"]))
    answers = Answers()
    forecast = forecast_of(ready, answers, cores=128)
    forecast.begin(None)
    works = list(answers._running.values())
    assert [work.arm.precision for work in works] == ["bf16"] * 10 + ["tf32"] * 6


def model_of(*rows: tuple[Arm, int, int, int], micro_batch_mib: int = 0) -> MemoryModel:
    """A memory model that was told ``(arm, batch, accumulation, MiB)``, reserved as much as allocated."""
    ceiling = prepared().ceiling
    model = MemoryModel(ceiling)
    for arm, batch, accumulation, mib in rows:
        peak_bytes = mib * MIB
        fits = peak_bytes <= ceiling.line_bytes
        predicted = MemoryPrediction(
            batch, accumulation, micro_batch_mib * MIB, peak_bytes, peak_bytes, False, fits, {}
        )
        model.add(Question(arm, ((batch, accumulation),), None), PredictionAnswer((predicted,), None))
    return model


def peak(mib: int) -> Completed:
    """A completed trial with this peak."""
    return Completed(Measurement(1.0, (1.0,), 0.0, 1.0, mib * MIB, mib * MIB))


LINE_MIB = prepared().ceiling.line_bytes // MIB


def rules_out(model: MemoryModel, candidate: Candidate, *ended: tuple[Candidate, Outcome]) -> bool:
    """Whether the predictions and trials that ended rule a candidate out."""
    history = History(prepared().ceiling, memory=model)
    for number, (tried, outcome) in enumerate(ended):
        history.add(Tried(str(number), tried, outcome))
    return Chances(history).rules_out(candidate)


def test_a_prediction_that_another_machine_contradicted_rules_nothing_out() -> None:
    fits, over = Candidate(Arm("bf16"), 16, 4), Candidate(Arm("bf16"), 64, 1)
    model = model_of((fits.arm, 16, 4, 10000), (over.arm, 64, 1, 2 * LINE_MIB))
    model.learn(fits, peak(5000))
    assert not model.trusted(over.arm)
    assert not Chances(History(prepared().ceiling, memory=model)).rules_out(over)


def test_what_is_reserved_is_predicted_as_an_interval() -> None:
    plain, checkpointed = Arm("bf16"), Arm("bf16", True)
    model = model_of(
        (plain, 16, 4, 20000), (checkpointed, 16, 4, 20000), (checkpointed, 32, 2, round(LINE_MIB * 0.985))
    )
    predicted = model.prediction(Candidate(plain, 16, 4))
    # No less is reserved than is allocated.
    assert reserved_interval(predicted, plain) == (20000 * MIB, 20280 * MIB)
    assert reserved_interval(predicted, checkpointed) == (20000 * MIB, 20440 * MIB)
    loose = dataclasses.replace(predicted, peak_allocated_bytes=16000 * MIB)
    assert reserved_interval(loose, checkpointed) == (18900 * MIB, 20440 * MIB)
    assert model.likely_fits(Candidate(checkpointed, 16, 4))
    assert not model.likely_fits(Candidate(checkpointed, 32, 2)), "its upper end is over the line"
    expanding = dataclasses.replace(plain, expandable_segments=True)
    predicted = model.prediction(Candidate(expanding, 16, 4))
    assert reserved_interval(predicted, expanding) == (20060 * MIB, 20900 * MIB)


def test_the_gradients_must_fit_once_more_under_ddp() -> None:
    ceiling, arm = prepared().ceiling, Arm("bf16", strategy="ddp", ranks=2)
    gradients = Operations((), {}, 1, ceiling.line_bytes - 20350 * MIB)
    batches = ((8, 1, 12000), (16, 4, 20000), (32, 2, 20300))
    predicted = tuple(MemoryPrediction(b, a, MIB, mib * MIB, mib * MIB, False, True, {}) for b, a, mib in batches)
    for operations, fits in ((gradients, [True, True, False]), (Operations((), {}, 1, 0), [True, True, True])):
        model = MemoryModel(ceiling)
        model.add(Question(arm, ((8, 1), (16, 4), (32, 2)), None), PredictionAnswer(predicted, None, operations))
        assert [model.likely_fits(Candidate(arm, batch, steps)) for batch, steps, _ in batches] == fits
        # A trial decides: it is ruled out only by what it needs beyond doubt.
        assert not rules_out(model, Candidate(arm, 32, 2), (Candidate(arm, 8, 1), peak(12000)))


def test_what_an_unchecked_prediction_rules_out_waits_for_what_may_fit() -> None:
    fits, over = Candidate(Arm("tf32"), 64, 1), Candidate(Arm("bf16"), 64, 1)
    space, predicted_over = Space([over.arm, fits.arm], Batches(64, only=64)), (over.arm, 64, 1, 2 * LINE_MIB)
    for nothing_fits in (OutOfMemory("CUDA out of memory"), Failed("error", "broken")):
        for policy in (Acquisition(space), MaxBatchPolicy(space), Policy(space)):
            history = History(prepared().ceiling, memory=model_of((fits.arm, 64, 1, 14000), predicted_over))
            assert policy.next(history) == fits
            history.add(Tried("0", fits, nothing_fits))
            assert policy.next(history) == over


@pytest.mark.parametrize(
    ("arm", "ratio", "may_fit", "over"),
    [
        *((Arm("bf16", checkpointing), 1.0, 1.02, 1.08) for checkpointing in (False, True)),
        *((Arm("bf16", checkpointing), 0.951, 1.04, 1.13) for checkpointing in (False, True)),
        # Llama-3.2-1B on two H200, sharded: 8 × 4 reserved 22.1 GiB and ran out of memory with 20.8 allocated.
        *((Arm("bf16", True, strategy=strategy, ranks=2), 1.0, 1.01, 1.02) for strategy in ("fsdp", "ddp")),
        (Arm("bf16", True, strategy="zero3", ranks=2), 1.0, 1.02, 1.08),
    ],
)
def test_what_is_reserved_rules_out_as_measured_peaks_tell(arm: Arm, ratio: float, may_fit: float, over: float) -> None:
    """A peak may be 5 % below its prediction, and then other peaks of the arm may be."""
    model = model_of((arm, 4, 8, 14000), (arm, 8, 4, LINE_MIB - 2000))
    known = model.prediction(Candidate(arm, 8, 4))
    for times, is_over in ((may_fit, False), (over, True)):
        told = dataclasses.replace(known, peak_reserved_bytes=round(LINE_MIB * times) * MIB, runs_out=True, fits=False)
        model.add(Question(arm, ((8, 4),), None), PredictionAnswer((told,), None))
        assert rules_out(model, Candidate(arm, 8, 4), (Candidate(arm, 4, 8), peak(round(14000 * ratio)))) is is_over


def test_a_prediction_that_a_trial_contradicted_rules_nothing_out() -> None:
    # The predicted slope is twice the real one: 32 is predicted at 31 GiB, and needs 18.
    rows = [(Arm("bf16"), batch, 64 // batch, 4096 + 850 * batch) for batch in (8, 16, 32)]
    model, largest = model_of(*rows), Candidate(Arm("bf16"), 32, 2)
    ended = [(Candidate(Arm("bf16"), batch, 64 // batch), peak(4096 + 425 * batch)) for batch in (8, 16)]
    assert not rules_out(model, largest, *ended)
    assert not model.trusted(largest.arm)


def test_a_class_without_measurements_is_trusted_only_while_no_other_disagrees() -> None:
    rows = [(Arm(name, checkpointed), 16, 4, 10000) for name in ("bf16", "tf32") for checkpointed in (False, True)]
    model = model_of(*rows, (Arm("tf32"), 64, 1, 2 * LINE_MIB))
    assert rules_out(model, Candidate(Arm("tf32"), 64, 1), (Candidate(Arm("bf16"), 16, 4), peak(10100)))
    assert model.trusted(Arm("tf32"))
    model.learn(Candidate(Arm("bf16", True), 16, 4), peak(8000))
    assert model.trusted(Arm("bf16"))
    assert not model.trusted(Arm("bf16", True))
    assert not model.trusted(Arm("tf32"))


def test_running_out_where_it_fits_by_far_is_a_contradiction() -> None:
    near, far = Candidate(Arm("bf16", True), 32, 2), Candidate(Arm("tf32", True), 32, 2)
    rows = [(Arm("bf16"), 16, 4, 10000), (near.arm, 32, 2, LINE_MIB - 1000), (far.arm, 32, 2, LINE_MIB // 2)]
    model = model_of(*rows)
    model.learn(Candidate(Arm("bf16"), 16, 4), peak(10000))
    model.learn(near, OutOfMemory("CUDA out of memory"))
    assert model.trusted(near.arm), "fragmentation may explain it"
    model.learn(far, OutOfMemory("CUDA out of memory", where="host"))
    model.learn(far, OutOfMemory("CUDA out of memory"), cap_bytes=LINE_MIB // 2 * MIB)
    assert model.trusted(far.arm), "that memory was the host's, and the other cap was smaller"
    model.learn(far, OutOfMemory("CUDA out of memory"))
    assert not model.trusted(far.arm)


def test_inputs_of_every_micro_step_are_predicted() -> None:
    model = model_of((Arm("bf16"), 8, 8, 14000), (Arm("bf16"), 8, 1, 13000), micro_batch_mib=20)
    for accumulation, mib in ((32, 14000 + 24 * 20), (2, 14000 - 6 * 20), (1, 13000)):
        predicted = model.prediction(Candidate(Arm("bf16"), 8, accumulation))
        assert predicted.peak_allocated_bytes == mib * MIB
    assert model.likely_fits(Candidate(Arm("bf16"), 8, 32))
    assert not model.likely_fits(Candidate(Arm("bf16"), 8, 1024))


def test_nothing_is_predicted_for_a_cpu() -> None:
    assert forecast_of(prepare(request(), FACTS), Answers()) is None


def test_a_task_survives_its_document() -> None:
    for chip in CHIPS.values():
        work = Question(Arm("bf16"), ((8, 2), (16, 1)), 8).work(chip, prepared().ceiling)
        assert decode(json.loads(json.dumps(encode(work))), PredictionWork) == work
        # Rates decide nothing about memory, and stay where they are.
        assert work.chip.rates is None


def test_an_answer_that_is_no_prediction_counts_as_a_failure() -> None:
    ready = prepared()
    answers = Answers()
    answers._answer = lambda work: Answer({"batches": [{"fits": "perhaps"}]})  # type: ignore[method-assign]
    forecast = forecast_of(ready, answers)
    forecast.complete()
    assert len(forecast.unanswered) == len(answers.submitted)
