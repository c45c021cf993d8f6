"""What ``autotune.training`` changes in a ``Trainer``: its speed and memory, and nothing else."""

import copy
import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_graphs import EmulatedGraph, emulate
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForSpeechSeq2Seq,
    Trainer,
    TrainingArguments,
    masking_utils,
    modeling_utils,
)
from transformers.utils import import_utils

from autotune.core.candidate import Arm, Candidate
from autotune.core.look import difference
from autotune.space.levers import EXPERTS
from autotune.space.training_arguments import training_arguments
from autotune.training import SettingUnavailableError, apply
from autotune.training import layers as layers_module
from autotune.training import loss as loss_module
from autotune.training.batches import stock_settings
from autotune.training.graphs import EAGER_MICRO_STEPS, GraphedSteps, check_code, retry_evaluation_without_graphs
from autotune.training.layers import checkpoint_layers
from autotune.training.loss import linear_cross_entropy
from autotune.training.sparse import positions_to_compute, with_positions
from autotune.worker.private.transformers import checkpointing_layers
from autotune.worker.trial.look import first_step

VOCABULARY = 200
COMPILED = {"torch_compile": True, "torch_compile_backend": "eager"}
CHECKPOINTED = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}


def language_model(**changes: Any) -> Any:
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model("llama", **sizes, intermediate_size=64, vocab_size=VOCABULARY, **changes)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def classifier() -> Any:
    """Return a small BERT, which has dropout."""
    config = AutoConfig.for_model(
        "bert", hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=VOCABULARY
    )
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(config)


def calm_classifier() -> Any:
    """Return a small BERT without dropout."""
    model = classifier()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.config.attention_probs_dropout_prob = 0.0
    return model


def encoder_decoder() -> Any:
    """Return a small T5, without dropout: torch's ``eager`` backend draws it anew where it recomputes (2.13)."""
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 3, "num_heads": 2, "dropout_rate": 0.0}
    config = AutoConfig.for_model("t5", **sizes, vocab_size=VOCABULARY, decoder_start_token_id=0)
    torch.manual_seed(0)
    return AutoModelForSeq2SeqLM.from_config(config)


def samples(tokens: int = 16, count: int = 256, *, classes: bool = False, padded: bool = False) -> list[dict[str, Any]]:
    ids = torch.randint(5, VOCABULARY, (count, tokens), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(tokens, dtype=torch.long)
    mask[tokens - padded :] = 0
    return [
        {"input_ids": row, "attention_mask": mask, "labels": torch.tensor(i % 2) if classes else row}
        for i, row in enumerate(ids)
    ]


def source_and_target() -> list[dict[str, Any]]:
    return [{"input_ids": row["input_ids"], "labels": row["labels"]} for row in samples()]


def trainer_of(model: Any, data: Any, folder: Path, eval_dataset: Any = None, **arguments: Any) -> Trainer:
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 4, "max_steps": 5, "learning_rate": 1e-3, "save_strategy": "no", **arguments
    }  # fmt: skip
    return Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder), use_cpu=True, report_to="none", logging_steps=1, disable_tqdm=True,
            **settings,
        ),
        train_dataset=data,
        eval_dataset=eval_dataset,
    )  # fmt: skip


def train(trainer: Trainer) -> tuple[list[float], torch.Tensor]:
    """Train; return the losses and all weights."""
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def stock_and_another(
    make: Callable[[], Any], data: Any, folder: Path, eval_dataset: Any = None, **settings: Any
) -> tuple[tuple[list[float], torch.Tensor], Trainer]:
    """What a stock trainer's training comes to, and another trainer that is alike."""
    stock = train(trainer_of(make(), data, folder, eval_dataset, **settings))
    return stock, trainer_of(make(), data, folder, eval_dataset, **settings)


def check_same(found: Any, stock: Any, rel: float = 0.0, atol: float = 0.0) -> None:
    """Compare losses and weights."""
    assert found[0] == pytest.approx(stock[0], rel=rel, abs=0.0)
    assert torch.allclose(found[1], stock[1], rtol=1e-5 if atol else 0.0, atol=atol)


