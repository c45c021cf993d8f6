"""What the pages tell a reader to run is run here: their files as they stand, their commands on one candidate.

Heads of searches are compared with what the page shows, numbers masked.
"""

import csv
import json
import os
import re
import sys
from pathlib import Path

import pytest
import warm
from checkout import ROOT
from pages import blocks, read, shown
from printed import without_waits

from autotune.models import catalog

SETTINGS = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
TABLE = " # batch×acc"
# Enough to see how a search looks. The settings of a reader's own code are no answer, so they are left out there.
BRIEFLY = ("--trials", "1")
OWN = ("--no-baseline", "--device", "cpu", *BRIEFLY)


@pytest.fixture(autouse=True)
def smaller_model(tmp_path: Path) -> None:
    """Have the name bert-tiny stand for a model of which a step takes a twentieth."""
    entry = catalog.find("bert-tiny")
    smaller = {"vocab_size": 1000, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    config = {**entry.config, **smaller}
    (tmp_path / "bert-tiny").mkdir()
    (tmp_path / "bert-tiny" / "config.json").write_text(json.dumps(config), encoding="utf-8")


def run(*words: str, folder: Path) -> tuple[str, str]:
    """Return what a Python program says on stdout and stderr; an error of the test where it fails."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, **SETTINGS, "PYTHONPATH": path}
    ended = warm.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout, without_waits(ended.stderr)


def without_numbers(line: str) -> str:
    """Return a line without what differs from run to run: numbers, their units, the winner's precision."""
    line = re.sub(r"\b(?:bf16|fp32)\b", "PRECISION", line)
    line = re.sub(r"\d[\d.,]*[kMG]?(?:m\d+)?", "0", line)
    # A wide interval is told by its ends.
    return re.sub(r"0 (?:[KMGT]iB|ms|s)\b", "0", line).replace("(0 to 0)", "± 0%")


def head_of_search(lines: list[str]) -> list[str]:
    """Return what stands above the table, its own head with it, in any order; the device's name is this machine's.

    The column of the baseline, which is not run here, is left out.
    """
    end = next(number for number, line in enumerate(lines) if line.startswith(TABLE))
    name = next(line.split(", ", 1)[1] for line in lines if line.startswith("device "))
    told = (line.removesuffix("× baseline").rstrip().replace(name, "DEVICE") for line in lines[: end + 1])
    return sorted(map(without_numbers, told))


def answer_of_search(lines: list[str]) -> list[str]:
    """Return the first two lines of the answer."""
    start = next(number for number, line in enumerate(lines) if line.startswith("Best: "))
    return [without_numbers(line) for line in lines[start : start + 2]]


def replay(page: str, command: str, words: tuple[str, ...], folder: Path) -> None:
    """Run a search that a page shows, briefly, and compare what it prints."""
    told = shown(read(page), command)
    stdout, stderr = run("-m", "autotune", *command.split()[1:], *words, folder=folder)
    assert head_of_search(stderr.splitlines()) == head_of_search(told)
    assert answer_of_search(stdout.splitlines()) == answer_of_search(told)


def test_the_tutorial(tmp_path: Path) -> None:
    """A search, its export, and the script that trains with it."""
    page, search = "tutorial.md", "autotune search --model bert-tiny"
    (command,) = re.findall(rf"^\$ ({search}.*)$", read(page), flags=re.MULTILINE)
    replay(page, command, BRIEFLY, tmp_path)
    exported, said = run("-m", "autotune", "export", "bert-tiny-64", folder=tmp_path)
    told = shown(read(page), "autotune export bert-tiny-64")
    # The only trial of this search accumulates; the answer on the page does not.
    told.insert(
        1,
        "before it trains: trainer.model_accepts_loss_kwargs = False, since else nobody divides the loss by "
        "the accumulation",
    )
    assert [without_numbers(line).split(" on ")[0] for line in said.splitlines()] == [
        without_numbers(line).split(" on ")[0] for line in told
    ]
    script, make_model = blocks(read(page), "python")
    assert len([line for line in script.splitlines() if line.strip()]) <= 20
    # One of its steps: most of each is the optimizer's, on 30,522 tokens.
    assert "max_steps=10" in script
    (tmp_path / "train.py").write_text(script.replace("max_steps=10", "max_steps=1"), encoding="utf-8")
    (tmp_path / "make_model.py").write_text(make_model, encoding="utf-8")
    (tmp_path / "training_arguments.json").write_text(exported, encoding="utf-8")
    run("make_model.py", folder=tmp_path)
    printed, _ = run("train.py", "my-bert", "training_arguments.json", folder=tmp_path)
    assert re.search(r"^\d+\.\d samples/s$", printed, flags=re.MULTILINE), printed


def test_the_texts_are_made_and_searched_on(tmp_path: Path) -> None:
    """By the page's own file, and by the script of the page on scripts."""
    page = "how-to/own-data.md"
    (texts,) = blocks(read(page), "py")
    (tmp_path / "make_texts.py").write_text(texts, encoding="utf-8")
    run("make_texts.py", folder=tmp_path)
    (command,) = re.findall(r"^\$ (autotune search --model bert-tiny --dataset.*)$", read(page), flags=re.MULTILINE)
    replay(page, command, BRIEFLY, tmp_path)


def test_the_trainer_is_searched_and_trains_with_an_export(tmp_path: Path) -> None:
    """The page's file on one candidate, and then by itself."""
    page = "how-to/own-trainer.md"
    trainer = next(block for block in blocks(read(page), "py") if "def build" in block)
    sizes = "hidden_size=128"
    assert sizes in trainer
    small = trainer.replace(sizes, "hidden_size=32, intermediate_size=64, vocab_size=1000")
    (tmp_path / "train.py").write_text(small, encoding="utf-8")
    replay(page, "autotune search --trainer train.py:build --effective-batch 32", OWN, tmp_path)
    exported, _ = run("-m", "autotune", "export", "train-build-32", folder=tmp_path)
    small = {**json.loads(exported), "max_steps": 1}
    train = f"import train; print(train.build({small!r}).train().global_step)"
    assert run("-c", train, folder=tmp_path)[0].splitlines()[-1] == "1"


@pytest.mark.whole
def test_the_script_is_searched(tmp_path: Path) -> None:
    """With the page's command, on texts like those that it shows."""
    page = "how-to/own-script.md"
    script = ROOT / "tests" / "own_code" / "classify_texts.py"
    (tmp_path / "classify_texts.py").write_text(script.read_text(encoding="utf-8"), encoding="utf-8")
    with (tmp_path / "texts.csv").open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["text", "label"])
        rows.writerows([" ".join(["alpha", "beta"] * (1 + n % 20)), n % 2] for n in range(200))
    told = read(page)
    (command,) = re.findall(r"^\$ (autotune search --effective-batch 32 -- .*)$", told, flags=re.MULTILINE)
    ours, theirs = command.split(" -- ")
    brief = f"{ours} {' '.join(OWN)} -- {theirs}"
    stdout, stderr = run("-m", "autotune", *brief.split()[1:], folder=tmp_path)
    lines = shown(told, command)
    assert head_of_search(stderr.splitlines()) == head_of_search(lines)
    assert answer_of_search(stdout.splitlines()) == answer_of_search(lines)
