"""Measure fine-tuning of language models under the memory of one card, from a name, as users would.

    python studies/language_models.py --json FILE [--only NAME,…] [--parts PART,…] [--memory-limit 24GiB]
    python studies/language_models.py --json FILE --try

For each case: what ``autotune predict`` says, then ``autotune search``, then ``autotune verify``, each as a process of
its own, and a search for the largest batch in bf16 with all layers checkpointed (``usual``), which is what most people
run. ``--parts`` takes some of these four: ``predict`` needs no GPU, so it can be left out where GPU time is short. One
JSON line a case is appended as soon as it is done, with the seconds of each process, the trials that ran out of memory,
the memory of the host for building the model, and predicted beside measured peaks. What fails is recorded with its last
words, and the next case runs. ``--try`` takes tiny models on the CPU, to see that everything works.

Databases and logs go to a temporary folder. QLoRA needs peft and bitsandbytes, LoRA needs peft.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from autotune.core.candidate import Document

_LAST_WORDS = 1500
# After this long a process is interrupted, as by Ctrl-C: a search then prints what it has found.
_LONGEST_SECONDS = 300.0
_SECONDS_TO_END = 40.0
_LORA = ["--peft", "lora"]
_QLORA = [*_LORA, "--quantize", "4bit"]
_LONG = ["--model", "llama-3.2-1b", "--seq-len", "32768", "--effective-batch", "4", "--dtype", "bfloat16"]
CASES: dict[str, list[str]] = {
    "full-1b-2048": ["--model", "llama-3.2-1b", "--seq-len", "2048"],
    "lora-8b-1024": ["--model", "llama-3.1-8b", "--seq-len", "1024", *_LORA],
    "lora-8b-4096": ["--model", "llama-3.1-8b", "--seq-len", "4096", *_LORA],
    "qlora-14b-1024": ["--model", "qwen3-14b", "--seq-len", "1024", *_QLORA],
    "qlora-32b-1024": ["--model", "qwen3-32b", "--seq-len", "1024", *_QLORA],
    # With --memory-limit 31.7GiB, as a published training of this length.
    "full-0.6b-8192": ["--model", "qwen3-0.6b", "--seq-len", "8192", "--effective-batch", "8", "--dtype", "bfloat16"],
    "full-1b-32768": _LONG,
    "full-1b-32768-offloaded": [*_LONG, "--offload-activations", "on"],
}
TINY: dict[str, list[str]] = {
    "full-tiny": ["--model", "llama-tiny", "--seq-len", "32"],
    "lora-tiny": ["--model", "llama-tiny", "--seq-len", "32", *_LORA],
    "qlora-tiny": ["--model", "llama-tiny", "--seq-len", "32", *_QLORA],
}
# What an informed user runs where not everything fits.
_USUAL = ["--precision", "bf16", "--gradient-checkpointing", "on", "--objective", "max-batch", "--no-baseline"]


def autotune(*words: str) -> Document:
    """Run a command that prints JSON; return what it printed, how it ended and how long it took."""
    started = time.monotonic()
    command = [sys.executable, "-m", "autotune", *words, "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = process.communicate(timeout=_LONGEST_SECONDS)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        try:
            out, err = process.communicate(timeout=_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
    code = process.returncode
    try:
        document = json.loads(out)
    except ValueError:
        document = None
    return {
        "words": list(words),
        "exit_code": code,
        "seconds": round(time.monotonic() - started, 1),
        "document": document,
        "last_words": "" if code == 0 else err[-_LAST_WORDS:],
    }


def _arm_of(document: Document) -> tuple[Any, ...]:
    names = ("precision", "gradient_checkpointing", "attn_implementation", "optim", "checkpointed_layers")
    return tuple(document.get(name) for name in names)


def peaks(predicted: Document | None, searched: Document | None) -> list[Document]:
    """Return predicted beside measured peaks, for every completed trial whose arm was predicted."""
    if not predicted or not searched:
        return []
    known = {
        (_arm_of(arm), batch["per_device_train_batch_size"]): batch
        for arm in predicted["arms"]
        for batch in arm["batches"]
    }
    found = []
    for trial in searched["trials"]:
        batch = known.get((_arm_of(trial), trial["per_device_train_batch_size"]))
        if batch is None or trial["state"] != "completed":
            continue
        row: Document = {"arm": _arm_of(trial), "per_device_train_batch_size": trial["per_device_train_batch_size"]}
        for kind in ("allocated", "reserved"):
            measured, told = trial[f"peak_{kind}_bytes"], batch[f"peak_{kind}_bytes"]
            row |= {f"{kind}_measured_bytes": measured, f"{kind}_predicted_bytes": told}
            row[f"{kind}_error"] = round(told / measured - 1, 4)
        found.append(row)
    return found


def summary(parts: dict[str, Document]) -> Document:
    """Return what a case is about in a few figures; ``None`` where a part gave none."""
    searched, usual, verified = (parts.get(name, {}).get("document") for name in ("search", "usual", "verify"))
    if not searched or not searched["best"]:
        return {"answered": False}
    best, trials = searched["best"], searched["trials"]
    usual_best = (usual or {}).get("best")
    return {
        "answered": True,
        "search_seconds": parts["search"]["seconds"],
        "samples_per_second": best["samples_per_second"],
        "next_run": searched["next_run"],
        "over_usual": best["samples_per_second"] / usual_best["samples_per_second"] if usual_best else None,
        "trials": len(trials),
        "out_of_memory": sum(trial["state"] == "out_of_memory" for trial in trials),
        "peak_reserved_bytes": best["peak_reserved_bytes"],
        "headroom_bytes": best["headroom_bytes"],
        "host_bytes_to_build": max((trial["host_bytes_to_build"] or 0 for trial in trials), default=0),
        "model_seconds": max((trial["phase_seconds"].get("model", 0.0) for trial in trials), default=0.0),
        "kept": (verified or {}).get("kept"),
        "peaks": peaks(parts.get("predict", {}).get("document"), searched),
    }


def run_case(name: str, words: list[str], place: list[str], given: argparse.Namespace, folder: Path) -> Document:
    """Predict, search and verify one case: the parts of it that are asked for."""
    storage = ["--storage", str(folder / f"{name}.db")]
    batch = [] if "--effective-batch" in words else ["--effective-batch", "16"]
    tried = [*words, *batch, "--memory-limit", given.memory_limit, *place, *storage]
    commands = {
        "predict": ["predict", *words, *batch, "--gpu", "h200", "--memory-limit", given.memory_limit, *storage],
        "search": ["search", *tried, "--study", name],
        "verify": ["verify", name, *storage, "--steps", str(given.steps)],
        "usual": ["search", *tried, *_USUAL, "--study", f"{name}-usual"],
    }
    parts = {}
    for part, command in commands.items():
        if part in given.parts.split(","):
            parts[part] = autotune(*command)
            print(f"{name}: {part} took {parts[part]['seconds']} s", file=sys.stderr, flush=True)
    return {"name": name, "summary": summary(parts), "parts": parts}


def main() -> int:
    """Run the cases that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True, type=Path, metavar="FILE", help="where a line a case is appended")
    parser.add_argument("--only", help="names of cases, with commas")
    parser.add_argument("--parts", default="predict,search,verify,usual", help="with commas")
    parser.add_argument("--memory-limit", default="24GiB")
    parser.add_argument("--steps", type=int, default=50, help="optimizer steps that verify trains (default: 50)")
    parser.add_argument("--try", action="store_true", dest="tries", help="tiny models on the CPU")
    given = parser.parse_args()
    cases = TINY if given.tries else CASES
    names = given.only.split(",") if given.only else list(cases)
    place = ["--device", "cpu", "--trials", "4"] if given.tries else []
    given.memory_limit = "1GiB" if given.tries else given.memory_limit
    for name in names:
        with tempfile.TemporaryDirectory(prefix="language-models-") as folder:
            found = run_case(name, cases[name], place, given, Path(folder))
        with given.json.open("a") as file:
            file.write(json.dumps(found) + "\n")
        told = {part: (each["exit_code"], each["seconds"]) for part, each in found["parts"].items()}
        print(json.dumps({"name": name, **found["summary"], "processes": told}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