def begin_counting_compilations() -> None:
    """Have ``torch._dynamo.utils.counters`` count what is compiled from here on."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def graphed(trainer: Trainer) -> GraphedSteps:
    """Have a trainer use graphs; its steps."""
    trainer.training_step = steps = GraphedSteps(trainer)
    return steps


class TestGraphs:
    """The logic of captured micro-steps, on emulated graphs; ``tests/gpu`` has real ones."""

    @pytest.fixture(autouse=True)
    def emulated(self, monkeypatch: pytest.MonkeyPatch) -> None:
        emulate(monkeypatch)

    @pytest.mark.parametrize("accumulation", [1, 2, 4])
    def test_the_training_is_the_same(self, accumulation: int, tmp_path: Path) -> None:
        data, settings = samples(classes=True), {"gradient_accumulation_steps": accumulation, "max_steps": 8}
        stock, trainer = stock_and_another(classifier, data, tmp_path, **settings)
        steps = graphed(trainer)
        ran: list[str] = []
        trainer.model.register_forward_pre_hook(lambda *_: ran.append("Python"))
        steps.on_replay = lambda: ran.append("graph")
        check_same(train(trainer), stock)
        # Each graph's micro-step ran twice, for comparison.
        assert len(ran) == 8 * accumulation + (1 if accumulation == 1 else 2)
        assert steps.replays >= 8 * accumulation - EAGER_MICRO_STEPS - accumulation

    def test_a_look_sees_the_step_that_is_replayed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        steps: list[GraphedSteps] = []

        def use(trainer: Any) -> None:
            """As on a GPU, where no device is asked for."""
            graphed(trainer)
            steps.append(trainer.training_step)

        monkeypatch.setattr("autotune.training.use_cuda_graphs", use)
        split = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
        asked, replayed = (
            first_step(trainer_of(classifier(), samples(classes=True), tmp_path, **split), 4, settings)
            for settings in ({}, {"cuda_graphs": True})
        )
        assert steps[0].replays == 2
        assert difference(asked, replayed) is None

    @pytest.mark.parametrize("build", [calm_classifier, language_model])
    def test_what_a_capture_runs_has_run_before(
        self, build: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nothing is compiled meanwhile. transformers leaves out a mask of ones, except while a stream is captured."""
        attention, ran = functional.scaled_dot_product_attention, list[tuple[bool, bool]]()

        def attend(*args: Any, attn_mask: Any = None, **others: Any) -> torch.Tensor:
            ran.append((torch.cuda.is_current_stream_capturing(), attn_mask is None))
            return attention(*args, attn_mask=attn_mask, **others)

        monkeypatch.setattr(functional, "scaled_dot_product_attention", attend)
        data, settings = samples(classes=build is calm_classifier), {"max_steps": 8}
        trainer = trainer_of(build(), data, tmp_path, **settings)
        steps = graphed(trainer)
        train(trainer)
        assert steps.replays > 3
        at = ran.index((True, False))
        assert (False, False) in ran[:at]

    def test_batches_of_several_lengths_share_their_gradients(self, tmp_path: Path) -> None:
        data = [row for length in (16, 8) * 16 for row in samples(length, classes=True)[:4]] * 4
        settings = {"gradient_accumulation_steps": 2, "max_steps": 12, "train_sampling_strategy": "sequential"}
        stock, trainer = stock_and_another(classifier, data, tmp_path, **settings)
        steps = graphed(trainer)
        # The second length adds to zeroed gradients, where stock training begins with its own.
        check_same(train(trainer), stock, 1e-5, 1e-6)
        assert steps.replays > 8

    @pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.whole), 3])
    def test_the_largest_shape_is_captured_before_the_others(self, accumulation: int, tmp_path: Path) -> None:
        """A shape that has no graph yet, too, adds to gradients where graphs do."""
        lengths = (8, 12, 8, 16, 12, 8, 12, 16) * 8
        data = [row for length in lengths for row in samples(length, classes=True)[:4]]
        settings = {
            "gradient_accumulation_steps": accumulation, "max_steps": len(lengths) // accumulation,
            "train_sampling_strategy": "sequential",
        }  # fmt: skip
        stock, trainer = stock_and_another(classifier, data, tmp_path, **settings)
        steps = graphed(trainer)
        check_same(train(trainer), stock, 1e-5, 2e-5)
        largest, *others = sorted(steps._shapes.values(), key=lambda shape: -shape.elements)
        assert largest.writing is not None
        assert all(shape.adding is not None and shape.writing is None for shape in others)

    @pytest.mark.parametrize("accumulation", [1, pytest.param(3, marks=pytest.mark.whole)])
    def test_graphs_are_captured_anew_before_they_write_over_what_an_eager_step_keeps(
        self, accumulation: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each eager micro-step with 8 tokens keeps a kilobyte."""
        data = [row for length in (16,) * 12 + (8, 16) * 12 for row in samples(length, classes=True)[:4]]
        settings = {
            "gradient_accumulation_steps": accumulation, "max_steps": 36 // accumulation,
            "train_sampling_strategy": "sequential",
        }  # fmt: skip
        stock, trainer = stock_and_another(classifier, data, tmp_path, **settings)
        steps = graphed(trainer)
        kept, ran = [0], []

        def keep(_: Any, args: Any, named: Any) -> None:
            kept[0] += 1024 * (named["input_ids"].shape[1] == 8)
            ran.append(named["input_ids"].shape[1])

        trainer.model.register_forward_pre_hook(keep, with_kwargs=True)
        steps.on_replay = lambda: ran.append("graph")
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: kept[0])
        check_same(train(trainer), stock, 1e-5, 2e-5)
        # None of the rest of its optimizer step; with a single micro-step, the next captures.
        first = ran.index(8)
        assert ran[first - 1] == "graph"
        assert "graph" not in ran[first : first + accumulation]
        assert steps.replays > 15

    def test_inputs_are_prepared_once(self, tmp_path: Path) -> None:
        class Halving(Trainer):
            def _prepare_inputs(self, inputs: Any) -> Any:
                return super()._prepare_inputs({**inputs, "input_ids": inputs["input_ids"] // 2})

        def trainer() -> Trainer:
            made = trainer_of(classifier(), samples(classes=True), tmp_path)
            made.__class__ = Halving
            return made

        losses, _ = train(trainer())
        halving = trainer()
        steps = graphed(halving)
        assert train(halving)[0] == losses
        assert steps.replays > 0

    def test_code_of_ones_own_within_a_step_is_refused(self, tmp_path: Path) -> None:
        def of(change: Callable[[Any], Any]) -> Trainer:
            trainer = trainer_of(classifier(), samples(classes=True), tmp_path)
            change(trainer)
            return trainer

        check_code(of(lambda trainer: None))
        for change, words in (
            (lambda trainer: vars(trainer).update(compute_loss=trainer.compute_loss), r"Trainer\.compute_loss is your"),
            (lambda trainer: vars(trainer).update(compute_loss_func=lambda *_: 0), "has a compute_loss_func"),
        ):
            with pytest.raises(SettingUnavailableError, match=words):
                check_code(of(change))

    def test_a_model_that_draws_random_numbers_on_the_host_is_refused(self, tmp_path: Path) -> None:
        trainer = trainer_of(classifier(), samples(classes=True), tmp_path)
        trainer.model.register_forward_pre_hook(lambda *_: random.random() and None)
        graphed(trainer)
        with pytest.raises(SettingUnavailableError, match="draws random numbers on the host"):
            trainer.train()

    def test_metrics_of_each_batch_are_told_of_it_once(self, tmp_path: Path) -> None:
        told: list[int] = []

        def count(predicted: Any, compute_result: bool = False) -> dict[str, float]:
            told.append(len(predicted.label_ids))
            return {}

        data = samples(classes=True)
        trainer = trainer_of(classifier(), data, tmp_path, data[:16], batch_eval_metrics=True)
        trainer.compute_metrics = count
        steps = GraphedSteps(trainer)
        retry_evaluation_without_graphs(trainer, steps)
        predict = trainer.prediction_step

        def predicts(*args: Any, **kwargs: Any) -> Any:
            if len(told) == 1 and any(shape.writing for shape in steps._shapes.values()):
                raise torch.OutOfMemoryError("CUDA out of memory")
            return predict(*args, **kwargs)

        trainer.training_step, trainer.prediction_step = steps, predicts
        trainer.train()
        trainer.evaluate()
        assert told == [8, 8]

    def test_an_evaluation_gets_the_memory_of_graphs(self, tmp_path: Path) -> None:
        data = samples(classes=True)
        settings = {"gradient_accumulation_steps": 2, "max_steps": 12, "eval_strategy": "steps", "eval_steps": 5}
        stock, trainer = stock_and_another(classifier, data, tmp_path, data[:8], **settings)
        steps = graphed(trainer)
        retry_evaluation_without_graphs(trainer, steps)
        ran_out = []
        predict = trainer.prediction_step

        def predict_in_little_memory(*args: Any, **kwargs: Any) -> Any:
            if any(shape.writing for shape in steps._shapes.values()):
                ran_out.append(steps.replays)
                raise torch.OutOfMemoryError("CUDA out of memory")
            return predict(*args, **kwargs)

        trainer.prediction_step = predict_in_little_memory
        check_same(train(trainer), stock)
        # Captured again after the first evaluation, and released for the second.
        assert len(ran_out) >= 2
        assert ran_out[-1] > ran_out[0]

    def test_an_evaluation_that_needs_more_than_that_is_not_repeated(self, tmp_path: Path) -> None:
        data, calls = samples(classes=True), []
        trainer = trainer_of(classifier(), data, tmp_path, data[:8])
        retry_evaluation_without_graphs(trainer, GraphedSteps(trainer))

        def runs_out(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            raise torch.OutOfMemoryError("CUDA out of memory")

        trainer.prediction_step = runs_out
        with pytest.raises(torch.OutOfMemoryError):
            trainer.evaluate()
        assert len(calls) == 1

    def test_a_graph_that_computes_something_else_is_not_used(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def replay(graph: EmulatedGraph) -> None:
            last = graph.operations[-1][-1]
            for output in last:
                output.fill_(7.0)

        monkeypatch.setattr(EmulatedGraph, "replay", replay)
        trainer = trainer_of(classifier(), samples(classes=True), tmp_path)
        graphed(trainer)
        with pytest.raises(SettingUnavailableError, match="BertForSequenceClassification in a CUDA graph differ from"):
            trainer.train()

    def test_a_model_that_looks_at_values_is_named(self, tmp_path: Path) -> None:
        trainer = trainer_of(classifier(), samples(classes=True), tmp_path)
        steps = GraphedSteps(trainer)
        stock = trainer.training_step

        calls: list[int] = []

        def looks(*args: Any) -> torch.Tensor:
            calls.append(1)
            # One more for comparison.
            if len(calls) > EAGER_MICRO_STEPS + 1:
                # What CUDA raises where a captured stream is waited for.
                raise RuntimeError("operation not permitted when stream is capturing")
            return stock(*args)

        steps._eager = looks
        trainer.training_step = steps
        with pytest.raises(
            SettingUnavailableError, match=r"BertForSequenceClassification cannot be captured.*capturing"
        ):
            trainer.train()

    @pytest.mark.parametrize("number", [EAGER_MICRO_STEPS + 1, EAGER_MICRO_STEPS + 2], ids=["before", "captured"])
    def test_a_batch_that_memory_is_too_little_for_is_no_fault_of_graphs(self, number: int, tmp_path: Path) -> None:
        trainer = trainer_of(classifier(), samples(classes=True), tmp_path)
        steps = GraphedSteps(trainer)
        stock, calls = trainer.training_step, iter(range(1, number + 1))

        def runs_out(*args: Any) -> torch.Tensor:
            if next(calls) == number:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return stock(*args)

        steps._eager = runs_out
        trainer.training_step = steps
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
            trainer.train()

    def test_checkpoints_are_captured_where_no_random_numbers_are_drawn(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # A mask of ones is explicit in graphs, and attention with it rounds otherwise.
        monkeypatch.setattr(import_utils, "is_cuda_stream_capturing", lambda: True)
        settings = {"gradient_checkpointing": True, "max_steps": 8}
        stock, trainer = stock_and_another(language_model, samples(), tmp_path, **settings)
        steps = graphed(trainer)
        check_same(train(trainer), stock)
        assert steps.replays
        for layer in trainer.model.model.layers:
            assert layer._gradient_checkpointing_func.keywords["preserve_rng_state"] is False
        trainer = trainer_of(classifier(), samples(classes=True), tmp_path, **settings)
        graphed(trainer)
        with pytest.raises(SettingUnavailableError, match="draws random numbers, as dropout does, and its checkpoints"):
            trainer.train()


def test_uncached_casts_change_no_number(tmp_path: Path) -> None:
    data, settings = samples(), {"bf16": True, "gradient_checkpointing": True, "gradient_accumulation_steps": 2}
    stock = train(trainer_of(language_model(), data, tmp_path, **settings))
    uncached = apply(trainer_of(language_model(), data, tmp_path, **settings), uncached_casts=True)
    caches: list[bool] = []
    layer = uncached.model.get_output_embeddings()
    layer.register_forward_pre_hook(lambda *_: caches.append(torch.is_autocast_cache_enabled()))
    losses, weights = train(uncached)
    assert caches
    assert not any(caches)
    assert losses == stock[0]
    assert torch.equal(weights, stock[1])


class TestGraphsRefused:
    def test_without_a_gpu(self, tmp_path: Path) -> None:
        with pytest.raises(SettingUnavailableError, match="need a CUDA device; the training is on cpu"):
            apply(trainer_of(classifier(), samples(classes=True), tmp_path), cuda_graphs=True)


class TestFusedLoss:
    @pytest.mark.parametrize("accumulation", [1, 2])
    def test_the_training_is_the_same(self, accumulation: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        # Several pieces, the last one smaller.
        monkeypatch.setattr(loss_module, "_LOGITS_AT_ONCE", VOCABULARY * 9)
        data, settings = samples(), {"gradient_accumulation_steps": accumulation}
        stock = train(trainer_of(language_model(), data, tmp_path, **settings))
        fused = apply(trainer_of(language_model(), data, tmp_path, **settings), fused_loss=True)
        losses, weights = train(fused)
        assert losses == pytest.approx(stock[0], rel=1e-6)
        # Adam takes a step of full size also where a gradient is all rounding.
        assert torch.linalg.vector_norm(weights - stock[1]) <= 1e-3 * torch.linalg.vector_norm(stock[1])

    def test_an_evaluation_without_metrics_computes_the_same_loss_without_logits(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stock = trainer_of(language_model(), samples(), tmp_path).evaluate(samples(count=8))
        trainer = apply(trainer_of(language_model(), samples(), tmp_path), fused_loss=True)
        made: list[torch.Size] = []
        layer: Any = trainer.model.get_output_embeddings()
        forward = layer.forward
        monkeypatch.setattr(layer, "forward", lambda hidden: made.append((out := forward(hidden)).shape) or out)
        assert trainer.evaluate(samples(count=8))["eval_loss"] == pytest.approx(stock["eval_loss"], rel=1e-6)
        assert made
        assert all(shape[-1] == 32 for shape in made)

    def test_evaluation_still_has_logits(self, tmp_path: Path) -> None:
        trainer = apply(trainer_of(language_model(), samples(), tmp_path), fused_loss=True)
        predicted = trainer.predict(samples(count=4))
        assert predicted.predictions.shape == (4, 16, VOCABULARY)

    def test_no_tensor_has_a_number_for_each_token_and_word(self) -> None:
        made: list[int] = []

        class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                result = function(*args, **(kwargs or {}))
                made.extend(t.numel() for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor))
                return result

        hidden = torch.randn(64, 8, requires_grad=True)
        weight = torch.randn(VOCABULARY, 8, requires_grad=True)
        with pytest.MonkeyPatch.context() as patch, Sizes():
            patch.setattr(loss_module, "_LOGITS_AT_ONCE", VOCABULARY * 4)
            linear_cross_entropy(hidden, weight, None, torch.randint(0, VOCABULARY, (64,))).backward()
        assert max(made) <= max(VOCABULARY * 8, VOCABULARY * 4)

    @pytest.mark.parametrize("piece", ["whole", "in parts", pytest.param("compiled", marks=pytest.mark.whole)])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_gradients_with_labels_that_do_not_count_and_a_bias(
        self, dtype: torch.dtype, piece: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if piece == "in parts":
            monkeypatch.setattr(loss_module, "_PARTED_FROM", 1)
        piece = torch.compile(loss_module._piece) if piece == "compiled" else loss_module._piece
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(30, 8, generator=generator)
        weight, bias = torch.randn(VOCABULARY, 8, generator=generator), torch.randn(VOCABULARY, generator=generator)
        labels = torch.randint(0, VOCABULARY, (30,), generator=generator)
        labels[::3] = -100
        ours = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
        plain = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
        with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
            logits = functional.linear(*plain)
            stock = functional.cross_entropy(logits.float(), labels)
            fused = linear_cross_entropy(ours[0], ours[1], ours[2], labels, piece=piece)
        (stock * 3).backward()
        (fused * 3).backward()
        tolerance = 1e-5 if dtype is torch.float32 else 1e-2
        assert fused.item() == pytest.approx(stock.item(), rel=tolerance)
        for one, other in zip(ours, plain, strict=True):
            assert torch.linalg.vector_norm(one.grad - other.grad) <= tolerance * torch.linalg.vector_norm(other.grad)

    def test_gradients_in_float16_are_scaled_before_they_are_rounded(self) -> None:
        """Most probabilities over the number of an optimizer step's tokens are below the smallest number of float16."""
        generator, count = torch.Generator().manual_seed(0), 2**20
        hidden, weight = (torch.randn(rows, 8, generator=generator) for rows in (64, VOCABULARY))
        labels = torch.randint(0, VOCABULARY, (64,), generator=generator)
        ours, plain = ([t.clone().requires_grad_() for t in (hidden, weight)] for _ in range(2))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)
        with torch.autocast("cpu", torch.float16):
            stock = functional.cross_entropy(functional.linear(*plain).float(), labels, reduction="sum") / count
            fused = linear_cross_entropy(*ours, None, labels, count, loss_scale=scaler.scale(torch.ones(())))
        for loss in (stock, fused):
            scaler.scale(loss).backward()
        for one, other in zip(ours, plain, strict=True):
            assert torch.linalg.vector_norm(one.grad - other.grad) <= 1e-2 * torch.linalg.vector_norm(other.grad)

    @pytest.mark.parametrize("count", [None, 0])
    def test_where_no_label_counts_gradients_are_zero_as_torchs_are(self, count: int | None) -> None:
        hidden, weight = torch.randn(6, 8, requires_grad=True), torch.randn(VOCABULARY, 8, requires_grad=True)
        loss = linear_cross_entropy(hidden, weight, None, torch.full((6,), -100), count)
        loss.backward()
        assert torch.isnan(loss)
        assert not hidden.grad.any()
        assert not weight.grad.any()

    def test_a_model_that_is_trained_again_is_fused_again(self, tmp_path: Path) -> None:
        model = language_model()
        for _ in range(2):
            trainer = apply(trainer_of(model, samples(), tmp_path, max_steps=1), fused_loss=True)
            losses, _ = train(trainer)
            assert losses[0] > 0

    def test_a_model_that_is_made_when_training_starts_is_refused(self, tmp_path: Path) -> None:
        arguments = trainer_of(language_model(), [], tmp_path).args
        trainer = Trainer(model_init=lambda: language_model(), args=arguments, train_dataset=samples())
        with pytest.raises(SettingUnavailableError, match="model_init"):
            apply(trainer, fused_loss=True)

    def test_a_frozen_output_layer_gets_no_gradient(self) -> None:
        hidden, weight = torch.randn(6, 8, requires_grad=True), torch.randn(VOCABULARY, 8)
        linear_cross_entropy(hidden, weight, None, torch.arange(6)).backward()
        assert hidden.grad is not None
        assert weight.grad is None

    def test_a_model_without_such_a_loss_is_refused(self, tmp_path: Path) -> None:
        trainer = trainer_of(classifier(), samples(classes=True), tmp_path)
        with pytest.raises(SettingUnavailableError, match="the output layer of BertForSequenceClassification is"):
            apply(trainer, fused_loss=True)

    @pytest.mark.parametrize(
        ("kind", "changes", "words"),
        [
            ("gemma2", {"head_dim": 8}, "changed or read after the output layer"),
            ("recurrent_gemma", {"logits_soft_cap": 2.0}, "changed or read after the output layer"),
            ("bart", {"d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 64},
             "cannot be tried on a few tokens"),
        ],
    )  # fmt: skip
    def test_changed_logits_are_refused_and_the_model_is_left_as_it_was(
        self, kind: str, changes: dict[str, Any], words: str, tmp_path: Path
    ) -> None:
        sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
        config = AutoConfig.for_model(
            kind, **(sizes if kind != "bart" else {}), vocab_size=VOCABULARY, pad_token_id=0, **changes
        )
        trainer = trainer_of(AutoModelForCausalLM.from_config(config), samples(), tmp_path, max_steps=1)
        with pytest.raises(SettingUnavailableError, match=words):
            apply(trainer, fused_loss=True)
        batch = {name: value[None] for name, value in samples()[0].items()}
        assert trainer.model(**batch).logits.shape == (1, 16, VOCABULARY)

    def test_a_scale_of_the_logits_is_one_of_the_hidden_states(self, tmp_path: Path) -> None:
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
        config = AutoConfig.for_model("granite", **sizes, vocab_size=VOCABULARY, pad_token_id=0, logits_scaling=0.25)
        losses = []
        for settings in ({}, {"fused_loss": True}):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config)
            losses.append(train(apply(trainer_of(model, samples(), tmp_path), **settings))[0])
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)

    def test_a_loss_that_may_read_logits_is_refused(self, tmp_path: Path) -> None:
        class Reading(Trainer):
            def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
                return super().compute_loss(*args, **kwargs)

        trainer = trainer_of(language_model(), samples(), tmp_path)
        trainer.__class__ = Reading
        with pytest.raises(SettingUnavailableError, match=r"Reading\.compute_loss is your own"):
            apply(trainer, fused_loss=True)

    def test_a_model_that_was_trained_gives_logits_in_any_mode(self, tmp_path: Path) -> None:
        trainer = apply(trainer_of(language_model(), samples(), tmp_path, max_steps=1), fused_loss=True)
        trainer.train()
        ids = torch.arange(4)[None]
        trained = copy.deepcopy(trainer.model).train()
        assert trained(input_ids=ids, labels=ids).logits.shape == (1, 4, VOCABULARY)
        assert trainer.model.train()(ids).logits.shape == (1, 4, VOCABULARY)


