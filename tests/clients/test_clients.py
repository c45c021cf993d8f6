"""Scripts on other libraries: searched unmodified, the winner exported, and trained with; nothing written meanwhile.

Some run with the other tests, all of them with ``make test-clients``; one whose library is not installed is skipped.
"""

import contextlib
import importlib.util
import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import warm
from checkout import ROOT

from autotune.core.units import MIB

CODE = ROOT / "tests" / "own_code"


@dataclass(frozen=True)
class Client:
    """A script, and how its library takes what is exported."""

    file: str
    library: str
    words: tuple[str, ...] = ()
    after: str = "flags"
    """How it trains with the export: ``flags``, ``settings`` in a file, or by hand, in its ``code`` or by Hydra's
    ``overrides``."""


CLIENTS = {
    "trl": Client("tune_with_trl.py", "trl", ("--output_dir", "out", "--max_length", "32", "--bf16", "false")),
    "trl on preferences": Client(
        "tune_with_dpo.py", "trl", ("--output_dir", "out", "--max_length", "48", "--bf16", "false")
    ),
    "trl's reward model": Client(
        "tune_with_reward.py", "trl", ("--output_dir", "out", "--max_length", "32", "--bf16", "false")
    ),
    "trl on judgements": Client(
        "tune_with_kto.py", "trl", ("--output_dir", "out", "--max_length", "48", "--bf16", "false")
    ),
    "trl on rollouts": Client(
        "tune_with_grpo.py",
        "trl",
        ("--output_dir", "out", "--max_completion_length", "8", "--num_generations", "4", "--bf16", "false"),
    ),
    "peft": Client("tune_with_peft.py", "peft", ("--output_dir", "out")),
    "sentence-transformers": Client("tune_sentence_transformer.py", "sentence_transformers", ("out",), "code"),
    "accelerate": Client("accelerate_loop.py", "accelerate", ("--output_dir", "out", "--log_dir", "logs")),
    "lightning": Client("lightning_loop.py", "lightning"),
    "pytorch-lightning": Client("lightning_loop.py", "pytorch_lightning", ("--package", "pytorch_lightning")),
    # Hydra makes folders and a log; the script reports to TensorBoard in three ways, and saves its model.
    "hydra": Client("hydra_loop.py", "hydra", ("epochs=2",), "overrides"),
    "plain PyTorch": Client("train_images.py", "torch", after="settings"),
}
WITH_THE_OTHERS = ("plain PyTorch",)
BUDGET = ("--device", "cpu", "--study", "s", "--effective-batch", "16", "--trials", "2", "--precision", "fp32")


