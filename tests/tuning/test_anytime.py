"""Test how a search goes on after its first answer, over simulated GPUs: which levers it tries, and when it ends."""

import math
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from histories import measured_at
from recorded import ComputedRunner, fault, measurement, out_of_memory
from searching import BERT_LARGE, RecordingObserver, Run, ceiling_of, facts, interrupt_after, new_store, request, search
from tiny import tiny_workload

from autotune.core.candidate import Arm, Candidate
from autotune.core.ceiling import Headroom
from autotune.core.device import Device
from autotune.core.errors import NothingFitsError
from autotune.core.outcome import Completed, Failed, Outcome
from autotune.core.prediction import MemoryPrediction, PredictionAnswer
from autotune.core.units import GIB
from autotune.estimate.chance import Chances
from autotune.estimate.history import History, Tried
from autotune.estimate.memory import MemoryModel, Question
from autotune.estimate.speed_model import extra_seconds
from autotune.execution.executor import TrialJob
from autotune.results.report import load_report
from autotune.space.arms import levers_of
from autotune.space.levers import PRIORS
from autotune.space.space import Batches, Space
from autotune.tuning import anytime, policy
from autotune.tuning.anytime import Anytime
from autotune.tuning.left_out import left_out_arms
from autotune.tuning.prepare import Prepared, prepare
from autotune.tuning.request import SearchRequest
from autotune.tuning.run import run_search

CAUSAL = replace(BERT_LARGE, task="causal-lm")
GRAPHED = frozenset({"cuda_graphs", "unpadded"})
LATE = (
    "torch_compile", "cuda_graphs", "checkpointed_layers", "unpadded", "fused_loss", "uncached_casts", "non_blocking",
)  # fmt: skip


@dataclass
class Gpu:
    """A simulated GPU and host that train a model, with what levers do to them."""

    gpu_seconds: float = 0.0005
    """A sample takes in bf16."""
    host_seconds: float = 0.05
    """A micro-step takes the host."""
    sample_bytes: float = 0.3 * GIB
    compile_seconds: float = 50.0
    compiled_bytes: float = 0.0
    """A compiled model takes besides."""
    fails: Callable[[Arm], bool] = field(default=lambda arm: False)
    speeds: dict[str, float] = field(default_factory=dict)
    """By lever, the factor by which it makes the GPU slower; 1.0 where it is not named."""

    def seconds(self, candidate: Candidate) -> tuple[float, float]:
        """Of a micro-step, for the GPU and for the host."""
        arm = candidate.arm
        gpu = self.gpu_seconds * (candidate.per_device_train_batch_size + 2)
        gpu *= {"bf16": 1.0, "fp16": 1.02, "tf32": 2.0, "fp32": 4.0}[arm.precision]
        if arm.gradient_checkpointing:
            gpu *= 1 + 0.33 * (arm.checkpointed_layers or 24) / 24
        host = self.host_seconds * (1.2 if arm.precision in ("bf16", "fp16") else 1.0)
        if arm.torch_compile:
            gpu, host = 0.8 * gpu, host * (0.2 if arm.torch_compile_mode else 0.5)
        if arm.cuda_graphs:
            host *= 0.2
        for name, factor in self.speeds.items():
            gpu *= factor if levers_of(arm, [name]) else 1.0
        return gpu, host

    def peak(self, candidate: Candidate) -> float:
        arm = candidate.arm
        share = (arm.checkpointed_layers or 24) / 24 if arm.gradient_checkpointing else 0.0
        a_sample = self.sample_bytes * (1 - 0.8 * share) * (0.6 if arm.fused_loss else 1.0)
        compiled = self.compiled_bytes if arm.torch_compile else 0.0
        return 3 * GIB + compiled + a_sample * candidate.per_device_train_batch_size

    def runner(self) -> ComputedRunner:
        def step(candidate: Candidate) -> float:
            return candidate.gradient_accumulation_steps * max(self.seconds(candidate))

        runner = ComputedRunner(self.peak, step, lambda c: min(1.0, self.seconds(c)[0] / max(self.seconds(c))))
        answer = runner.answer

        def with_levers(job: TrialJob) -> tuple[Outcome, float]:
            if self.fails(job.candidate.arm):
                return fault("RuntimeError: no compiler\non this machine"), 5.0
            outcome, seconds = answer(job)
            if job.candidate.arm.torch_compile and isinstance(outcome, Completed):
                measured = replace(outcome.measurement, compile_seconds=self.compile_seconds)
                return replace(outcome, measurement=measured), seconds + self.compile_seconds
            return outcome, seconds

        runner.answer = with_levers  # type: ignore[method-assign]
        return runner


def prepared_with_levers(**options: Any) -> Prepared:
    defaults: dict[str, Any] = {
        "search_effort": "default", "cpu_affinity": "off", "expandable_segments": "auto", "workload": CAUSAL,
    }  # fmt: skip
    return prepare(request(**{**defaults, **options}), facts(checkpointing_layers=24))


def search_on_gpu(
    gpu: Gpu, folder: Path, observer: RecordingObserver | None = None, **options: Any
) -> tuple[Run, ComputedRunner]:
    runner = gpu.runner()
    with new_store(folder) as store:
        return search(store, runner, observer, given=prepared_with_levers(**options)), runner


def arms_with_levers(runner: ComputedRunner) -> list[Arm]:
    """The arms that were tried with levers, in order."""
    return [c.arm for c in runner.candidates if levers_of(c.arm, LATE)]


