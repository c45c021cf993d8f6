"""Texts of 20 to 512 tokens: the answer found on them against the one found on synthetic samples of full length.

    python studies/mixed_lengths.py --model bert-base-uncased --effective-batch 128 --memory-limit 24GiB --json FILE

Makes a file of texts whose lengths are drawn evenly, and a tokenizer; searches on synthetic data, on the file, and on
the file with its lengths grouped. Then each answer trains a whole shuffled epoch (grouped for the third) of that file
in a fresh process: a stock ``Trainer`` with ``DataCollatorWithPadding`` and the exported arguments, under the cap that
trials had, nothing of autotune's in its way but the clock. The answers train in turn, ``--repeats`` times.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
# Kernels are loaded and the allocator finds its blocks in the first steps; they count for the peak alone.
_WARMUP_STEPS = 5


def write_texts(path: Path, samples: int, shortest: int, longest: int) -> None:
    """A line of JSON a text; two of its tokens are the tokenizer's own."""
    drawn = random.Random(0)
    with path.open("w", encoding="utf-8") as stream:
        for index in range(samples):
            words = drawn.choices(WORDS, k=drawn.randint(shortest, longest) - 2)
            stream.write(json.dumps({"text": " ".join(words), "label": index % 2}) + "\n")


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator([" ".join(WORDS)], trainers.WordLevelTrainer(special_tokens=list(SPECIAL)))
    special = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=special)
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(str(folder))


def make_clock(meter: Any) -> Any:
    """A callback that knows when the last step of the warm-up ended, and the step in the middle of the rest."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):  # type: ignore[misc]
        """Reads the time at these two steps alone."""

        began = middle = 0.0
        middle_step = 0

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.middle_step = (_WARMUP_STEPS + state.max_steps) // 2
            if state.global_step in (_WARMUP_STEPS, self.middle_step):
                meter.synchronize()
                self.began, self.middle = self.began or time.perf_counter(), time.perf_counter()

    return Clock()


def train_epoch(job_path: str) -> None:
    """In a process of its own: one epoch; prints what it saw."""
    import torch
    from datasets import load_dataset
    from transformers import (
        AutoConfig,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
    )

    from autotune.worker.trial.meter import open_meter

    job = json.loads(Path(job_path).read_text(encoding="utf-8"))
    meter = open_meter(job["device_kind"], job["device_uuid"])
    meter.limit(job["cap_bytes"])
    clock = make_clock(meter)
    tokenizer = AutoTokenizer.from_pretrained(job["tokenizer"])
    config = AutoConfig.for_model(job["config"].pop("model_type"), **job["config"])
    with tempfile.TemporaryDirectory() as folder:
        data = load_dataset("json", data_files=job["file"], split="train", cache_dir=folder)
        data = data.map(lambda row: tokenizer(row["text"], truncation=True, max_length=512), remove_columns="text")
        with torch.device(meter.device):
            model = AutoModelForSequenceClassification.from_config(config, attn_implementation="sdpa")
        arguments = TrainingArguments(
            output_dir=folder, num_train_epochs=1, save_strategy="no", report_to="none", disable_tqdm=True,
            **job["arguments"],
        )  # fmt: skip
        trainer = Trainer(
            model=model, args=arguments, train_dataset=data, data_collator=DataCollatorWithPadding(tokenizer),
            callbacks=[clock],
        )  # fmt: skip
        trainer.train()
        meter.synchronize()
        end = time.perf_counter()
    per_step = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
    allocated, reserved = meter.peaks()
    seen = {
        "steps": trainer.state.global_step,
        "samples_per_second": (len(data) - per_step * _WARMUP_STEPS) / (end - clock.began),
        "samples_per_second_of_the_second_half": (len(data) - per_step * clock.middle_step) / (end - clock.middle),
        "peak_allocated_bytes": allocated,
        "peak_reserved_bytes": reserved,
        "allocation_retries": meter.allocation_retries(),
    }
    print(json.dumps(seen))


def _autotune(*words: str) -> dict[str, Any]:
    """One command's JSON; its stderr is shown."""
    ended = subprocess.run([sys.executable, "-m", "autotune", *words], stdout=subprocess.PIPE, text=True, check=True)
    document: dict[str, Any] = json.loads(ended.stdout)
    return document