def run(folder: Path, *words: str, packages: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a command in the folder, without the hub; ``packages`` has what is installed beside the others."""
    caches = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder.parent / "cache")}
    path = os.pathsep.join([str(ROOT), str(packages), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **caches, "PYTHONPATH": path}
    return warm.run(list(words), cwd=folder, env=environment, capture_output=True, text=True, timeout=280)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in WITH_THE_OTHERS else pytest.mark.clients) for name in CLIENTS]
)
def test_a_script_is_searched_exported_and_trained(tmp_path: Path, name: str) -> None:
    client = CLIENTS[name]
    if importlib.util.find_spec(client.library) is None:
        pytest.skip(f"{client.library} is not installed: make test-clients")
    # Other libraries change what they import, so that their scripts start as users start them.
    with contextlib.nullcontext() if name in WITH_THE_OTHERS else warm.cold():
        check(client, name, tmp_path)


def check(client: Client, name: str, tmp_path: Path) -> None:
    """Search a script, export the winner, and train with it."""
    folder = tmp_path / "work"
    (folder / "runs").mkdir(parents=True)
    (folder / "runs" / "mine").write_text("from before")
    autotune = (sys.executable, "-m", "autotune")
    script = str(CODE / client.file)
    own = ("--loop", f"{script}:train") if client.after == "settings" else ("--", "python", script, *client.words)
    searched = run(folder, *autotune, "search", *BUDGET, *own)
    assert searched.returncode == 0, searched.stderr
    left = [path.relative_to(folder) for path in folder.rglob("*") if path.parts[len(folder.parts)] != "studies"]
    assert sorted(map(str, left)) == ["runs", "runs/mine"]
    exported = json.loads(run(folder, *autotune, "export", "s").stdout)
    batch = exported.get(
        "per_device_train_batch_size", exported.get("batch_size", exported.get("per_device_batch_size"))
    )
    steps = ("gradient_accumulation_steps", "accumulate_grad_batches")
    accumulation = next(exported[step] for step in steps if step in exported)
    assert batch * accumulation == 16
    if client.after != "code":
        check_run(client, name, folder, batch, accumulation)

    if client.after == "settings":
        (folder / "settings.json").write_text(json.dumps(exported))
        trained = run(folder, sys.executable, "-c", _ONE_EPOCH, str(CODE), "settings.json")
        assert f"trained with LoopConfig(per_device_batch_size={batch}" in trained.stdout
    elif client.after == "flags":
        flags = shlex.split(run(folder, *autotune, "export", "s", "--format", "cli").stdout)
        assert any("batch" in flag for flag in flags)
        limit = () if "lightning" in name else ("--num_train_epochs", "1")
        trained = run(folder, sys.executable, script, *client.words, *limit, *flags)
    elif client.after == "overrides":
        said = run(folder, *autotune, "export", "s", "--format", "cli").stderr
        assert f"set by hand: batch_size of the training DataLoader at {client.file}:" in said
        overrides = (f"batch_size={batch}", f"gradient_accumulation_steps={accumulation}")
        trained = run(folder, sys.executable, script, *overrides)
        assert f"steps of {batch}" in trained.stdout
    else:
        said = run(folder, *autotune, "export", "s", "--format", "python").stderr
        assert f"set them at {client.file}:" in said
        return
    assert trained.returncode == 0, trained.stderr


def check_run(client: Client, name: str, folder: Path, batch: int, accumulation: int) -> None:
    """Train with the winner by ``autotune run``, in the script as it is."""
    limit = {"plain PyTorch": (), "hydra": ("epochs=1",), "lightning": (), "pytorch-lightning": ()}
    again = limit.get(name, ("--num_train_epochs", "1"))
    words = ("--", "python", str(CODE / client.file), *client.words, *again) if client.after != "settings" else ()
    trained = run(folder, sys.executable, "-m", "autotune", "run", "s", *words)
    assert trained.returncode == 0, trained.stderr
    shown = {
        "accelerate": f"no, {accumulation}, ",
        "plain PyTorch": f"LoopConfig(per_device_batch_size={batch}, gradient_accumulation_steps={accumulation}",
        "lightning": f"trains with 32-true, {accumulation}",
        "pytorch-lightning": f"trains with 32-true, {accumulation}",
        "hydra": f"gradient_accumulation_steps={accumulation}",
    }
    assert shown.get(name, f"per_device_train_batch_size={batch}") in trained.stdout + trained.stderr
    if name == "accelerate":
        assert f"trained with batches of {batch}" in trained.stdout


_ONE_EPOCH = """
import json, sys
sys.path.insert(0, sys.argv[1])
import train_images, autotune
train_images.train(autotune.LoopConfig(**json.load(open(sys.argv[2]))))
"""


@pytest.mark.clients
def test_a_step_of_trls_rollouts_has_all_completions_of_a_prompt(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="trl is not installed: make test-clients")
    client = CLIENTS["trl on rollouts"]
    asked = ("search", "--device", "cpu", "--effective-batch", "18")
    with warm.cold():
        done = run(tmp_path, sys.executable, "-m", "autotune", *asked, "--", str(CODE / client.file), *client.words)
    assert done.returncode != 0
    assert "tune_with_grpo.py generates 4 completions of each prompt" in done.stderr
    assert "--effective-batch 16 or 20" in done.stderr


@pytest.mark.clients
def test_memory_of_trls_engine_in_the_same_process_is_in_the_peaks(tmp_path: Path) -> None:
    """A stand-in for vLLM, which holds 256 MiB; without one, TRL's own words end the search."""
    pytest.importorskip("trl", reason="trl is not installed: make test-clients")
    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("vLLM itself is installed")
    client = CLIENTS["trl on rollouts"]
    script = ("--", str(CODE / client.file), *client.words, "--use_vllm", "true", "--vllm_mode", "colocate")
    autotune = (sys.executable, "-m", "autotune")
    with warm.cold():
        without = run(tmp_path, *autotune, "search", *BUDGET, *script)
        searched = run(tmp_path, *autotune, "search", *BUDGET, *script, packages=ROOT / "tests" / "stand_ins")
        assert searched.returncode == 0, searched.stderr
        trials = json.loads(run(tmp_path, *autotune, "show", "s", "--json").stdout)["trials"]
    assert "vLLM is not available" in without.stderr
    assert len(trials) == 2
    assert all(256 * MIB < trial["peak_reserved_bytes"] < 512 * MIB for trial in trials)