class TestOrder:
    def test_a_host_bound_step_is_graphed_before_it_is_compiled(self, tmp_path: Path) -> None:
        run, runner = search_on_gpu(Gpu(), tmp_path)
        tried = arms_with_levers(runner)
        assert tried[0].cuda_graphs
        # What a graph takes off the host has no padding mask.
        assert tried[0].unpadded
        assert levers_of(run.best.candidate.arm, LATE)
        notes = run.observer.notes
        assert any(note.startswith("answer after ") and "going on" in note for note in notes)
        assert any("CUDA graphs may give up to " in note for note in notes)
        assert any("CUDA graphs gave " in note for note in notes)

    def test_what_is_compiled_by_layer_is_captured_as_well(self, tmp_path: Path) -> None:
        run, _ = search_on_gpu(Gpu(compile_seconds=11), tmp_path)
        best = run.best.candidate.arm
        assert best.cuda_graphs
        assert best.regional_compilation

    def test_pairs_of_levers_are_candidates_and_one_alone_is_tried_where_a_pair_failed(self) -> None:
        root = Candidate(Arm("bf16"), 64)
        space = Space((Arm("bf16"),), Batches(64), late=frozenset({"torch_compile", "cuda_graphs"}))
        history = History(ceiling_of(24 * GIB, headroom=0))
        history.add(measured_at(root, 0.5, gpu_busy_share=0.88, compile_seconds=11.0))
        levers = Anytime(space)
        arm = replace(root.arm, torch_compile=True, regional_compilation=True, cuda_graphs=True)
        both = replace(root, arm=arm)
        assert levers.candidates(history, {root})[both].candidate == root
        history.add(Tried("b", both, fault("no capture")))
        alone = levers.next(history, {root}, usual_seconds=3.0, spent_seconds=0.0)
        assert levers_of(alone.candidate.arm, LATE) < levers_of(arm, LATE)

    def test_all_levers_that_promise_more_together_are_tried_in_one_trial(self) -> None:
        root = Candidate(Arm("bf16"), 64)
        late = frozenset({"length_multiple", "cuda_graphs", "cudnn_attention", "sparse_prediction"})
        history = History(ceiling_of(24 * GIB, headroom=0))
        history.add(measured_at(root, 0.5, gpu_busy_share=0.6))
        found = Anytime(Space((Arm("bf16"),), Batches(64), late=late)).next(
            history, {root}, usual_seconds=9.0, spent_seconds=0.0
        )
        assert levers_of(found.candidate.arm, late) == late

    @pytest.mark.parametrize("graphs", ["auto", "off"])
    def test_the_compilers_own_graphs_are_tried_where_no_others_can_be_had(self, graphs: str, tmp_path: Path) -> None:
        _, runner = search_on_gpu(Gpu(), tmp_path, cuda_graphs=graphs, workload=BERT_LARGE)
        assert any(arm.torch_compile_mode for arm in arms_with_levers(runner)) == (graphs == "off")

    @pytest.mark.parametrize("layers_fail", [False, True])
    def test_a_whole_model_is_compiled_where_its_layers_cannot_be(self, layers_fail: bool, tmp_path: Path) -> None:
        gpu = Gpu(compile_seconds=11, fails=lambda arm: arm.regional_compilation and layers_fail)
        _, runner = search_on_gpu(gpu, tmp_path)
        compiled = [arm for arm in arms_with_levers(runner) if arm.torch_compile and not arm.torch_compile_mode]
        assert any(not arm.regional_compilation for arm in compiled) == layers_fail

    def test_the_first_answer_is_that_of_a_quick_search(self, tmp_path: Path) -> None:
        quick, quick_runner = search_on_gpu(Gpu(), tmp_path / "quick", search_effort="quick")
        _, runner = search_on_gpu(Gpu(), tmp_path / "default")
        assert arms_with_levers(quick_runner) == []
        first = runner.candidates[: len(quick_runner.candidates)]
        assert not any(levers_of(c.arm, LATE) for c in first[:-1])
        assert quick.best.candidate in first

    def test_nothing_is_measured_again_before_a_lever_is_tried(self, tmp_path: Path) -> None:
        _, runner = search_on_gpu(Gpu(), tmp_path)
        first = next(i for i, c in enumerate(runner.candidates) if levers_of(c.arm, LATE))
        assert len({*runner.candidates[:first]}) == first

    def test_another_precision_wins_with_graphs(self, tmp_path: Path) -> None:
        """The host takes longer in bf16, the GPU in tf32: without graphs tf32 is the fastest."""
        gpu = Gpu(gpu_seconds=0.0006, host_seconds=0.1)
        options: dict[str, Any] = {"torch_compile": "off", "precisions": ("bf16", "tf32")}
        quick, _ = search_on_gpu(gpu, tmp_path / "quick", search_effort="quick", **options)
        run, _ = search_on_gpu(gpu, tmp_path / "default", **options)
        assert quick.best.candidate.arm.precision == "tf32"
        assert run.best.candidate.arm.precision == "bf16"
        assert run.best.candidate.arm.cuda_graphs


