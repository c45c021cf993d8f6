"""CUDA graphs of a real GPU: training is the same as without them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Trainer,
    TrainingArguments,
)

from autotune.training import apply
from autotune.training.possible import obstacles

pytestmark = pytest.mark.gpu


def model_of(kind: str, vocabulary: int = 200, layers: int = 2, width: int = 64, heads: int = 2, **changes: Any) -> Any:
    """Return a small model of a kind, with the same weights each time."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=2 * width,
        vocab_size=vocabulary, **changes,
    )  # fmt: skip
    return (AutoModelForSequenceClassification if kind == "bert" else AutoModelForCausalLM).from_config(config)


def trainer_of(model: Any, data: Any, folder: Path, collate: Any = None, evaluated: Any = None, **fields: Any) -> Any:
    """Return a trainer that reports nothing and saves nothing."""
    quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1}
    arguments = TrainingArguments(output_dir=str(folder), **quiet | fields)
    return Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=evaluated, data_collator=collate)


def logged(trainer: Any, name: str = "loss") -> list[float]:
    """Return what was logged under a name."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Pad texts, of which every token has a label."""

    def stack(fill: int, values: list[torch.Tensor]) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=fill)

    ids = [row["input_ids"] for row in rows]
    mask = stack(0, [torch.ones_like(each) for each in ids])
    return {"input_ids": stack(0, ids), "labels": stack(-100, ids), "attention_mask": mask}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_graphs_train_as_eager_steps_do(accumulation: int, precision: str, tmp_path: Path) -> None:
    data = [{"input_ids": torch.randint(5, 200, (32,)), "labels": torch.tensor(i % 2)} for i in range(512)]

    def train(**levers: Any) -> tuple[list[float], torch.Tensor, int]:
        trainer = trainer_of(
            model_of("bert"), data, tmp_path, per_device_train_batch_size=8, gradient_accumulation_steps=accumulation,
            max_steps=8, bf16=precision == "bf16", fp16=precision == "fp16",
        )  # fmt: skip
        apply(trainer, unpadded=True, **levers).train()
        weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
        return logged(trainer), weights, getattr(trainer.training_step, "replays", 0)

    losses, weights, _ = train()
    again, _, _ = train()
    graphed, of_graphs, replays = train(cuda_graphs=True)
    assert replays > 0
    # Gradients of embeddings are summed by atomic additions, in any order.
    noise = max(abs(one - other) for one, other in zip(losses, again, strict=True))
    assert graphed == pytest.approx(losses, abs=max(10 * noise, 1e-5))
    assert torch.linalg.vector_norm(of_graphs - weights) <= 1e-2 * torch.linalg.vector_norm(weights)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_graphs_recompute_as_eager_steps_do(accumulation: int, compiled: bool, tmp_path: Path) -> None:
    rows = [torch.randint(5, 200, (32 + 16 * (at % 3),)) for at in range(128)]
    data = [{"input_ids": row, "labels": row} for row in rows]

    def train(**levers: Any) -> tuple[list[float], int]:
        trainer = trainer_of(
            model_of("llama", layers=4), data, tmp_path, padded, per_device_train_batch_size=4, max_steps=12, bf16=True,
            gradient_accumulation_steps=accumulation, gradient_checkpointing=True, torch_compile=compiled,
        )  # fmt: skip
        apply(trainer, length_multiple=64, regional_compilation=compiled, **levers).train()
        return logged(trainer), getattr(trainer.training_step, "replays", 0)

    losses, _ = train()
    graphed, replays = train(cuda_graphs=True)
    assert replays > 0
    assert graphed == pytest.approx(losses, rel=2e-3)


def test_an_evaluation_gets_the_memory_of_graphs(tmp_path: Path) -> None:
    ids = torch.randint(5, 32000, (64, 512))
    data = [{"input_ids": row, "labels": row} for row in ids]
    trainer = trainer_of(
        model_of("llama", 32000, 4, 256, 4), data, tmp_path, evaluated=data[:8], per_device_train_batch_size=8,
        per_device_eval_batch_size=8, max_steps=16, bf16=True, eval_strategy="steps", eval_steps=6,
    )  # fmt: skip
    apply(trainer, unpadded=True, cuda_graphs=True)
    evaluate, replays, limited = trainer.evaluation_loop, [], []

    def limit(*args: Any, **kwargs: Any) -> Any:
        # Little more than the graphs hold.
        replays.append(trainer.training_step.replays)
        torch.cuda.empty_cache()
        share = (torch.cuda.memory_reserved() + 2**28) / torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(share)
        limited.append(share)
        try:
            return evaluate(*args, **kwargs)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)

    trainer.evaluation_loop = limit
    trainer.train()
    assert len(limited) >= 2
    assert replays[1] > replays[0] > 0
    assert all("eval_loss" in entry for entry in trainer.state.log_history if "eval_runtime" in entry)


