"""Measure what watching costs a training that ``autotune run`` starts: paired runs with and without it.

    python studies/watched_run.py                      # a Trainer: 2,000 steps of a bert-base on one GPU
    python studies/watched_run.py --loop               # a loop of plain PyTorch, told its batch by a placeholder
    python studies/watched_run.py --tiny --steps 60 --batch 4   # a try on a CPU

A short search makes the promise. Then the training runs in alternation with and without watching, and times itself from
step 100 on (a third of the steps, where there are fewer than 300).
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any


def train(options: argparse.Namespace) -> None:
    """Train a BERT with random weights on random tokens of one length, and print the speed."""
    import torch
    from transformers import AutoConfig, AutoModelForMaskedLM, Trainer, TrainerCallback, TrainingArguments

    torch.manual_seed(0)
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model = AutoModelForMaskedLM.from_config(AutoConfig.for_model("bert", **(small if options.tiny else {})))
    ids = torch.randint(5, 30_000, (options.steps * options.batch, 16 if options.tiny else 128))
    data: Any = [{"input_ids": row, "labels": row} for row in ids]
    clock: dict[int, float] = {}

    def note(step: int) -> None:
        if step in (min(100, options.steps // 3), options.steps):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            clock[step] = time.perf_counter()

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            note(state.global_step)

    if options.loop:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model.to(device)
        optimizer = torch.optim.AdamW(model.parameters(), fused=device == "cuda")
        loader: Any = torch.utils.data.DataLoader(data, batch_size=options.batch)
        for step, batch in enumerate(loader, start=1):
            with torch.autocast(device, torch.bfloat16):
                loss = model(**{name: each.to(device) for name, each in batch.items()}).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            note(step)
            if step % 50 == 0:
                print(loss.item())
    else:
        arguments = TrainingArguments(
            output_dir=os.path.join(tempfile.gettempdir(), "watched-run"), bf16=True, max_steps=options.steps,
            per_device_train_batch_size=options.batch, logging_steps=50, save_strategy="no", report_to="none",
            disable_tqdm=True, use_cpu=not torch.cuda.is_available(),
        )  # fmt: skip
        Trainer(model, arguments, train_dataset=data, callbacks=[Clock()]).train()
    (first, began), (last, ended) = sorted(clock.items())
    print(f"SPEED {(last - first) * options.batch / (ended - began)}")


def main(options: argparse.Namespace) -> None:
    """Search, then run in alternation, and print each speed and their ratio."""
    from autotune.core.real_training import VARIABLE, RealTraining
    from autotune.core.schema import decode, encode
    from autotune.results.report import load_report
    from autotune.results.training import make_start
    from autotune.store.opening import open_store

    folder = tempfile.mkdtemp()
    storage = os.path.join(folder, "studies.db")
    batch = "{batch}" if options.loop else str(options.batch)
    words = ["python", str(Path(__file__).absolute()), "train", "--steps", str(options.steps), "--batch", batch]
    words += ["--loop"] * options.loop + ["--tiny"] * options.tiny
    kept = ["--effective-batch", str(options.batch), "--batch-multiple", str(options.batch), "--precision", "bf16"]
    asked = ["--study", "watched", "--storage", storage, "--trials", str(options.trials), *kept]
    command = [sys.executable, "-m", "autotune", "search", *asked, "--", *words]
    subprocess.run(command, check=False, cwd=folder)
    with open_store(storage, create=False) as store:
        report = load_report(store, "watched")
    start = make_start(report, (), os.path.join(folder, "runs.jsonl"))
    training = decode(json.loads(start.handed[VARIABLE]), RealTraining)
    speeds: dict[bool, list[float]] = {True: [], False: []}
    for pair in range(options.pairs):
        for watched in (True, False) if pair % 2 else (False, True):
            handed = training if watched else replace(training, promise=None)
            variables = {**os.environ, **start.variables, VARIABLE: json.dumps(encode(handed))}
            ran = subprocess.run(start.words, env=variables, cwd=start.cwd, capture_output=True, text=True, check=False)
            found = re.search(r"SPEED (\S+)", ran.stdout)
            if found is None:
                sys.exit(ran.stderr[-3000:])
            speeds[watched].append(float(found[1]))
            said = [line for line in ran.stderr.splitlines() if line.startswith("autotune:")]
            print(f"{'watched' if watched else 'alone  '} {speeds[watched][-1]:.2f} samples/s", *said, flush=True)
    ratios = [one / other for one, other in zip(speeds[True], speeds[False], strict=True)]
    print("watched / alone:", ", ".join(f"{ratio:.4f}" for ratio in ratios), f"mean {sum(ratios) / len(ratios):.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="?", default="measure", choices=("measure", "train"))
    for name, default in (("steps", 2000), ("batch", 32), ("pairs", 3), ("trials", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--loop", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    train(given) if given.what == "train" else main(given)