@dataclass
class Texts:
    """Texts of different lengths on a simulated GPU: what padding to few lengths, rows, graphs and compiling do.

    The figures are those of field measurements on an H100 (25 November 2026).
    """

    samples_per_second: float
    """Padded to the longest of a batch, which the host limits."""
    gpu_share: float
    """Share of that step in which the GPU computes."""
    rows: float
    """Factor of the GPU's time in rows without padding; infinity where there are none."""
    compiled: float
    """The same of compiled layers."""
    graphs_gib: float = 0.0
    """What CUDA graphs take besides 20 GiB, unless the loss is fused; in proportion to the batch."""

    def gib(self, candidate: Candidate) -> float:
        """The peak."""
        takes = candidate.arm.cuda_graphs and not candidate.arm.fused_loss
        return 20 + self.graphs_gib * candidate.per_device_train_batch_size / 16 * takes

    def speed(self, candidate: Candidate) -> tuple[float, float]:
        """Samples a second, and the GPU's share of the step."""
        arm, host = candidate.arm, 1.0
        gpu = self.gpu_share * (self.rows if arm.padding_free else 1.0) * (self.compiled if arm.torch_compile else 1.0)
        gpu *= 1.33 if arm.gradient_checkpointing else 1.0
        host *= 0.76 if arm.length_multiple or arm.padding_free else 1.0
        host *= (0.95 if not arm.cudnn_attention else 1.0) * (0.7 if arm.torch_compile else 1.0)
        if arm.torch_compile and not arm.length_multiple:
            host *= 2.0
        host *= 0.2 if arm.cuda_graphs else 1.0
        return self.samples_per_second / max(gpu, host), gpu / max(gpu, host)

    def search(self, names: Collection[str], arm: Arm, most_gib: float = 80.0) -> tuple[Candidate, list[Arm]]:
        """Try levers to the end; return the winner, and the arms that were tried in order."""
        arms = (replace(arm, gradient_checkpointing=False), replace(arm, gradient_checkpointing=True))
        space = Space(arms, Batches(16), late=frozenset(names), shapes_vary=True, multiples=(128, 1024))
        history, levers, spent = History(ceiling_of(int(most_gib * GIB), headroom=0)), Anytime(space), 0.0
        tried: list[Arm] = []
        idea, candidate = None, Candidate(arm, 16, 1)
        while True:
            speed, share = self.speed(candidate)
            seconds = 11.0 if candidate.arm.torch_compile else None
            found = measurement(candidate, candidate.samples_per_step / speed, 20 * GIB, 20 * GIB)
            found = replace(found, gpu_busy_share=share, compile_seconds=seconds)
            over = out_of_memory() if self.gib(candidate) > most_gib else None
            history.add(Tried(str(len(tried)), candidate, over or Completed(found)))
            tried.append(candidate.arm)
            among = {each.candidate for each in history.tried}
            idea = levers.next(history, among, usual_seconds=4.0, spent_seconds=spent)
            if idea is None:
                best = history.winner(among)
                return best.candidate, tried
            candidate, spent = idea.candidate, spent + idea.seconds


class TestTexts:
    LEVERS = ("torch_compile", "cuda_graphs", "length_multiple", "cudnn_attention")

    def test_a_search_ends_at_few_shapes_compiled_and_captured(self) -> None:
        """bert-base: 410 samples/s padded, 543 with few lengths, 671 in graphs, 770 compiled as well.

        Here compiling alone gives as much, and is the simpler answer.
        """
        best, tried = Texts(410.0, 0.61, math.inf, 0.87).search(self.LEVERS, Arm("bf16"))
        assert best.arm.length_multiple == 128
        assert best.arm.regional_compilation
        # What compiles comes in one trial with graphs.
        first = next(arm for arm in tried if arm.torch_compile)
        assert first.cuda_graphs
        assert all(arm.length_multiple for arm in tried if arm.torch_compile or arm.cuda_graphs)
        assert len(tried) <= 7

    def test_an_answer_that_recomputes_reaches_rows_without(self) -> None:
        levers = (*self.LEVERS, "padding_free", "fused_loss")
        best, tried = Texts(38.5, 0.7, 0.5, 0.8).search(levers, Arm("bf16", gradient_checkpointing=True))
        assert best.arm.padding_free
        assert best.arm.length_multiple == 1024
        assert best.arm.torch_compile
        assert best.arm.cuda_graphs
        assert not best.arm.gradient_checkpointing
        assert not tried[1].torch_compile
        assert len(tried) <= 10

    @pytest.mark.parametrize("levers", [("fused_loss",), ()], ids=["a fused loss", "a smaller batch"])
    def test_graphs_that_run_out_of_memory_are_tried_with_what_takes_less(self, levers: tuple[str, ...]) -> None:
        """Qwen2.5-0.5B under 40 GiB: rows of 6,656 tokens left the graphs too little."""
        texts = Texts(38.5, 0.6, 0.5, 0.8, graphs_gib=30)
        best, tried = texts.search((*self.LEVERS, "padding_free", *levers), Arm("bf16"), most_gib=40)
        assert best.arm.cuda_graphs
        assert best.arm.fused_loss or best.per_device_train_batch_size == 8
        assert best.arm.torch_compile
        assert len(tried) <= 12

    def test_nothing_is_compiled_for_lengths_without_end_and_rows_also_keep_activations(self) -> None:
        """An answer that recomputes: compiling needs few lengths first; rows, and smaller batches, keep activations."""
        plain, recomputing = Arm("bf16"), Arm("bf16", gradient_checkpointing=True)
        late = frozenset({"torch_compile", "length_multiple", "padding_free"})
        space = Space((plain, recomputing), Batches(16), late=late, shapes_vary=True, multiples=(128, 1024))
        history, root = History(ceiling_of(80 * GIB)), Candidate(recomputing, 16)
        history.add(measured_at(root, 1.0, 20 * GIB, gpu_busy_share=0.9))
        found = [each.arm for each in Anytime(space).candidates(history, {root})]
        assert not any(arm.torch_compile and not arm.length_multiple for arm in found)
        assert {arm.gradient_checkpointing for arm in found if arm.padding_free} == {False, True}
        rows = Candidate(replace(recomputing, padding_free=True, length_multiple=1024), 16)
        history.add(measured_at(rows, 0.5, 20 * GIB, gpu_busy_share=1.0))
        keeping, changes = replace(rows.arm, gradient_checkpointing=False), Anytime(space).candidates(history, {rows})
        assert {each.per_device_train_batch_size for each in changes if each.arm == keeping} == {8, 16}


