"""Test how launchers are removed from a command line, or refused with the command that works."""

import sys
from functools import partial
from pathlib import Path

import pytest
from messages import check_refusals

from autotune.core.errors import InvalidRequestError
from autotune.core.launch_command import find_command, without_launchers
from autotune.core.training_source import find_script


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a script, and no accelerate configuration of this machine's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    (tmp_path / "train.py").write_text("raise AssertionError('nobody runs this')\n")
    return tmp_path


@pytest.mark.parametrize(
    ("command", "left"),
    [
        ("train.py --lr 1", "train.py --lr 1"),
        ("python -u train.py -m x", "train.py -m x"),
        ("torchrun train.py --lr 1", "train.py --lr 1"),
        ("torchrun --standalone --nproc_per_node=1 --nnodes 1:1 train.py --nproc 2", "train.py --nproc 2"),
        ("python -m torch.distributed.run --nproc-per-node 1 -m pack.train --x", "-m pack.train --x"),
        ("python3 -m torch.distributed.launch --use_env train.py", "train.py"),
        ("accelerate launch train.py --lr 1", "train.py --lr 1"),
        ("accelerate launch --num_processes 1 --gpu_ids 0 python train.py", "train.py"),
        (".venv/bin/accelerate launch --num_machines=1 -m pack.train", "-m pack.train"),
        ("python -m accelerate.commands.launch --cpu train.py", "train.py"),
        ("python -m accelerate.commands.accelerate_cli launch train.py", "train.py"),
        ("trl sft --config sft.yaml", "-m trl.scripts.sft --config sft.yaml"),
        (".venv/bin/trl dpo --x 1", "-m trl.scripts.dpo --x 1"),
        ("swift sft --model m --output_dir out", "-m swift.cli.sft --model m --output_dir out"),
        ("llamafactory-cli train c.yaml lr=1", "-m llamafactory.launcher c.yaml lr=1"),
        ("axolotl train c.yaml --launcher torchrun --num-processes 1 --lr 1", "-m axolotl.cli.train c.yaml --lr 1"),
        ("./ray/train.py", "./ray/train.py"),
    ],
)
def test_a_launcher_of_one_process_is_taken_off(command: str, left: str) -> None:
    assert " ".join(without_launchers(command.split()).words) == left


def test_variables_that_have_ranks_share_a_sample_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "2")
    assert without_launchers(["train.py"]).words == ("train.py",)
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    with pytest.raises(InvalidRequestError, match="PARALLELISM_CONFIG_CP_SIZE has several ranks share a sample"):
        without_launchers(["train.py"])


def test_a_launcher_that_is_told_its_processes_by_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPROC_PER_NODE", "2")
    with pytest.raises(InvalidRequestError, match="starts several processes") as refused:
        without_launchers(["swift", "sft", "--x", "1"])
    assert "python -m swift.cli.sft --x 1" in refused.value.hint
    assert without_launchers(["swift", "sft"], ranks=2).words == ("-m", "swift.cli.sft")


def test_the_precision_that_a_launcher_sets_is_kept(folder: Path) -> None:
    words = ["accelerate", "launch", "--mixed_precision", "bf16", "train.py"]
    assert without_launchers(words).variables == (("ACCELERATE_MIXED_PRECISION", "bf16"),)
    (folder / "config.yaml").write_text("mixed_precision: fp16\nnum_processes: 1\ndistributed_type: 'NO'\n")
    source = find_script(["accelerate", "launch", "--config_file", "config.yaml", "train.py"])
    assert source.variables == (("ACCELERATE_MIXED_PRECISION", "fp16"),)


REFUSED = """\
torchrun --nproc_per_node 4 train.py --x 1
torchrun --nproc-per-node gpu train.py
python -m torch.distributed.run --nnodes 2 train.py
torchrun --no-python train.sh
torchrun --nproc-per-node
accelerate launch --multi_gpu train.py
accelerate launch --num_processes=2 train.py
accelerate launch --use_fsdp train.py
accelerate launch --use_parallelism_config --parallelism_config_cp_size 2 train.py
accelerate launch --config_file no.yaml train.py
accelerate launch --x train.py
accelerate test
trl sft --num_processes 2 --x
trl --help
deepspeed --num_gpus 2 train.py --x
uv run train.py --x
poetry run python train.py
bash train.sh
sh -c
nohup python train.py --x
srun -n 4 python train.py
"""
REFUSED_FOR_TWO_RANKS = """\
torchrun --nproc_per_node 4 train.py
torchrun --nnodes 2 --nproc_per_node 2 train.py
accelerate launch --num_processes 1 train.py
accelerate launch --config_file fsdp.yaml train.py
accelerate launch --config_file cp.yaml train.py
"""


