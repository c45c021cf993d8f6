"""Loads exports as training scripts do, in a fresh process: ``python load_exports.py FOLDER``.

Every folder below FOLDER that has an ``export.json`` is one export in all its forms; ``model`` has a config.
For each export a line of JSON says what every form became, or which error or warning it met; what the
transformers logger warns of counts as well. Each is loaded in a child of its own, as in a process of its own.
"""

import dataclasses
import json
import logging
import os
import runpy
import shlex
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import AutoConfig, AutoModelForSequenceClassification, HfArgumentParser, Trainer, TrainingArguments
from transformers.utils import is_torch_bf16_gpu_available, is_torch_tf32_available

# What training itself needs and an export has nothing to say about.
BRIEF = {"max_steps": 2, "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_strategy": "no"}
AutoModel = AutoModelForSequenceClassification


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Random tokens and labels."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.randint(10, 1000, (8,)), "labels": torch.tensor(index % 2)}


class RaisingHandler(logging.Handler):
    """Makes an error of a logged warning."""

    def emit(self, record: logging.LogRecord) -> None:
        raise UserWarning(record.getMessage())


def facts(arguments: TrainingArguments) -> dict[str, Any]:
    """Fields as they were loaded."""
    return {field.name: getattr(arguments, field.name) for field in dataclasses.fields(arguments)}


def parse(method: str, given: Any) -> dict[str, Any]:
    """What ``HfArgumentParser`` makes of a file or of words."""
    (arguments,) = getattr(HfArgumentParser(TrainingArguments), method)(given)
    return facts(arguments)


def run_script(folder: Path) -> dict[str, Any]:
    """The Python form, run as it is."""
    names = runpy.run_path(str(folder / "export.python"))
    model = names["model"]
    return {
        **facts(names["arguments"]),
        "model": {"attention": model.config._attn_implementation, "dtype": str(model.dtype)},
    }


def train(folder: Path) -> dict[str, Any]:
    """Two optimizer steps of a real ``Trainer`` with the JSON's arguments, and what they showed."""
    exported = json.loads((folder / "export.json").read_text())
    arguments = TrainingArguments(**exported, **BRIEF, output_dir=str(folder / "output"))
    model = AutoModel.from_pretrained(folder.parent / "model")
    batches: list[int] = []
    dtypes: set[str] = set()
    linear = next(module for module in model.modules() if isinstance(module, torch.nn.Linear))
    linear.register_forward_hook(lambda module, inputs, output: dtypes.add(str(output.dtype)))
    model.register_forward_pre_hook(
        lambda module, inputs, named: batches.append(len(named["input_ids"])), with_kwargs=True
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Sentences())
    steps = trainer.train().global_step
    return {
        "steps": steps,
        "batches": batches,
        "dtypes": sorted(dtypes),
        "checkpointing": bool(model.is_gradient_checkpointing),
        "optimizer": type(getattr(trainer.optimizer, "optimizer", trainer.optimizer)).__name__,
        "device": model.device.type,
    }


FORMS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "json file": lambda folder: parse("parse_json_file", str(folder / "export.json")),
    "keywords": lambda folder: facts(TrainingArguments(**json.loads((folder / "export.json").read_text()))),
    "yaml file": lambda folder: parse("parse_yaml_file", str(folder / "export.yaml")),
    "command line": lambda folder: parse(
        "parse_args_into_dataclasses", shlex.split((folder / "export.cli").read_text())
    ),
    "python": run_script,
    "training": train,
}


def attempt(form: Callable[[Path], dict[str, Any]], folder: Path) -> dict[str, Any]:
    """What came of one form."""
    try:
        with warnings.catch_warnings():
            # In training, others may warn of what is theirs.
            warnings.simplefilter("default" if form is train else "error")
            logging.disable(logging.WARNING if form is train else logging.NOTSET)
            return {"loaded": form(folder)}
    except (Exception, SystemExit) as error:
        return {"error": f"{type(error).__name__}: {error}"}


def in_child(work: Callable[[], dict[str, Any]]) -> None:
    """Print what the work finds as a line of JSON, from a process that nothing was done in before."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        print(json.dumps(work(), default=str), flush=True)
        os._exit(0)
    if status := os.waitpid(pid, 0)[1]:
        raise SystemExit(f"a child ended with wait status {status}")


def main() -> None:
    """A line for the machine, then one for every export."""
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    config = AutoConfig.from_pretrained(folder / "model")
    AutoModel.from_config(config).save_pretrained(folder / "model")
    logging.getLogger("transformers").addHandler(RaisingHandler(logging.WARNING))
    in_child(
        lambda: {
            "cuda": torch.cuda.is_available(),
            "tf32": is_torch_tf32_available(),
            "bf16": is_torch_bf16_gpu_available(),
        }
    )
    for export in sorted(path.parent for path in folder.glob("*/export.json")):
        in_child(lambda: {"name": export.name, **{name: attempt(form, export) for name, form in FORMS.items()}})  # noqa: B023


if __name__ == "__main__":
    main()