class TestPrecisions:
    """bert-base at 128 tokens on a slow host: faster in tf32 than in bf16 until it is captured (H200)."""

    SPACE = Space((Arm("bf16"), Arm("tf32"), Arm("fp32")), Batches(32), late=GRAPHED)
    GRAPHS = Candidate(Arm("tf32", cuda_graphs=True, unpadded=True), 32)

    def history(self, *seconds: tuple[Candidate, float, float]) -> History:
        history = History(ceiling_of(80 * GIB))
        for candidate, step, busy in seconds:
            history.add(measured_at(candidate, step, 4 * GIB, gpu_busy_share=busy))
        return history

    def test_the_precision_that_the_gpu_computes_faster_is_captured(self) -> None:
        history = self.history((Candidate(Arm("tf32"), 32), 0.041, 0.47))
        idea = Anytime(self.SPACE).next(history, {Candidate(Arm("tf32"), 32)}, usual_seconds=3.0, spent_seconds=0.0)
        assert idea.candidate == replace(self.GRAPHS, arm=replace(self.GRAPHS.arm, precision="bf16"))

    def test_what_was_captured_in_one_precision_is_captured_in_another(self) -> None:
        history = self.history((Candidate(Arm("tf32"), 32), 0.041, 0.47), (self.GRAPHS, 0.028, 0.67))
        among = {each.candidate for each in history.tried}
        found = {each.arm.precision for each in Anytime(self.SPACE).candidates(history, among)}
        assert found == {"bf16", "tf32"}

    def test_of_two_precisions_alike_on_the_gpu_the_one_with_casts_is_compiled(self) -> None:
        """As T5-base on texts: 166 and 147 ms of the GPU, of which compiling left 96 and 121 ms (H200)."""
        plain = (Candidate(Arm("bf16"), 32), 0.215, 0.77), (Candidate(Arm("tf32"), 32), 0.191, 0.77)
        history, space = self.history(*plain, (self.GRAPHS, 0.149, 1.0)), replace(self.SPACE, late=frozenset(LATE))
        among = {each.candidate for each in history.tried}
        idea = Anytime(space).next(history, among, usual_seconds=5.0, spent_seconds=7.0)
        assert (idea.candidate.arm.torch_compile, idea.candidate.arm.precision) == (True, "bf16")

    def test_an_arm_that_ran_with_a_lever_alone_is_not_called_untried(self) -> None:
        captured = replace(self.GRAPHS, arm=replace(self.GRAPHS.arm, precision="bf16"))
        history = self.history((Candidate(Arm("tf32"), 32), 0.041, 0.47), (captured, 0.018, 0.6))
        assert [each.arms for each in left_out_arms(self.SPACE, history)] == [("fp32",)]


def test_what_is_compiled_for_another_batch_is_not_taken_to_be_cached() -> None:
    arm, history = Arm("bf16", torch_compile=True, regional_compilation=True), History(ceiling_of(80 * GIB))
    assert extra_seconds(history, Candidate(arm, 64)) == PRIORS["regional_compilation"].seconds
    for seconds in (10.9, 2.3):
        history.add(measured_at(Candidate(arm, 64), 0.2, compile_seconds=seconds))
    assert extra_seconds(history, Candidate(arm, 64)) == 2.3
    assert extra_seconds(history, Candidate(arm, 32, 2)) == 10.9