class Keeps(torch.nn.Module):
    """Keeps what it computed for the latest batch of 64 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(64, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1))
        self.keeps, self.kept, self.meant = False, torch.zeros(1), torch.zeros(1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.layer(x)
        if self.keeps and x.shape[1] == 64 and not torch.cuda.is_current_stream_capturing():
            self.kept = out.detach().exp()
            self.meant = self.kept.cpu()
        return {"loss": out.square().mean()}


@pytest.mark.parametrize("keeps", [False, True])
def test_eager_micro_steps_take_the_memory_of_graphs_and_keep_none_that_a_graph_uses(
    keeps: bool, tmp_path: Path
) -> None:
    model, reserved, same = Keeps(), [], []
    shapes = iter([128] * 6 + [64] * 2 + [128, 64, 64, 128] * 6)

    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        return {"x": torch.randn(len(rows), next(shapes), 64)}

    fields = {"per_device_train_batch_size": 512, "max_steps": 30, "logging_steps": 500, "remove_unused_columns": False}
    trainer = trainer_of(model, [{"x": 0}] * 20000, tmp_path, collate, **fields)
    steps = apply(trainer, cuda_graphs=True).training_step

    def step(*given: Any) -> torch.Tensor:
        model.keeps = keeps and steps.replays > 0
        loss = steps(*given)
        torch.cuda.synchronize()
        reserved.append(torch.cuda.memory_reserved())
        same.append(torch.equal(model.kept.cpu(), model.meant))
        return loss

    trainer.training_step = step
    trainer.train()
    assert all(same)
    assert steps.replays > 10
    if not keeps:
        assert reserved[7] == reserved[5], "a smaller shape needs no more"


LENGTHS = {
    "few lengths": ({"length_multiple": 16}, 12),
    "few lengths, compiled": ({"length_multiple": 16, "regional_compilation": True}, 12),
    "rows": ({"padding_free": True, "length_multiple": 256, "fused_loss": True}, 8),
    "rows, compiled": (
        {"padding_free": True, "length_multiple": 256, "fused_loss": True, "regional_compilation": True},
        8,
    ),
}


@pytest.mark.parametrize(("levers", "shapes"), LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("accumulation", [1, 4])
def test_texts_of_different_lengths_train_in_graphs_as_they_do_padded(
    accumulation: int, levers: dict[str, Any], shapes: int, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(8, 193, (1024,), generator=generator).tolist()
    data = [{"input_ids": torch.randint(5, 1000, (tokens,), generator=generator)} for tokens in lengths]

    def train(**settings: Any) -> tuple[list[float], list[float], Any]:
        compiled = {"torch_compile": True} if settings.get("regional_compilation") else {}
        trainer = trainer_of(
            model_of("qwen2", 1000, 4, 128, 4, num_key_value_heads=2), data, tmp_path, padded, data[:32],
            per_device_train_batch_size=8, gradient_accumulation_steps=accumulation, max_steps=60 // accumulation,
            eval_strategy="steps", eval_steps=10, bf16=True, remove_unused_columns=False, **compiled,
        )  # fmt: skip
        apply(trainer, **settings).train()
        return logged(trainer), logged(trainer, "eval_loss"), trainer

    losses, evaluated, _ = train()
    again, evaluated_again, trainer = train(**levers, cuda_graphs=True)
    assert again == pytest.approx(losses, rel=2e-2)
    assert evaluated_again == pytest.approx(evaluated, rel=2e-2)
    captured = [shape for shape in trainer.training_step._shapes.values() if shape.writing or shape.adding]
    assert 1 < len(captured) <= shapes
    assert trainer.training_step.replays > 10


def test_a_causal_model_on_a_gpu_can_have_rows_and_few_lengths(tmp_path: Path) -> None:
    """Its loader has put the batches on the GPU; the settings change them before that."""
    data = [{"input_ids": torch.randint(5, 200, (8 + 7 * i % 50,))} for i in range(64)]
    trainer = trainer_of(model_of("llama"), data, tmp_path, padded, per_device_train_batch_size=4, bf16=True)
    batches = [batch for batch, _ in zip(trainer.get_train_dataloader(), range(3), strict=False)]
    assert batches[0]["input_ids"].is_cuda
    assert not {"padding_free", "length_multiple", "fused_loss"} & obstacles(trainer, batches).keys()