def test_messages_of_launchers_that_are_refused(folder: Path) -> None:
    shared = "distributed_type: FSDP\nnum_processes: 2\nparallelism_config:"
    (folder / "fsdp.yaml").write_text(f"{shared} {{}}\n")
    (folder / "cp.yaml").write_text(f"{shared}\n  parallelism_config_cp_size: 2\n")
    cases = {line: partial(without_launchers, line.split()) for line in REFUSED.splitlines()}
    for line in REFUSED_FOR_TWO_RANKS.splitlines():
        cases[f"of two ranks: {line}"] = partial(without_launchers, line.split(), 2)
    check_refusals("launchers", cases)


def test_an_accelerate_configuration_of_several_processes_is_refused(folder: Path) -> None:
    default = folder / "home" / "accelerate" / "default_config.yaml"
    default.parent.mkdir(parents=True)
    default.write_text("distributed_type: MULTI_GPU\nnum_processes: 2\n")
    with pytest.raises(InvalidRequestError, match=r"num_processes: 2 in .*default_config.yaml"):
        without_launchers(["accelerate", "launch", "train.py"])
    assert without_launchers(["accelerate", "launch", "--num_processes", "1", "train.py"]).words == ("train.py",)


@pytest.mark.parametrize(
    "command",
    [
        "torchrun --nproc_per_node 2 train.py --lr 1",
        "torchrun --standalone --nproc-per-node=gpu train.py --lr 1",
        "torchrun train.py --lr 1",
        "accelerate launch --multi_gpu --num_processes 2 train.py --lr 1",
        "accelerate launch --config_file two.yaml train.py --lr 1",
        "python train.py --lr 1",
        "trl sft --num_processes 2 --lr 1",
    ],
)
def test_a_launcher_of_as_many_processes_as_a_trial_has_ranks_is_taken_off(folder: Path, command: str) -> None:
    (folder / "two.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 2\nmixed_precision: bf16\n")
    launched = without_launchers(command.split(), 2)
    script = ("-m", "trl.scripts.sft") if command.startswith("trl") else ("train.py",)
    assert launched.words == (*script, "--lr", "1")
    has_precision = "two.yaml" in command
    assert launched.variables == ((("ACCELERATE_MIXED_PRECISION", "bf16"),) if has_precision else ())


def test_a_console_command_is_found_on_the_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = folder / "bin"
    commands.mkdir()
    own, foreign = commands / "trainer-cli", commands / "foreign-cli"
    own.write_text("#!/usr/bin/env bash\n")
    own.write_text(f"#!{sys.executable}\nprint('trains')\n")
    foreign.write_text("#!/opt/other/bin/python3\nprint('trains')\n")
    for file in (own, foreign):
        file.chmod(0o755)
    monkeypatch.setenv("PATH", str(commands))
    assert find_script(["trainer-cli", "train", "x.yaml"]).file == str(own)
    assert find_command("no-such-command") is None
    with monkeypatch.context() as inactive:
        inactive.setenv("PATH", "/nowhere")
        inactive.setattr(sys, "executable", str(commands / "python"))
        assert find_command("trainer-cli") == str(own)
    with pytest.raises(InvalidRequestError, match="foreign-cli belongs to another Python, /opt/other/bin/python3"):
        find_script(["foreign-cli", "train"])


def test_a_notebook_and_a_shell_script_say_what_they_are(folder: Path) -> None:
    (folder / "lora.ipynb").write_text('{"cells": []}')
    (folder / "run").write_text("#!/bin/bash\nexec python train.py\n")
    with pytest.raises(InvalidRequestError, match=r"lora.ipynb is a notebook") as raised:
        find_script(["lora.ipynb"])
    assert "jupyter nbconvert --to script lora.ipynb" in raised.value.hint
    with pytest.raises(InvalidRequestError, match=r"the script ./run is run by a shell"):
        find_script(["./run"])