class TestEnd:
    def test_nothing_is_compiled_for_less_than_it_costs(self, tmp_path: Path) -> None:
        # The GPU is busy all the time, and hardly any of it can be fused.
        _, runner = search_on_gpu(
            Gpu(gpu_seconds=0.02, host_seconds=0.001, compile_seconds=50), tmp_path, workload=BERT_LARGE
        )
        assert sum(arm.torch_compile for arm in arms_with_levers(runner)) <= 1

    def test_a_lever_that_gives_nothing_is_not_tried_everywhere(self, tmp_path: Path) -> None:
        run, runner = search_on_gpu(Gpu(speeds={"cuda_graphs": 3.0}), tmp_path, torch_compile="off", fused_loss="off")
        assert sum(arm.cuda_graphs for arm in arms_with_levers(runner)) <= 2
        assert not run.best.candidate.arm.cuda_graphs

    def test_a_lever_that_fails_costs_one_trial_and_no_answer(self, tmp_path: Path) -> None:
        gpu = Gpu(fails=lambda arm: arm.cuda_graphs)
        run, runner = search_on_gpu(gpu, tmp_path, torch_compile="off")
        assert sum(arm.cuda_graphs for arm in arms_with_levers(runner)) <= 2
        assert run.study.state == "finished"
        told = "CUDA graphs is left out: RuntimeError: no compiler on this machine"
        assert any(note.endswith(told) for note in run.observer.notes)
        assert ("CUDA graphs",) in [left.arms for left in run.study.left_out]

    def test_no_way_to_compile_is_tried_once_compiling_failed(self, tmp_path: Path) -> None:
        _, runner = search_on_gpu(Gpu(fails=lambda arm: arm.torch_compile), tmp_path, cuda_graphs="off")
        assert sum(arm.torch_compile for arm in arms_with_levers(runner)) <= 3

    def test_levers_take_no_more_than_two_minutes(self, tmp_path: Path) -> None:
        _, runner = search_on_gpu(Gpu(compile_seconds=70.0), tmp_path)
        assert 1 <= sum(arm.torch_compile for arm in arms_with_levers(runner)) <= 2

    def test_a_compiler_that_hangs_is_ended_after_a_few_times_what_is_expected(self, tmp_path: Path) -> None:
        _, runner = search_on_gpu(Gpu(compile_seconds=50.0), tmp_path)
        limits = {job.candidate.arm.torch_compile: job.timeout_seconds for job in runner.jobs[-4:]}
        assert 90 < limits[True] < 150
        graphed = [job for job in runner.jobs if job.candidate.arm.cuda_graphs and not job.candidate.arm.torch_compile]
        assert all(job.timeout_seconds < 90 for job in graphed)

    @pytest.mark.parametrize("option", ["torch_compile", "cuda_graphs", "unpadded", "fused_loss"])
    def test_what_is_off_is_never_tried(self, tmp_path: Path, option: str) -> None:
        _, runner = search_on_gpu(Gpu(), tmp_path, **{option: "off"})
        assert not any(levers_of(arm, [option]) for arm in arms_with_levers(runner))