def _epoch(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """An epoch of one answer; ``error`` holds the last line where it did not survive."""
    path = folder / "job.json"
    path.write_text(json.dumps(job), encoding="utf-8")
    ended = subprocess.run([sys.executable, __file__, "--epoch", str(path)], capture_output=True, text=True)
    if ended.returncode:
        return {"error": (ended.stderr.strip().splitlines() or ["no message"])[-1]}
    seen: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return seen


def _search(options: argparse.Namespace, folder: Path, name: str, *words: str) -> dict[str, Any]:
    """A search, with its export beside it."""
    asked = ["--model", options.model, "--effective-batch", str(options.effective_batch)]
    asked += ["--memory-limit", options.memory_limit, *(["--device", options.device] if options.device else [])]
    storage = ["--storage", str(folder / "studies.db")]
    document = _autotune("search", *asked, *words, "--study", name, "--json", *storage)
    document["arguments"] = _autotune("export", name, *storage)
    return document


def run(options: argparse.Namespace, folder: Path, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The searches and then their epochs; ``save`` is given what there is after each."""
    file, tokenizer = folder / "texts.jsonl", folder / "tokenizer"
    write_texts(file, options.samples, options.shortest, options.longest)
    write_tokenizer(tokenizer)
    data = ("--dataset", str(file), "--tokenizer", str(tokenizer))
    words = {"synthetic": (), "dataset": data, "grouped": (*data, "--group-by-length")}
    found: dict[str, dict[str, Any]] = {}
    epochs: dict[str, list[dict[str, Any]]] = {}
    document = {"command": ["python", "studies/mixed_lengths.py", *sys.argv[1:]], "searches": found, "epochs": epochs}
    for name in options.only.split(","):
        found[name] = _search(options, folder, name, *words[name])
        save(document)
    for repeat in range(options.repeats):
        # In another order each time.
        for name in sorted(found, reverse=repeat % 2 == 1):
            environment = found[name]["environment"]
            job = {
                "file": str(file), "tokenizer": str(tokenizer), "arguments": found[name]["arguments"],
                "config": found[name]["workload"]["config"], "cap_bytes": found[name]["ceiling"]["cap_bytes"],
                "device_kind": environment["device_kind"], "device_uuid": environment["device_uuid"],
            }  # fmt: skip
            epochs.setdefault(name, []).append(_epoch(job, folder))
            print(name, json.dumps(epochs[name][-1]), file=sys.stderr, flush=True)
            save(document)
    return document


def _line(name: str, found: dict[str, Any], epochs: list[dict[str, Any]], samples: int) -> str:
    """What was promised, for an epoch that meets its lengths for the first time as well, and what came of it."""
    best = found["best"]
    seconds = samples / best["samples_per_second"]
    new_seconds = (best.get("new_length_seconds") or 0.0) * (best.get("epoch_lengths") or 0)
    words = [
        f"{name}: {best['per_device_train_batch_size']} × {best['gradient_accumulation_steps']} {best['precision']}",
        f"promised {best['samples_per_second']:.1f} samples/s",
        f"{samples / (seconds + new_seconds):.1f} in a first epoch of {samples:,}",
    ]
    if any("error" in seen for seen in epochs):
        return ", ".join([*words, "did not survive"])
    for what in ("samples_per_second", "samples_per_second_of_the_second_half"):
        each = [seen[what] for seen in epochs]
        words.append(f"{what.replace('_', ' ')}: {statistics.median(each):.1f}")
    return ", ".join(words)


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epoch", metavar="JOB", help=argparse.SUPPRESS)
    parser.add_argument("--model", default="bert-base-uncased", help="a text encoder of the catalog")
    parser.add_argument("--effective-batch", type=int, default=128)
    parser.add_argument("--memory-limit", default="24GiB")
    parser.add_argument("--device")
    parser.add_argument("--samples", type=int, default=16384)
    parser.add_argument("--shortest", type=int, default=20, help="tokens")
    parser.add_argument("--longest", type=int, default=512, help="tokens")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--only", default="synthetic,dataset,grouped")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.epoch:
        train_epoch(options.epoch)
        return

    def save(document: dict[str, Any]) -> None:
        if options.json:
            options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    with tempfile.TemporaryDirectory(prefix="mixed-lengths-") as folder:
        document = run(options, Path(folder), save)
    for name, found in document["searches"].items():
        print(_line(name, found, document["epochs"].get(name, []), options.samples))


if __name__ == "__main__":
    main()
