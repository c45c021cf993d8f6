"""The README against the code: what it names exists, what exists it names, and its script trains."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import sys
import tomllib
from pathlib import Path

import warm
from checkout import ROOT, files

from autotune.cli.main import cli, exit_codes
from autotune.cli.search import search

README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def section(title: str) -> str:
    """What stands under a heading of the second level."""
    return README.split(f"\n## {title}\n")[1].split("\n## ")[0]


def listed_files() -> list[str]:
    """The paths of the file tree; the last part may be a pattern. Folders end in a slash."""
    (tree,) = blocks("text")
    found: list[str] = []
    folders: list[str] = []
    for line in tree.splitlines():
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        del folders[depth:]
        if name.endswith("/"):
            folders.append(name)
        else:
            assert len(line.split()) > 1, f"{name} has no word of explanation"
            found.append("".join(folders) + name)
    return found


def test_the_file_tree_has_every_file() -> None:
    """Each of those that are kept stands there, once."""
    listed = listed_files()
    assert len(set(listed)) == len(listed)
    missing = {name for name in files() if not any(fnmatch.fnmatchcase(name, pattern) for pattern in listed)}
    assert not missing


def test_the_file_tree_invents_no_file() -> None:
    """Each that stands there exists."""
    assert [pattern for pattern in listed_files() if not list(ROOT.glob(pattern))] == []


def test_every_command_is_described() -> None:
    """And none that is not there."""
    described = re.findall(r"^\| `autotune ([a-z]+)", section("Commands"), flags=re.MULTILINE)
    assert sorted(described) == sorted(cli.list_commands(None))  # type: ignore[arg-type]


def test_every_option_of_search_is_described() -> None:
    """And none that is not there."""
    rows = section("Commands").split("Options of `autotune search`")[1].split("An error is")[0]
    described = re.findall(r"`(--[a-z-]+)`", rows)
    options = [param.opts[0] for param in search.params if param.param_type_name == "option"]
    assert sorted(set(described) - {"--help", "--"}) == sorted(options)


def test_every_exit_code_is_described() -> None:
    """And none that is not there."""
    rows = section("Commands").split("| exit code |")[1]
    assert [int(code) for code in re.findall(r"^\| (\d+) \|", rows, flags=re.MULTILINE)] == list(exit_codes())


def test_the_transcript_looks_as_a_search_does_today() -> None:
    """The head of the table is the one that is printed now; it is replaced by a new run, not by hand."""
    transcript = blocks("console")[0]
    assert transcript.startswith("$ autotune search --model bert-large-uncased --effective-batch 64")
    assert " # batch×acc  configuration            samples/s        peak    took  × baseline\n" in transcript
    assert "\nBest: per-device batch " in transcript
    assert "\nNext:\n" in transcript


def test_the_layers_are_those_of_the_import_contract() -> None:
    """The picture and the tool say the same."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    expected = [sorted(re.findall(r"autotune\.(\w+)", layer)) for layer in layers]
    picture = next(part for part in section("Development").split("\n\n") if part.startswith("    cli >"))
    assert [sorted(layer.split()) for layer in picture.split(">")] == expected


SETTINGS = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

MAKE_TINY_MODEL = """
import sys
from autotune import catalog
from transformers import AutoConfig, AutoModelForSequenceClassification
settings = dict(catalog.find("bert-tiny").config)
config = AutoConfig.for_model(settings.pop("model_type"), **settings)
AutoModelForSequenceClassification.from_config(config).save_pretrained(sys.argv[1])
"""


def run(*words: str, folder: Path) -> str:
    """What a Python program says on stdout; an error of the test where it fails."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, **SETTINGS, "PYTHONPATH": path}
    ended = warm.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_script_is_short() -> None:
    """Twenty lines are what it takes."""
    (script,) = blocks("python")
    assert len([line for line in script.splitlines() if line.strip()]) <= 20


def test_the_script_trains_with_an_export(tmp_path: Path) -> None:
    """A real search of a tiny model, its export, and the script as it stands in the README."""
    (script,) = blocks("python")
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    run("-c", MAKE_TINY_MODEL, "tiny", folder=tmp_path)
    words = ("--model", "./tiny", "--effective-batch", "4", "--trials", "2", "--device", "cpu", "--study", "tiny")
    run("-m", "autotune", "search", *words, folder=tmp_path)
    exported = run("-m", "autotune", "export", "tiny", folder=tmp_path)
    (tmp_path / "training_arguments.json").write_text(exported, encoding="utf-8")
    assert json.loads(exported)["per_device_train_batch_size"] in (1, 2, 4)
    printed = run("train.py", "./tiny", "training_arguments.json", folder=tmp_path)
    assert re.search(r"^\d+\.\d samples/s$", printed, flags=re.MULTILINE), printed


def test_the_texts_are_made_and_searched_on(tmp_path: Path) -> None:
    """By the file as it stands in the README; what is said of them is what it shows."""
    texts, _ = blocks("py")
    (tmp_path / "make_texts.py").write_text(texts, encoding="utf-8")
    run("make_texts.py", folder=tmp_path)
    words = ("--model", "bert-tiny", "--dataset", "train.jsonl", "--tokenizer", "tok", "--seq-len", "128")
    more = ("--effective-batch", "32", "--device", "cpu", "--trials", "1")
    run("-m", "autotune", "search", *words, *more, folder=tmp_path)
    shown = run("-m", "autotune", "show", "bert-tiny-32", folder=tmp_path)
    told = next(line for line in shown.splitlines() if "train.jsonl" in line).strip()
    assert f"data    {told.split('; ')[0]}" in README


def test_the_trainer_is_searched_and_trains_with_an_export(tmp_path: Path) -> None:
    """The file as it stands in the README, on one candidate, and then by itself."""
    _, trainer = blocks("py")
    (tmp_path / "train.py").write_text(trainer, encoding="utf-8")
    words = (
        "--trainer",
        "train.py:build",
        "--effective-batch",
        "4",
        "--trials",
        "1",
        "--no-baseline",
        "--device",
        "cpu",
    )
    run("-m", "autotune", "search", *words, "--study", "own", folder=tmp_path)
    exported = run("-m", "autotune", "export", "own", folder=tmp_path)
    assert json.loads(exported)["per_device_train_batch_size"] in (1, 2, 4)
    train = f"import train; print(train.build({{**json.loads({exported!r}), 'max_steps': 1}}).train().global_step)"
    assert run("-c", f"import json; {train}", folder=tmp_path).splitlines()[-1] == "1"