MASKED = {
    "bert": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64},
    "roberta": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64},
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64},
    "modernbert": {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2,
    },
}  # fmt: skip


def masked_model(kind: str = "bert") -> Any:
    torch.manual_seed(0)
    return AutoModelForMaskedLM.from_config(AutoConfig.for_model(kind, vocab_size=VOCABULARY, **MASKED[kind]))


def masked_samples(count: int = 256) -> list[dict[str, Any]]:
    """Return samples of which every sixth token or so is predicted."""
    draw = torch.Generator().manual_seed(2)
    rows = samples(count=count)
    return [row | {"labels": row["labels"].where(torch.rand(16, generator=draw) < 0.15, -100)} for row in rows]


class TestDivision:
    """Whether the loss is divided by the accumulation."""

    def test_a_loss_that_nobody_divides_is_divided(self, tmp_path: Path) -> None:
        data = samples(classes=True)
        stock = trainer_of(calm_classifier(), data, tmp_path, per_device_train_batch_size=8)
        whole = train(stock)
        split = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
        undivided = train(trainer_of(calm_classifier(), data, tmp_path, **split))
        trainer = apply(trainer_of(calm_classifier(), data, tmp_path, **split))
        losses, weights = train(trainer)
        # Adam hides what the gradients are multiplied by.
        norms = [each.state.log_history[0]["grad_norm"] for each in (trainer, stock)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-4)
        assert undivided[0][0] == pytest.approx(4 * whole[0][0], rel=1e-5)
        assert losses == pytest.approx(whole[0], rel=1e-5)
        assert torch.allclose(weights, whole[1], atol=1e-4)
        assert trainer.model_accepts_loss_kwargs is False

    def test_settings_may_be_applied_one_after_the_other(self, tmp_path: Path) -> None:
        """What looks at the first loss is no ``compute_loss`` of the user's own."""
        trainer = trainer_of(language_model(), samples(), tmp_path, gradient_accumulation_steps=2)
        for settings in ({}, {"fused_loss": True}, {"length_multiple": 8}):
            apply(trainer, **settings)
        train(trainer)
        assert "compute_loss" not in vars(trainer)

    def test_a_loss_that_the_model_divides_stays(self, tmp_path: Path) -> None:
        split = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
        stock = train(trainer_of(language_model(), samples(), tmp_path, **split))
        trainer = apply(trainer_of(language_model(), samples(), tmp_path, **split))
        losses, weights = train(trainer)
        assert losses == pytest.approx(stock[0], rel=1e-6)
        assert torch.equal(weights, stock[1])
        assert trainer.model_accepts_loss_kwargs is True