class TestAnswer:
    def test_it_is_recorded_and_exported_while_levers_are_tried(self, tmp_path: Path) -> None:
        recorded: list[str | None] = []
        observer = RecordingObserver()
        runner = Gpu().runner()
        with new_store(tmp_path) as store:

            def look(_: Any) -> None:
                recorded.append(load_report(store, "bert").study.best_trial_id)

            observer.on_end = look
            run = search(store, runner, observer, given=prepared_with_levers())
        assert recorded[0] is None
        states = [trial for trial in run.trials if trial.id == recorded[-1]]
        assert states[0].state == "completed"

    def test_a_lever_whose_trial_was_killed_is_told_of_once_it_was_tried_again(self, tmp_path: Path) -> None:
        whole, runner = search_on_gpu(Gpu(), tmp_path / "whole")
        lever = next(c for c in runner.candidates if levers_of(c.arm, LATE))
        again = Gpu().runner()
        again.faults[lever] = [Failed("killed", "killed by SIGKILL")]
        with new_store(tmp_path) as store:
            run = search(store, again, given=prepared_with_levers())
        at = again.candidates.index(lever)
        assert again.candidates[at : at + 2] == [lever] * 2
        told = [[note for note in each.observer.notes if " gave " in note] for each in (run, whole)]
        assert told[0] == told[1] != []
        assert not any("left out" in note for note in run.observer.notes)

    def test_an_interrupted_study_keeps_its_best_and_goes_on_without_repeating_a_lever(self, tmp_path: Path) -> None:
        observer, interruption = interrupt_after(4)
        with new_store(tmp_path) as store:
            first, second = Gpu().runner(), Gpu().runner()
            begun = search(store, first, observer, interruption, given=prepared_with_levers()).study
            search(store, second, given=prepared_with_levers())
        assert begun.state == "interrupted"
        assert begun.best_trial_id is not None
        assert arms_with_levers(first)
        assert second.candidates
        assert not {c for c in first.candidates if levers_of(c.arm, LATE)} & {*second.candidates}

    def test_a_quick_study_goes_on_where_it_is_searched_again(self, tmp_path: Path) -> None:
        with new_store(tmp_path) as store:
            quick = search(store, Gpu().runner(), given=prepared_with_levers(search_effort="quick"))
            runner = Gpu().runner()
            run = search(store, runner, given=prepared_with_levers())
        assert quick.study.name == run.study.name
        assert [c for c in runner.candidates if not levers_of(c.arm, LATE)] in ([], [runner.candidates[-1]])
        assert levers_of(run.best.candidate.arm, LATE)


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.whole) for seed in range(3, 20))])
def test_on_any_gpu_levers_end_and_lose_nothing(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    # What only has the host go on neither fails nor changes what the GPU computes.
    changing = LATE[:-1]
    failing = rng.choice([None, *changing])
    gpu = Gpu(
        gpu_seconds=10 ** rng.uniform(-4, -1.5),
        host_seconds=10 ** rng.uniform(-3, -1),
        sample_bytes=rng.uniform(0.05, 2) * GIB,
        compile_seconds=rng.uniform(5, 90),
        fails=lambda arm: failing is not None and bool(levers_of(arm, [failing])),
        speeds={name: rng.uniform(0.7, 1.3) for name in changing},
    )
    quick, _ = search_on_gpu(gpu, tmp_path / "quick", search_effort="quick")
    run, runner = search_on_gpu(gpu, tmp_path / "default")
    assert run.study.state == "finished"
    tried = arms_with_levers(runner)
    assert len(tried) <= 20
    assert len(set(tried)) >= len(tried) / 4
    one, other = (gpu.seconds(each.best.candidate) for each in (quick, run))
    batches = [each.best.candidate.per_device_train_batch_size for each in (quick, run)]
    assert batches[1] / max(other) >= 0.98 * batches[0] / max(one)


class TestMemoryOfLevers:
    def compiled(self, gib: float, folder: Path) -> tuple[Run, list[int]]:
        """A search where a batch of 64 leaves 0.4 GiB, and the batches that were compiled."""
        gpu = Gpu(host_seconds=0.001, compile_seconds=5, compiled_bytes=gib * GIB)
        run, runner = search_on_gpu(gpu, folder, precisions=("bf16",), workload=BERT_LARGE, cuda_graphs="off")
        return run, [c.per_device_train_batch_size for c in runner.candidates if c.arm.torch_compile]

    def test_what_leaves_too_little_is_tried_at_the_next_smaller_batch(self, tmp_path: Path) -> None:
        run, batches = self.compiled(0.6, tmp_path)
        assert batches[:2] == [64, 32]
        assert run.best.candidate.arm.torch_compile
        assert run.best.candidate.per_device_train_batch_size == 32
        assert any(note.endswith("and leaves too little memory") for note in run.observer.notes)

    def test_what_ran_out_of_memory_is_tried_only_where_that_is_left(self, tmp_path: Path) -> None:
        """No other way to compile has a trial at a batch where one ran out of memory."""
        _, batches = self.compiled(30, tmp_path)
        assert batches == sorted({*batches}, reverse=True)


class TestExpandableSegments:
    def searched(self, folder: Path, reserved: float, largest: int = 64, **options: Any) -> tuple[list[Candidate], Run]:
        """A search where the ``largest`` batch allocates 22.2 of 22.7 GiB, and reserves so many times what it
        allocates."""
        gpu = Gpu(host_seconds=0.001, sample_bytes=19.2 * GIB / largest)

        def allocated(job: TrialJob) -> tuple[Outcome, float]:
            outcome, seconds = answer(job)
            if not isinstance(outcome, Completed):
                return outcome, seconds
            times = 1.0 if job.candidate.arm.expandable_segments else reserved
            measured = outcome.measurement
            more = replace(measured, peak_reserved_bytes=round(times * measured.peak_allocated_bytes))
            return replace(outcome, measurement=more), seconds

        runner = gpu.runner()
        answer = runner.answer
        runner.answer = allocated  # type: ignore[method-assign]
        settings: dict[str, Any] = {"precisions": ("bf16",), "gradient_checkpointing": "off", "workload": BERT_LARGE}
        others = dict.fromkeys(("torch_compile", "cuda_graphs", "unpadded", "non_blocking"), "off")
        given = prepared_with_levers(**{"expandable_segments": "auto", **settings, **others, **options})
        with new_store(folder) as store:
            run = search(store, runner, given=given)
        return runner.candidates, run

    def test_what_reserves_too_much_is_tried_in_them(self, tmp_path: Path) -> None:
        candidates, run = self.searched(tmp_path, 1.04)
        assert [c.per_device_train_batch_size for c in candidates if c.arm.expandable_segments] == [64]
        assert run.best.candidate == next(c for c in candidates if c.arm.expandable_segments)
        told = [note for note in run.observer.notes if note.startswith("expandable segments")]
        # Over the answer before, 32 × 2 in 2 · 34 units of time, not over what left too little memory.
        assert told[1:] == [f"expandable segments gave {68 / 66:.2f} ×"]

    def test_they_come_before_smaller_multiples(self, tmp_path: Path) -> None:
        candidates, run = self.searched(tmp_path, 1.04, largest=8)
        at = next(at for at, c in enumerate(candidates) if c.arm.expandable_segments)
        assert run.best.candidate == candidates[at] == replace(candidates[at - 1], arm=candidates[at].arm)
        assert min(c.per_device_train_batch_size for c in candidates) == 8

    @pytest.mark.parametrize(
        ("reserved", "options"),
        [
            pytest.param(1.0, {}, id="all fits"),
            pytest.param(1.04, {"expandable_segments": "off"}, id="off"),
            pytest.param(1.04, {"search_effort": "quick", "expandable_segments": "off"}, id="no levers"),
            pytest.param(1.04, {"headroom": Headroom(0.06)}, id="what is allocated is too much"),
        ],
    )
    def test_nothing_else_is(self, reserved: float, options: dict[str, Any], tmp_path: Path) -> None:
        candidates, _ = self.searched(tmp_path, reserved, **options)
        assert not [c for c in candidates if c.arm.expandable_segments]


class TestNothingFits:
    def test_a_fused_loss_gives_the_first_answer(self, tmp_path: Path) -> None:
        """A sample takes more than the line, and less with a fused loss."""
        run, runner = search_on_gpu(Gpu(sample_bytes=130 * GIB), tmp_path, search_effort="default")
        assert run.best.candidate.arm.fused_loss
        first = next(c for c, job in zip(runner.candidates, runner.jobs, strict=True) if c.arm.fused_loss)
        plain = [c for c in runner.candidates[: runner.candidates.index(first)] if not c.arm.fused_loss]
        assert min(c.per_device_train_batch_size for c in plain) == 1

    def test_every_precision_is_searched_with_it(self, tmp_path: Path) -> None:
        gpu = Gpu(sample_bytes=130 * GIB, host_seconds=0.0001, fails=lambda arm: arm.precision == "bf16")
        run, _ = search_on_gpu(gpu, tmp_path, precisions=("bf16", "tf32"), gradient_checkpointing="on")
        # bf16 is the first to be tried.
        assert run.best.candidate.arm.precision == "tf32"

    def test_it_is_said_only_after_that(self, tmp_path: Path) -> None:
        with pytest.raises(NothingFitsError):
            search_on_gpu(Gpu(sample_bytes=500 * GIB), tmp_path / "auto")
        with pytest.raises(NothingFitsError):
            search_on_gpu(Gpu(sample_bytes=130 * GIB), tmp_path / "off", fused_loss="off", uncached_casts="off")


class TestMemory:
    """A batch of 64 needs 40 GiB, or 10 where all of 24 layers recompute; 23 GiB are under the line."""

    KEPT = Arm("bf16", unpadded=False)
    ALL = Arm("bf16", gradient_checkpointing=True)

    def model(self, line_gib: float) -> MemoryModel:
        model = MemoryModel(ceiling_of(int(line_gib * GIB), headroom=0), layers=24)
        for arm, gib in ((self.KEPT, 40), (self.ALL, 10)):
            found = MemoryPrediction(64, 1, 0, gib * GIB, gib * GIB, runs_out=False, fits=gib < line_gib, anatomy={})
            model.add(Question(arm, ((64, 1),), None), PredictionAnswer((found,), None))
        return model

    def test_peaks_are_affine_in_the_number_of_layers(self) -> None:
        some = Candidate(replace(self.ALL, checkpointed_layers=16), 64)
        predicted = self.model(24).prediction(some)
        assert predicted.peak_allocated_bytes == predicted.peak_reserved_bytes == 20 * GIB
        assert predicted.fits
        without_mask = replace(some, arm=replace(some.arm, unpadded=True))
        assert self.model(24).prediction(without_mask) == predicted

    def test_as_few_layers_recompute_as_fit(self) -> None:
        memory = self.model(24)
        space = Space((self.ALL,), Batches(64), late=frozenset({"checkpointed_layers"}))
        root = Candidate(self.ALL, 64)
        history = History(ceiling_of(24 * GIB, headroom=0), memory=memory, layers=24)
        history.add(measured_at(root, 1.0, 10 * GIB, gpu_busy_share=0.97))
        idea = Anytime(space).next(history, {root}, usual_seconds=3.0, spent_seconds=0.0)
        assert idea.name == "checkpointing fewer layers"
        assert 1.02 < idea.gain < 1.12
        # 40 - 30 · 14 / 24 GiB are 22.5 of 24.
        assert 13 <= (idea.candidate.arm.checkpointed_layers or 0) <= 15

    def compiled(self) -> tuple[Candidate, History, Anytime]:
        """Compiled layers that all recompute, as measured, and what may be tried next."""
        root = Candidate(replace(self.ALL, torch_compile=True, regional_compilation=True), 64)
        space = Space((self.ALL,), Batches(64), late=frozenset({"checkpointed_layers", "torch_compile"}))
        history = History(ceiling_of(24 * GIB, headroom=0), memory=self.model(24), layers=24)
        history.add(measured_at(root, 1.0, 8 * GIB, gpu_busy_share=0.97, compile_seconds=5.0))
        return root, history, Anytime(space)

    def test_of_compiled_layers_as_few_recompute_as_leave_room_above_what_was_measured(self) -> None:
        root, history, levers = self.compiled()
        idea = levers.next(history, {root}, usual_seconds=3.0, spent_seconds=0.0)
        # They took 0.8 of what is predicted: layers that keep their activations may add 1.0 to 1.25 GiB each to 8 GiB.
        count = idea.candidate.arm.checkpointed_layers or 0
        assert idea.candidate.arm == replace(root.arm, checkpointed_layers=count)
        assert 8 <= count <= 13

        # Measured, they add 0.5 GiB each, so that more have room.
        fewer = idea.candidate
        gib = 8 + (24 - count) // 2
        history.add(measured_at(fewer, 0.93, gib * GIB, gpu_busy_share=0.97, compile_seconds=5.0))
        again = levers.next(history, {root, fewer}, usual_seconds=3.0, spent_seconds=0.0)
        assert (again.candidate.arm.checkpointed_layers or 0) < count - 3
        assert 1.02 < again.gain < 1.3

    def test_what_ran_out_of_memory_is_not_followed_by_one_layer_more(self) -> None:
        root, history, levers = self.compiled()
        idea = levers.next(history, {root}, usual_seconds=3.0, spent_seconds=0.0)
        history.add(Tried("b", idea.candidate, out_of_memory(24 * GIB)))
        again = levers.next(history, {root}, usual_seconds=3.0, spent_seconds=0.0)
        ran_out = idea.candidate.arm.checkpointed_layers or 0
        assert again is None or (again.candidate.arm.checkpointed_layers or 0) >= ran_out + 4

    @pytest.mark.parametrize(
        ("line_gib", "recomputes", "retries", "is_tried"),
        [(24, False, 0, False), (36, False, 0, True), (24, True, 0, True), (24, True, 1, False)],
    )
    def test_where_compiling_keeps_activations_it_is_tried_with_room_for_them(
        self, line_gib: int, recomputes: bool, retries: int, is_tried: bool
    ) -> None:
        """At least 0.7 of the 30 GiB that recomputing saves come on top of 10, and none where the cap was met."""
        space = Space((self.KEPT, self.ALL), Batches(64), late=frozenset({"torch_compile"}))
        root = Candidate(self.ALL, 64)
        model = self.model(line_gib)
        history = History(ceiling_of(line_gib * GIB, headroom=0), memory=model, compiled_recomputes=recomputes)
        history.add(measured_at(root, 1.0, 10 * GIB, allocation_retries=retries))
        idea = Anytime(space).next(history, {root}, usual_seconds=3.0, spent_seconds=0.0)
        # A smaller batch may be compiled.
        assert (idea is not None and idea.candidate == replace(root, arm=idea.candidate.arm)) == is_tried

    @pytest.mark.parametrize("is_graphed", [False, True])
    def test_a_fused_loss_is_tried_where_graphs_ran_out_and_at_no_larger_batch(self, is_graphed: bool) -> None:
        """20 of 24 GiB at a batch of 16, and 40 at 32: how much less a fused loss takes is not predicted."""
        memory = MemoryModel(ceiling_of(24 * GIB, headroom=0))
        found = [
            MemoryPrediction(batch, 64 // batch, 0, gib * GIB, gib * GIB, runs_out=gib > 24, fits=gib < 24, anatomy={})
            for batch, gib in ((16, 20), (32, 40))
        ]
        memory.add(Question(self.KEPT, ((16, 4), (32, 2)), None), PredictionAnswer(tuple(found), None))
        space = Space((self.KEPT,), Batches(64), late=frozenset({"cuda_graphs", "fused_loss"}))
        history, root = History(ceiling_of(24 * GIB, headroom=0), memory=memory, layers=24), Candidate(self.KEPT, 16, 4)
        history.add(measured_at(root, 1.0, 20 * GIB))
        history.add(Tried("b", Candidate(self.KEPT, 32, 2), out_of_memory(24 * GIB)))
        if is_graphed:
            graphs = replace(root, arm=replace(self.KEPT, cuda_graphs=True))
            history.add(Tried("c", graphs, out_of_memory(24 * GIB)))
        idea = Anytime(space).next(history, {root}, usual_seconds=3.0, spent_seconds=0.0)
        assert idea.candidate.per_device_train_batch_size == 16
        assert idea.candidate.arm.fused_loss


def test_a_failure_is_blamed_on_what_was_new() -> None:
    graphed = Arm("bf16", cuda_graphs=True, unpadded=True)
    root, fused = Candidate(graphed, 64), Candidate(replace(graphed, fused_loss=True), 64)
    history = History(ceiling_of(24 * GIB))
    history.add(measured_at(root, 1.0))
    history.add(Tried("b", fused, fault("FusedLossUnavailableError: its logits\nare scaled")))
    assert Chances(history).failing() == {"fused_loss": "FusedLossUnavailableError: its logits are scaled"}


def test_of_compiling_and_graphs_what_fails_alone_is_blamed() -> None:
    compiled = Arm("bf16", torch_compile=True, regional_compilation=True)
    both = replace(compiled, cuda_graphs=True)
    history = History(ceiling_of(24 * GIB))
    history.add(Tried("a", Candidate(both, 64), fault("no capture")))
    # One of three, nobody knows which.
    assert Chances(history).failing() == {}
    history.add(measured_at(Candidate(compiled, 64), 1.0))
    assert Chances(history).failing() == {"cuda_graphs": "no capture"}


def test_graphs_that_fail_under_checkpointing_may_run_without() -> None:
    """As of GPT-2, whose dropout a checkpoint in a CUDA graph cannot draw again."""
    base = Candidate(Arm("bf16", gradient_checkpointing=True, non_blocking=True), 64)
    graphed = replace(base, arm=replace(base.arm, cuda_graphs=True))
    kept = replace(graphed, arm=replace(graphed.arm, gradient_checkpointing=False))
    history = History(ceiling_of(24 * GIB))
    history.add(measured_at(base, 0.2))
    history.add(Tried("b", graphed, fault("cannot draw the same again")))
    chances = Chances(history)
    assert chances.runs(graphed) < 0.05
    assert chances.runs(kept) > 0.4
    history.add(Tried("c", kept, fault("no capture")))
    assert Chances(history).runs(kept) < 0.05


@pytest.mark.whole
def test_real_trials_go_on_with_what_a_cpu_can_have(
    cpu: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Searches on a CPU stop at their first answer; here one goes on, through real processes."""
    monkeypatch.setattr(SearchRequest, "goes_on", True)
    # However long trials take on a busy machine.
    monkeypatch.setattr(policy, "_LEAST_GAIN", -1.0)
    monkeypatch.setattr(anytime, "_MOST_SECONDS", math.inf)
    asked = SearchRequest(
        tiny_workload("gpt2-tiny"), cpu, effective_batch=8, batch_multiple=8, study="levers", precisions=("fp32",),
        gradient_checkpointing="off", torch_compile="off", tolerance=0.001, measure_baseline=False,
    )  # fmt: skip
    observer = RecordingObserver()
    study, report = run_search(asked, str(tmp_path / "studies.db"), observer)
    assert study.state == "finished"
    with_levers = [trial for trial in report.trials if levers_of(trial.candidate.arm, LATE)]
    assert {name for trial in with_levers for name in levers_of(trial.candidate.arm, LATE)} >= {"fused_loss"}
    assert all(isinstance(trial.outcome, Completed) for trial in with_levers)
    assert any(note.startswith("a fused loss gave ") for note in observer.notes)
