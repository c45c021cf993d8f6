"""FP8 by torchao, which emulates it on a CPU; ``make test-clients`` installs it."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

from autotune.training import SettingUnavailableError, apply
from autotune.training.layers import multiply_in_float8

pytestmark = pytest.mark.clients

pytest.importorskip("torchao.float8")


def trainer_of(folder: Path) -> Trainer:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **sizes, intermediate_size=64, vocab_size=100)
    rows = torch.randint(5, 100, (64, 16), generator=torch.Generator().manual_seed(1))
    arguments = TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to="none", save_strategy="no", logging_steps=1, disable_tqdm=True,
        max_steps=10, per_device_train_batch_size=8, learning_rate=1e-2, bf16=True, seed=3,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in rows]
    return Trainer(model=AutoModelForCausalLM.from_config(config), args=arguments, train_dataset=data)


def losses_of(trainer: Trainer) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_a_model_trains_alike_with_its_layers_in_float8(tmp_path: Path) -> None:
    stock, trainer = trainer_of(tmp_path), trainer_of(tmp_path)
    multiply_in_float8(trainer, emulate=True)
    kinds = {name: type(module) for name, module in trainer.model.named_modules()}
    assert kinds["model.layers.0.mlp.up_proj"].__name__ == "Float8Linear"
    assert kinds["lm_head"] is torch.nn.Linear
    expected, losses = losses_of(stock), losses_of(trainer)
    assert losses != expected
    assert losses == pytest.approx(expected, rel=0.05)
    assert list(trainer.model.state_dict()) == list(stock.model.state_dict())


def test_a_device_without_its_units_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingUnavailableError, match="cpu has no FP8 units"):
        apply(trainer_of(tmp_path), float8=True)
