"""Test the private names of transformers, accelerate and datasets that are used, in the installed versions."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from tiny import tiny_workload
from transformers import AutoModelForSequenceClassification, BertConfig, Trainer, TrainerCallback, TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from autotune.worker.private import accelerate as accelerate_names
from autotune.worker.private import datasets as datasets_names
from autotune.worker.private import transformers as names
from autotune.worker.trial.build import build_model
from autotune.worker.trial.synthetic import synthetic_dataset

WORKLOAD = tiny_workload("bert-tiny", seq_len=8)


def arguments(folder: Path, **fields: Any) -> TrainingArguments:
    """Those of a short training on the CPU that reports to nobody."""
    quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "max_steps": 3}
    return TrainingArguments(output_dir=str(folder), per_device_train_batch_size=2, **{**quiet, **fields})


def model() -> Any:
    return build_model(WORKLOAD, "eager", torch.device("cpu"))


def test_a_trainer_takes_samples_in_the_order_that_it_is_given(tmp_path: Path) -> None:
    built = model()
    data = synthetic_dataset(WORKLOAD, built, 6, 0)
    trainer = Trainer(model=built, args=arguments(tmp_path), train_dataset=data)
    names.change_train_sampler(trainer, lambda _: [5, 1, 4, 0])
    batches = [batch["input_ids"] for batch in trainer.get_train_dataloader()]
    assert torch.equal(torch.cat(batches), torch.stack([data[index]["input_ids"] for index in (5, 1, 4, 0)]))


def test_samples_are_grouped_by_length() -> None:
    lengths = list(range(1, 401))
    order = names.length_grouped_order(lengths, 4, seed=3)
    assert sorted(order) == list(range(400))
    batches = [order[start : start + 4] for start in range(0, 400, 4)]
    assert max(max(batch) - min(batch) for batch in batches[1:]) < 100
    assert order == names.length_grouped_order(lengths, 4, seed=3)
    assert order != names.length_grouped_order(lengths, 4, seed=4)


def test_every_integration_is_removed_and_no_other_callback(tmp_path: Path) -> None:
    assert len(INTEGRATION_TO_CALLBACK) > 3
    trainer = Trainer(model=model(), args=arguments(tmp_path), callbacks=[TrainerCallback])
    others = list(trainer.callback_handler.callbacks)
    for kind in INTEGRATION_TO_CALLBACK.values():
        # Made without their libraries.
        trainer.add_callback(object.__new__(kind))
        trainer.add_callback(object.__new__(type("Own", (kind,), {})))
    names.remove_reporting_callbacks(trainer)
    assert trainer.callback_handler.callbacks == others


def test_the_sum_of_losses_is_kept_while_training(tmp_path: Path) -> None:
    seen = []

    class Look(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seen.append(names.mean_train_loss(trainer))

    built = model()
    data = synthetic_dataset(WORKLOAD, built, 6, 0)
    trainer = Trainer(model=built, args=arguments(tmp_path), train_dataset=data, callbacks=[Look()])
    trained = trainer.train()
    assert len(seen) == 3
    assert seen[-1] == pytest.approx(trained.training_loss, rel=1e-3)


def test_the_class_that_a_config_makes() -> None:
    found = names.class_for_config(AutoModelForSequenceClassification, BertConfig())
    assert found is transformers.BertForSequenceClassification
    with pytest.raises(KeyError):
        names.class_for_config(AutoModelForSequenceClassification, transformers.ViTConfig())


def test_attention_is_known_of_classes_and_of_models() -> None:
    assert names.attention_implementations(transformers.BertForMaskedLM)[:2] == ["eager", "sdpa"]
    assert names.attention_implementations(object) == ["eager"]
    for attention in ("eager", "sdpa"):
        assert names.attention_of(build_model(WORKLOAD, attention, torch.device("cpu")).config) == attention
    assert names.attention_of(None) == "eager"


def test_optimizers_are_named_and_found(tmp_path: Path) -> None:
    known = names.optimizer_names()
    assert {"adamw_torch", "adamw_torch_fused", "adafactor"} <= set(known)
    kind, options = names.optimizer_class(arguments(tmp_path, optim="adamw_torch"), model())
    assert kind is torch.optim.AdamW
    assert options["lr"] == arguments(tmp_path).learning_rate


def test_masks_are_decided_without_values(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import masking_utils

    asked = [name for name in names._MASK_QUESTIONS if hasattr(masking_utils, name)]
    assert asked, "transformers asks in other words whether a mask can be dropped"
    for name in ("find_packed_sequence_indices", *asked):
        monkeypatch.setattr(masking_utils, name, getattr(masking_utils, name))
    names.decide_masks_without_values(padded=False)
    assert masking_utils.find_packed_sequence_indices(torch.arange(4)[None]) is None
    mask = torch.ones(1, 4)
    mask[0, -1] = 0
    built = build_model(WORKLOAD, "sdpa", torch.device("cpu")).eval()
    tokens = torch.arange(4)[None]
    # What the mask hides makes no difference: it was dropped.
    with torch.no_grad():
        masked, full = built(tokens, attention_mask=mask).logits, built(tokens).logits
    assert torch.equal(masked, full)
    names.decide_masks_without_values(padded=True)
    with torch.no_grad():
        assert not torch.equal(built(tokens, attention_mask=mask).logits, full)


def test_outputs_become_float32() -> None:
    forward = accelerate_names.with_float32_outputs(lambda: {"logits": torch.ones(2, dtype=torch.bfloat16)})
    assert forward()["logits"].dtype == torch.float32


def test_datasets_lie_in_order_and_in_memory() -> None:
    made = datasets_names.without_features(Dataset.from_dict({"x": [1, 2, 3]}))
    assert isinstance(made, Dataset)
    assert datasets_names.in_stored_order(made) is made
    shuffled = made.select([2, 0])
    stored = datasets_names.in_stored_order(shuffled)
    assert stored["x"][:] == [3, 1]
    assert datasets_names.in_stored_order(stored) is stored


def test_the_files_of_all_models_are_read_once() -> None:
    code = (
        "from autotune.worker.private.transformers_imports import import_models\nimport_models()\n"
        "from transformers.utils.import_utils import create_import_structure_from_path as read\n"
        "print(read.cache_info().hits > 400)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "True\n"