class TestSparsePrediction:
    @pytest.mark.parametrize("kind", MASKED)
    def test_the_training_is_the_same(self, kind: str, tmp_path: Path) -> None:
        data, settings = masked_samples(), {"gradient_accumulation_steps": 2}
        stock = train(apply(trainer_of(masked_model(kind), data, tmp_path, **settings)))
        trainer = apply(trainer_of(masked_model(kind), data, tmp_path, **settings), sparse_prediction=True)
        layer, rows = trainer.model.get_output_embeddings(), list[int]()
        layer.register_forward_pre_hook(lambda _, inputs: rows.append(inputs[0].shape[-2]))
        check_same(train(trainer), stock, 1e-6, 1e-6)
        # 64 tokens, of which 10 are predicted in the mean; other shapes than multiples of 4 would be many.
        assert len(rows) == 10
        assert all(4 <= count <= 20 and count % 4 == 0 for count in rows)

    def test_layers_are_compiled_for_the_training_alone(self, tmp_path: Path) -> None:
        trainer = trainer_of(masked_model(), masked_samples(), tmp_path, **COMPILED, max_steps=2)
        begin_counting_compilations()
        apply(trainer, sparse_prediction=True, regional_compilation=True)
        assert not torch._dynamo.utils.counters["stats"]["unique_graphs"]
        trainer.train()
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1

    def test_evaluation_still_has_all_logits(self, tmp_path: Path) -> None:
        stock = trainer_of(masked_model(), masked_samples(), tmp_path).predict(masked_samples(8))
        trainer = apply(trainer_of(masked_model(), masked_samples(), tmp_path), sparse_prediction=True)
        predicted = trainer.predict(masked_samples(8))
        assert predicted.predictions.shape == (8, 16, VOCABULARY)
        without_labels = [{"input_ids": row["input_ids"]} for row in masked_samples(8)]
        assert trainer.predict(without_labels).predictions.shape == (8, 16, VOCABULARY)
        assert predicted.metrics["test_loss"] == pytest.approx(stock.metrics["test_loss"], rel=1e-6)

    def test_a_batch_has_as_many_positions_as_the_next_sixteenth_of_its_tokens(self) -> None:
        labels = torch.full((2, 32), -100)
        labels[0, 3] = labels[1, 30] = 7
        batch = with_positions({"input_ids": labels, "labels": labels})
        assert batch["predicted_positions"].tolist() == [3, 62, 0, 1]
        assert [positions_to_compute(64, count) for count in (0, 1, 4, 5, 64)] == [4, 4, 4, 8, 64]

    def test_other_models_and_batches_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(SettingUnavailableError, match="BertForSequenceClassification is no masked language model"):
            apply(trainer_of(classifier(), samples(classes=True), tmp_path), sparse_prediction=True)
        trainer = apply(trainer_of(masked_model(), samples(classes=True), tmp_path), sparse_prediction=True)
        with pytest.raises(SettingUnavailableError, match="a batch has no label for each token"):
            trainer.train()

    def test_batches_that_accelerate_divides_are_refused(self, tmp_path: Path) -> None:
        class Stream(IterableDataset[Any]):
            def __iter__(self) -> Any:
                return iter(masked_samples())

        with pytest.raises(SettingUnavailableError, match="dispatch_batches=False"):
            apply(trainer_of(masked_model(), Stream(), tmp_path), sparse_prediction=True)
        whole = {"accelerator_config": {"dispatch_batches": False}}
        stock = train(trainer_of(masked_model(), Stream(), tmp_path, **whole))
        trainer = apply(trainer_of(masked_model(), Stream(), tmp_path, **whole), sparse_prediction=True)
        assert train(trainer)[0] == pytest.approx(stock[0], rel=1e-6)

    def test_a_copy_computes_with_its_own_weights(self, tmp_path: Path) -> None:
        trainer = trainer_of(masked_model(), masked_samples(), tmp_path, bf16=True, max_steps=1)
        apply(trainer, sparse_prediction=True).train()
        copied = copy.deepcopy(trainer.model)
        for parameter in copied.parameters():
            parameter.data.zero_()
        tokens = torch.arange(8)[None]
        assert not copied(input_ids=tokens).logits.any()
        assert trainer.model(input_ids=tokens).logits.any()

    def test_with_adapters_it_is_the_same(self, tmp_path: Path) -> None:
        peft = pytest.importorskip("peft")

        def adapted() -> Any:
            return peft.get_peft_model(masked_model(), peft.LoraConfig(target_modules=["query"], r=4))

        data = masked_samples()
        stock = train(trainer_of(adapted(), data, tmp_path))
        trainer = apply(trainer_of(adapted(), data, tmp_path), sparse_prediction=True)
        layer, rows = trainer.model.get_output_embeddings(), list[int]()
        layer.register_forward_pre_hook(lambda _, inputs: rows.append(inputs[0].shape[-2]))
        assert train(trainer)[0] == pytest.approx(stock[0], rel=1e-6)
        assert rows
        assert max(rows) <= 20

    def test_a_model_whose_tokens_are_not_computed_alone_is_refused_and_left_as_it_was(self, tmp_path: Path) -> None:
        model = masked_model()
        model.cls.register_forward_pre_hook(lambda _, inputs: (inputs[0] + inputs[0].mean((0, 1)),))
        forward = model.forward
        with pytest.raises(SettingUnavailableError, match="are other ones where only some tokens are predicted"):
            apply(trainer_of(model, masked_samples(), tmp_path), sparse_prediction=True)
        assert model.forward == forward
        assert not model.bert._forward_hooks


