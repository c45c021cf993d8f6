"""What is wrapped of accelerate, Lightning and torch for loops of one's own is there, and takes what is put over it."""

import importlib
import inspect
import sys
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from torch.utils.data import DataLoader


def test_an_accelerator_takes_what_is_put_over_it() -> None:
    parameters = inspect.signature(Accelerator.__init__).parameters
    wanted = {"mixed_precision", "gradient_accumulation_steps", "gradient_accumulation_plugin", "log_with"}
    assert wanted <= parameters.keys()
    for name in ("accumulate", "prepare", "prepare_data_loader", "init_trackers", "log", "save_state", "save_model"):
        assert callable(getattr(Accelerator, name))


def test_a_prepared_loader_goes_over_its_batches_by_a_method_of_its_class() -> None:
    prepared = Accelerator(cpu=True).prepare_data_loader(DataLoader(list(range(6)), batch_size=2))
    assert isinstance(prepared, DataLoaderShard)
    assert "__iter__" in vars(DataLoaderShard)
    assert "__iter__" in vars(DataLoaderDispatcher)
    assert prepared.batch_sampler.batch_size == 2


def test_torch_tells_of_backward_passes_and_optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    backward = torch.autograd.backward
    monkeypatch.setattr(torch.autograd, "backward", lambda *a, **k: (told.append("backward"), backward(*a, **k)))
    optimizers: Any = sys.modules["torch.optim.optimizer"]
    handles = [
        optimizers.register_optimizer_step_pre_hook(lambda *_: told.append("before")),
        optimizers.register_optimizer_step_post_hook(lambda *_: told.append("after")),
    ]
    try:
        weight = torch.nn.Parameter(torch.ones(2))
        weight.sum().backward()
        torch.optim.SGD([weight], 0.1).step()
    finally:
        for handle in handles:
            handle.remove()
    assert told == ["backward", "before", "after"]


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_a_lightning_trainer_takes_what_is_put_over_it(package: str) -> None:
    pytest.importorskip(package)
    trainer = importlib.import_module(f"{package}.trainer.trainer").Trainer
    wanted = {
        "precision", "accumulate_grad_batches", "logger", "callbacks", "default_root_dir", "enable_checkpointing",
        "enable_progress_bar", "enable_model_summary", "num_sanity_val_steps", "limit_val_batches", "fast_dev_run",
        "profiler", "barebones", "max_epochs", "max_steps", "max_time", "devices", "num_nodes", "accelerator",
    }  # fmt: skip
    assert wanted <= inspect.signature(trainer.__init__).parameters.keys()
    assert callable(importlib.import_module(f"{package}.loggers.logger").DummyLogger)
    callbacks = importlib.import_module(f"{package}.callbacks")
    for name in ("Checkpoint", "EarlyStopping", "LearningRateMonitor", "ProgressBar", "GradientAccumulationScheduler"):
        assert isinstance(getattr(callbacks, name), type)
    for hook in ("on_train_start", "on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end"):
        assert callable(getattr(callbacks.Callback, hook))
