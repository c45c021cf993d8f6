"""Training codes in the shape of well-known ones, searched as they are by placeholders, then trained with the winner.

The codes are in ``codes``. One runs with the other tests, all of them with ``make test-clients``.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import warm
from checkout import ROOT

CODES = Path(__file__).resolve().parent / "codes"


@dataclass(frozen=True)
class Code:
    """How a code is told its settings, and how it is made to end soon."""

    words: tuple[str, ...]
    batch: str
    """What its filled command line says before its batch, and before its accumulation or total."""
    accumulation: str = ""
    short: tuple[str, ...] = ()
    effective_batch: int | None = 16
    searched: tuple[str, ...] = ("batch", "accumulation", "precision")
    per_sample: int = 0
    """Where it is told a total: what a sample counts."""
    needs: str = "torch"


BF16 = "{precision:fp32=float32,bf16=bfloat16}"
CODES_KNOWN = {
    "nanogpt": Code(
        ("--batch_size={batch}", "--gradient_accumulation_steps={accumulation}", f"--dtype={BF16}"),
        "--batch_size=", "--gradient_accumulation_steps=", ("--max_iters=2",),
    ),
    "timm": Code(
        ("-b", "{batch}", "--grad-accum-steps", "{accumulation}", "{precision:bf16=--amp --amp-dtype bfloat16}",
         "{checkpointing:on=--grad-checkpointing}"),
        "-b ", "--grad-accum-steps ", ("--epochs", "1"),
        searched=("batch", "accumulation", "precision", "checkpointing"),
    ),
    "imagenet": Code(("--dummy", "-b", "{batch}"), "-b ", "", ("--epochs", "1"), 32, ("batch",)),
    "word_language_model": Code(("--batch_size", "{batch}"), "--batch_size ", "", ("--epochs", "1"), None, ("batch",)),
    "open_clip": Code(
        ("--batch-size", "{batch}", "--accum-freq", "{accumulation}", "--precision",
         "{precision:fp32=fp32,bf16=amp_bf16}", "{checkpointing:on=--grad-checkpointing}"),
        "--batch-size ", "--accum-freq ", ("--epochs", "1"),
        searched=("batch", "accumulation", "precision", "checkpointing"),
    ),
    "nanochat": Code(
        ("--device-batch-size", "{batch}", "--total-batch-size", "{effective_tokens}"),
        "--device-batch-size ", "--total-batch-size ", ("--num-iterations", "2", "--no-compile"),
        searched=("batch", "accumulation"), per_sample=16,
    ),
    "litgpt": Code(
        ("--train.micro_batch_size", "{batch}", "--train.global_batch_size", "{effective_batch}", "--precision",
         "{precision:fp32=32-true,bf16=bf16-mixed}"),
        "--train.micro_batch_size ", "--train.global_batch_size ", ("--train.max_steps", "2"),
        per_sample=1, needs="lightning",
    ),
}  # fmt: skip


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run autotune in the folder."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "autotune", *words]
    return warm.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)


@pytest.mark.clients
@pytest.mark.parametrize("name", list(CODES_KNOWN))
def test_a_code_is_searched_as_it_is_and_trained_with_the_winner(tmp_path: Path, name: str) -> None:
    code = CODES_KNOWN[name]
    if importlib.util.find_spec(code.needs) is None:
        pytest.skip(f"{code.needs} is not installed: make test-clients")
    script = ("python", str(CODES / f"{name}_shape.py"))
    asked = () if code.effective_batch is None else ("--effective-batch", str(code.effective_batch))
    budget = ("--device", "cpu", "--study", "s", "--trials", "3", "--json", *asked)
    searched = run(tmp_path, "search", *budget, "--", *script, *code.words)
    assert searched.returncode == 0, searched.stderr
    document = json.loads(searched.stdout)
    interface = document["workload"]["source"]["interface"]
    assert interface["searched"] == list(code.searched)
    assert all(trial["state"] == "completed" for trial in document["trials"]), searched.stderr
    best = document["best"]
    batch, accumulation = best["per_device_train_batch_size"], best["gradient_accumulation_steps"]
    if code.effective_batch is not None:
        assert batch * accumulation == code.effective_batch

    shown = run(tmp_path, "export", "s", "--format", "cli").stdout
    trained = run(tmp_path, "run", "s", "--", *script, *code.words, *code.short)
    assert trained.returncode == 0, trained.stderr
    for line in (shown, next(line for line in trained.stderr.splitlines() if line.startswith("starts"))):
        assert re.search(rf"(?<!\S){code.batch}{batch}\b", line), line
        if code.accumulation:
            told = code.per_sample * batch * accumulation or accumulation
            assert re.search(rf"(?<!\S){code.accumulation}{told}\b", line), line


@pytest.mark.whole
def test_the_training_ends_as_the_script_does(tmp_path: Path) -> None:
    """Its exit code is the command's; a command without placeholders has nowhere to put the winner."""
    (tmp_path / "t.py").write_text(
        "import os, sys, torch\n"
        "m = torch.nn.Linear(2, 1)\no = torch.optim.SGD(m.parameters(), 0.1)\n"
        "batch, steps = int(os.environ['BATCH']), int(sys.argv[1])\n"
        "for _ in range(steps):\n    m(torch.ones(batch, 2)).sum().backward()\n    o.step()\n"
        "sys.exit(batch)\n"
    )
    words = ("--effective-batch", "16", "--device", "cpu", "--study", "s", "--trials", "1", "--", "BATCH={batch}")
    searched = run(tmp_path, "search", *words, "t.py", "60")
    assert searched.returncode == 0, searched.stderr
    assert run(tmp_path, "export", "s", "--format", "env").stdout == "BATCH=16\n"
    # As a shell takes it in $(…).
    told = run(tmp_path, "export", "s", "--format", "cli")
    assert (told.stdout, "BATCH" in told.stderr) == ("env BATCH=16 python t.py 60\n", False)
    trained = run(tmp_path, "run", "s")
    assert trained.returncode == 16, trained.stderr
    assert "set     BATCH=16" in trained.stderr
    refused = run(tmp_path, "run", "s", "--", "python", "t.py", "3")
    assert refused.returncode == 2
    assert "has no placeholders, so that nothing of the winner reaches it" in refused.stderr