class TestUnpadded:
    def test_the_training_is_the_same_and_no_mask_is_passed(self, tmp_path: Path) -> None:
        stock = train(trainer_of(language_model(), samples(), tmp_path))
        trainer = apply(trainer_of(language_model(), samples(), tmp_path), unpadded=True)
        seen: list[set[str]] = []
        trainer.model.register_forward_pre_hook(lambda m, a, k: seen.append(set(k)), with_kwargs=True)
        check_same(train(trainer), stock)
        assert all("attention_mask" not in names for names in seen)

    def test_a_batch_with_padding_keeps_its_mask(self, tmp_path: Path) -> None:
        data = samples(count=4) + samples(count=252, padded=True)
        settings = {"data_seed": 3, "train_sampling_strategy": "sequential"}
        stock = train(trainer_of(language_model(), data, tmp_path, **settings))
        trainer = apply(trainer_of(language_model(), data, tmp_path, **settings), unpadded=True)
        seen: list[bool] = []
        trainer.model.register_forward_pre_hook(lambda m, a, k: seen.append("attention_mask" in k), with_kwargs=True)
        check_same(train(trainer), stock)
        assert seen == [False, True, True, True, True]

    @pytest.mark.parametrize("unpadded", [False, True])
    def test_a_model_that_takes_no_mask_makes_none_while_it_is_captured(
        self, unpadded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = AutoConfig.for_model(
            "whisper", d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, pad_token_id=0,
            decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=VOCABULARY,
            max_source_positions=50, max_target_positions=20, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        )  # fmt: skip
        row = {"input_features": torch.randn(80, 100), "labels": torch.arange(5, 17)}
        trainer = trainer_of(AutoModelForSpeechSeq2Seq.from_config(config), [row] * 8, tmp_path, max_steps=2)
        trainer = apply(trainer, unpadded=unpadded)
        masks: list[Any] = []
        attention = functional.scaled_dot_product_attention

        def attend(*args: Any, attn_mask: Any = None, **others: Any) -> torch.Tensor:
            masks.append(attn_mask)
            return attention(*args, attn_mask=attn_mask, **others)

        monkeypatch.setattr(functional, "scaled_dot_product_attention", attend)
        monkeypatch.setattr(import_utils, "is_cuda_stream_capturing", lambda: True)
        trainer.train()
        assert masks
        assert all(mask is None for mask in masks) == unpadded

    def test_packed_samples_are_looked_for_again_after_the_training(self, tmp_path: Path) -> None:
        asked = masking_utils.find_packed_sequence_indices
        trainer = apply(trainer_of(language_model(), samples(), tmp_path), unpadded=True)
        assert masking_utils.find_packed_sequence_indices is asked
        train(trainer)
        assert masking_utils.find_packed_sequence_indices is asked

    def test_batches_of_a_loader_of_its_own_are_changed_as_well(self, tmp_path: Path) -> None:
        loader = DataLoader(samples(), batch_size=4)  # type: ignore[arg-type]
        trainer = trainer_of(language_model(), samples(), tmp_path)
        trainer.__class__ = type("Own", (type(trainer),), {"get_train_dataloader": lambda self: loader})
        apply(trainer, unpadded=True)
        trainer.get_train_dataloader()
        assert "attention_mask" not in next(iter(trainer.get_train_dataloader()))
        no_loader = trainer_of(language_model(), samples(), tmp_path)
        no_loader.get_train_dataloader = lambda: [1]
        with pytest.raises(SettingUnavailableError, match="the training loader is list, which has no collator"):
            apply(no_loader, unpadded=True).train()

    def test_packed_samples_are_refused(self, tmp_path: Path) -> None:
        asked = masking_utils.find_packed_sequence_indices
        data = [row | {"position_ids": torch.arange(16)} for row in samples()]
        trainer = apply(trainer_of(language_model(), data, tmp_path), unpadded=True)
        with pytest.raises(SettingUnavailableError, match="position_ids, so that its samples may"):
            trainer.train()
        # A training in this process that packs samples depends on it.
        assert masking_utils.find_packed_sequence_indices is asked


class TestCompiledLayers:
    @pytest.mark.parametrize("checkpointing", [pytest.param(False, marks=pytest.mark.whole), True])
    def test_the_training_is_the_same(self, checkpointing: bool, tmp_path: Path) -> None:
        settings = {**CHECKPOINTED, "gradient_checkpointing": checkpointing}
        stock = trainer_of(language_model(), samples(), tmp_path, **settings)
        compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
        trainer = trainer_of(language_model(), samples(), tmp_path, **settings, **compiled)
        losses, weights = train(apply(trainer, regional_compilation=True))
        expected_losses, expected_weights = train(stock)
        assert losses == pytest.approx(expected_losses, rel=1e-5)
        assert torch.allclose(weights, expected_weights, atol=1e-5)
        assert list(trainer.model.state_dict()) == list(stock.model.state_dict())

    @pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.whole)])
    def test_layers_that_are_alike_share_their_code(self, checkpointing: bool, tmp_path: Path) -> None:
        settings = {**CHECKPOINTED, "gradient_checkpointing": checkpointing}
        trainer = trainer_of(encoder_decoder(), source_and_target(), tmp_path, **settings, **COMPILED)
        begin_counting_compilations()
        losses, _ = train(apply(trainer, regional_compilation=True))
        # The first layers of encoder and decoder have a bias that the others take from them.
        assert torch._dynamo.utils.counters["frames"] == {"total": 4, "ok": 4}
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 4
        expected_losses, _ = train(trainer_of(encoder_decoder(), source_and_target(), tmp_path, **settings))
        assert losses == pytest.approx(expected_losses, rel=1e-5)

    def test_one_code_serves_all_lengths_also_where_one_is_another_size(self, tmp_path: Path) -> None:
        """The first batch is as long as a head is wide."""
        model = language_model()
        wide = model.config.hidden_size // model.config.num_attention_heads
        data = [row for length in (wide, 24, 40) for row in samples(length)[:4]]
        settings = {"train_sampling_strategy": "sequential", "max_steps": 3}
        trainer = trainer_of(model, data, tmp_path, **settings, **COMPILED)
        begin_counting_compilations()
        train(apply(trainer, regional_compilation=True, length_multiple=8))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1

    @torch._dynamo.config.patch(error_on_recompile=True)
    def test_nothing_is_compiled_twice_where_lengths_differ_and_accumulate(self, tmp_path: Path) -> None:
        """Of the first micro-step it is asked whether its loss depends on the number of items, by a gradient."""
        data = [row for length in (16, 24, 40) for row in samples(length)[:8]]
        settings = {"train_sampling_strategy": "sequential", "gradient_accumulation_steps": 2, "max_steps": 3}
        trainer = trainer_of(language_model(), data, tmp_path, **settings, **COMPILED)
        torch._dynamo.reset()
        losses, _ = train(apply(trainer, regional_compilation=True, length_multiple=8, fused_loss=True))
        stock, _ = train(trainer_of(language_model(), data, tmp_path, **settings))
        assert losses == pytest.approx(stock, rel=1e-5)

    def test_layers_are_compiled_from_the_first_micro_step_on(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Else a checkpoint around a layer recomputes by compiled code what was not (transformers before 5.23)."""
        model, eager = language_model(), list[torch.Tensor]()
        layer = type(model.model.layers[0])
        forward = layer.forward

        def seen(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                eager.append(hidden_states)
            return forward(self, hidden_states, **kwargs)

        monkeypatch.setattr(layer, "forward", seen)
        settings = {"gradient_accumulation_steps": 2, "max_steps": 1, "torch_compile_backend": "eager"}
        train(apply(trainer_of(model, samples(), tmp_path, **settings), regional_compilation=True))
        assert not eager

    # The limit is torch's own again; to compile for one shape is quicker.
    @torch._dynamo.config.patch(recompile_limit=8, automatic_dynamic_shapes=False)
    def test_evaluations_are_compiled_as_well(self, tmp_path: Path) -> None:
        evaluating = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4, "max_steps": 2}
        data = source_and_target()
        trainer = trainer_of(encoder_decoder(), data, tmp_path, data[:6], **CHECKPOINTED, **evaluating, **COMPILED)
        begin_counting_compilations()
        train(apply(trainer, regional_compilation=True))
        # Of 4 kinds of layer: trained, evaluated, and evaluated with the last batch, which is smaller.
        assert torch._dynamo.utils.counters["frames"] == {"total": 12, "ok": 12}

    def test_its_layers_alone_are_compiled(self, tmp_path: Path) -> None:
        config = AutoConfig.for_model(
            "whisper", d_model=16, encoder_layers=2, decoder_layers=3, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, vocab_size=VOCABULARY, pad_token_id=0,
        )  # fmt: skip
        model = AutoModelForSpeechSeq2Seq.from_config(config)
        trainer = apply(trainer_of(model, [], tmp_path, torch_compile=True), regional_compilation=True)
        layers = [*model.model.encoder.layers, *model.model.decoder.layers]
        assert {module for module in model.modules() if module._compiled_call_impl is not None} == set(layers)
        assert trainer.accelerator.prepare(model) is model

    def test_a_model_that_is_made_when_training_starts_is_compiled(self, tmp_path: Path) -> None:
        arguments = trainer_of(language_model(), [], tmp_path, torch_compile_backend="eager", max_steps=1).args
        trainer = Trainer(model_init=lambda: language_model(), args=arguments, train_dataset=samples())
        apply(trainer, regional_compilation=True)
        first = trainer.model
        trainer.train()
        assert trainer.model is not first
        assert all(layer._compiled_call_impl is not None for layer in trainer.model.model.layers)

    def test_a_model_without_layers_that_repeat_is_refused(self, tmp_path: Path) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        with pytest.raises(SettingUnavailableError, match="Sequential has no layers that repeat"):
            apply(trainer_of(model, [], tmp_path), regional_compilation=True)


class TestPartialCheckpointing:
    @pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
    def test_so_many_layers_evenly_spread(self, count: int) -> None:
        model = language_model()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if count > 4:
            with pytest.raises(ValueError, match=f"{count} of 4 checkpointed layers: name 1 to 4"):
                checkpoint_layers(model, count)
            return
        assert checkpoint_layers(model, count) == 4
        assert sum(layer.gradient_checkpointing for layer in model.model.layers) == count

    def test_what_has_a_flag_within_a_layer_is_none(self) -> None:
        model = encoder_decoder()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        assert checkpoint_layers(model, 2) == 6
        layers = [*model.encoder.block, *model.decoder.block]
        assert [layer.gradient_checkpointing for layer in layers] == [False, False, True] * 2

    @pytest.mark.skipif(not layers_module._TAKES_EVERY, reason="this transformers checkpoints all layers or none")
    @pytest.mark.parametrize("make", [language_model, pytest.param(encoder_decoder, marks=pytest.mark.whole)])
    def test_every_nth_layer_is_left_to_transformers(self, make: Callable[[], Any], tmp_path: Path) -> None:
        """Training with what is told of it, without autotune, recomputes the same layers; what is not is refused."""
        arguments, found = {"activation_checkpointing": True, "learning_rate": 1e-2}, {}
        data = samples() if make is language_model else source_and_target()

        def recomputing(trainer: Trainer) -> tuple[Any, Any]:
            losses = train(trainer)[0]
            return losses, [getattr(part, "gradient_checkpointing", False) for part in trainer.model.modules()]

        for count in range(1, checkpointing_layers(make()) + 1):
            applied = apply(trainer_of(make(), data, tmp_path, **arguments), checkpointed_layers=count)
            as_applied = recomputing(applied)
            if stock := stock_settings(applied):
                found[count] = stock["every_n_layers"]
                plain = trainer_of(make(), data, tmp_path, **arguments, activation_checkpointing_kwargs=stock)
                assert recomputing(plain) == as_applied
        assert found == ({1: 4, 2: 2, 4: 1} if make is language_model else {1: 6, 2: 3, 3: 2, 6: 1})


@pytest.mark.skipif(not hasattr(modeling_utils, "save_on_cpu"), reason="this transformers cannot offload activations")
def test_offloaded_activations_train_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is not pinned here, which a torch for CPUs cannot (2.13)."""
    monkeypatch.setattr(modeling_utils, "save_on_cpu", lambda **_: torch.autograd.graph.save_on_cpu())
    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    losses = []
    for arm in (Arm(gradient_checkpointing=True), Arm(gradient_checkpointing=True, offload_activations=True)):
        arguments = training_arguments(Candidate(arm, 4), fields, "cuda")
        trainer = trainer_of(language_model(), samples(), tmp_path, **arguments)
        losses.append(train(apply(trainer, checkpointed_layers=3))[0])
        kept = trainer.model.model.layers[-1]._gradient_checkpointing_func.func
        assert (kept is torch.utils.checkpoint.checkpoint) is not arm.offload_activations
    assert losses[0] == losses[1]


class TestExperts:
    def trainer(self, folder: Path) -> Trainer:
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        config = AutoConfig.for_model(
            "qwen3_moe", **sizes, intermediate_size=64, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2,
            head_dim=8, vocab_size=VOCABULARY,
        )  # fmt: skip
        torch.manual_seed(0)
        return trainer_of(AutoModelForCausalLM.from_config(config), samples(), folder)

    def test_every_way_trains_the_same(self, tmp_path: Path) -> None:
        stock, weights = train(self.trainer(tmp_path))
        for name in EXPERTS:
            trainer = apply(self.trainer(tmp_path), experts_implementation=name)
            assert trainer.model.config._experts_implementation == name
            losses, found = train(trainer)
            assert losses == pytest.approx(stock, rel=1e-4)
            assert torch.allclose(found, weights, atol=1e-3)

    def test_a_model_without_experts_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(SettingUnavailableError, match="experts of LlamaForCausalLM"):
            apply(trainer_of(language_model(), samples(), tmp_path), experts_implementation="eager")
        with pytest.raises(SettingUnavailableError, match="no experts by something"):
            apply(self.trainer(tmp_path), experts_implementation="something")
