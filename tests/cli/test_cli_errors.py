"""Test errors: one line with the value, one with the next step, an exit code, and no files left behind."""

import json
import os
import shlex
import socket
import subprocess
from pathlib import Path
from typing import IO

import pytest
from command_line import Ran, Run, Studied, command, environment, run_process
from messages import check_messages

from autotune.devices.listing import find_device

BERT = ("search", "--model", "bert-tiny", "--device", "cpu")


def check_error(ran: Ran, code: int, *named: str) -> None:
    """The form of every error, and what its two lines have to name."""
    assert ran.code == code, ran.stderr
    assert not ran.stdout
    lines = [line for line in ran.stderr.splitlines() if not line.startswith(("starting", "reading"))]
    assert len(lines) == 2, ran.stderr
    assert lines[0].startswith("autotune: error: ")
    assert lines[1].startswith("  ")
    assert lines[1].strip()
    for word in named:
        assert word in ran.stderr


# Arguments after the model and the device, exit code, what the error names.
REQUESTS: list[tuple[str, int, tuple[str, ...]]] = [
    ("--effective-batch 12 --batch-multiple 8", 2, ("--batch-multiple 8", "12", "1, 2, 3, 4, 6, 12")),
    ("--effective-batch 64 --world-size 3", 2, ("64", "3 devices", "63 or 66")),
    ("--effective-batch 0", 2, ("'0'", "--effective-batch")),
    ("--effective-batch 99999999999999999999", 2, ("99999999999999999999", "2147483647")),
    ("--effective-batch 6.5", 2, ("6.5", "whole number")),
    ("--world-size 2", 2, ("--world-size 2", "--effective-batch")),
    ("--precision tf32", 4, ("tf32", "fp32")),
    ("--precision fp16,fp32", 4, ("fp16", "fp32")),
    ("--precision int8", 2, ("int8", "bf16")),
    ("--precision ,", 2, ("--precision", "is not a list of one or more")),
    ("--dtype int8", 2, ("int8", "bfloat16")),
    ("--gradient-checkpointing maybe", 2, ("maybe", "auto")),
    ("--memory-limit 24Gig", 2, ("24Gig", "24GiB")),
    ("--memory-limit 24", 2, ("'24'", "24GiB")),
    ("--headroom 100%", 2, ("100%", "5%")),
    ("--time-budget soon", 2, ("soon", "90s")),
    ("--trial-timeout 0s", 2, ("0s", "between 0")),
    ("--trials 0", 2, ("'0'", "--trials")),
    ("--seq-len 0", 2, ("'0'", "--seq-len")),
    ("--seq-len 1024", 2, ("--seq-len 1024", "512")),
    ("--padding 1", 2, ("'1'", "below 1")),
    ("--seed -1", 2, ("'-1'", "--seed")),
    ("--task dancing", 2, ("dancing", "causal-lm")),
    ("--study a/b", 2, ("a/b", "letters")),
    ("--packing on", 2, ("there is no file on",)),
    ("--efective-batch 64", 2, ("--efective-batch", "--effective-batch")),
    ("--storage nowhere://x", 5, ("nowhere://x", "--storage")),
]


def test_messages_of_settings_that_have_nothing_to_pad(run: Run, folder: Path) -> None:
    texts = folder / "texts.jsonl"
    texts.write_text('{"text": "a b c"}\n')
    data = ("--effective-batch", "8", "--dataset", str(texts), "--tokenizer", str(folder))
    free = "--lever padding_free=on"
    told = {}
    for line in (f"{free} --pad-to-max-length", f"{free} --pad-to-multiple-of 8", "--packing --lever padding_free=off"):
        ran = run("search", "--model", "llama-3.2-1b", *data, *line.split())
        check_error(ran, 2)
        told[line] = ran.stderr.splitlines()
    check_messages("nothing-to-pad", told)


@pytest.mark.parametrize(("words", "code", "named"), REQUESTS, ids=[words for words, _, _ in REQUESTS])
def test_a_search_that_cannot_be(words: str, code: int, named: tuple[str, ...], run: Run, folder: Path) -> None:
    """Refused before any process is started and anything is written."""
    ran = run(*BERT, *words.split())
    check_error(ran, code, *named)
    assert "starting" not in ran.stderr
    assert not list(folder.iterdir())


def test_a_precision_that_the_weights_cannot_have(run: Run, folder: Path) -> None:
    """Where the CPU has it; where it has not, that is what is wrong."""
    code = 2 if "bf16" in find_device("cpu").precisions else 4
    check_error(run(*BERT, "--precision", "bf16", "--dtype", "float16"), code, "bf16")
    assert not list(folder.iterdir())


MODELS: list[tuple[tuple[str, ...], int, tuple[str, ...]]] = [
    (("bert-bse-uncased",), 3, ("bert-bse-uncased", "bert-base-uncased", "autotune models")),
    (("./nowhere",), 3, ("./nowhere", "no such folder")),
    ((".",), 3, ("'.'", "config.json")),
    (("",), 3, ("''", "autotune models")),
    (("vit-tiny", "--seq-len", "32"), 2, ("--seq-len 32", "images")),
    (("vit-tiny", "--padding", "0.5"), 2, ("--padding 0.5", "not text")),
    (("gpt2-tiny", "--pretrained"), 2, ("gpt2-tiny", "--pretrained")),
    # What only the process for trials can know costs its start, a few seconds each.
    (("bert-large-uncased", "--memory-limit", "1GiB"), 6, ("1.0 GiB", "bert-large-uncased", "5.0 GiB", "5.15GiB")),
    (("bert-tiny", "--attn", "nonsense"), 2, ("--attn nonsense", "eager", "sdpa")),
    (("bert-tiny", "--task", "seq2seq-lm"), 3, ("bert-tiny", "seq2seq-lm", "--task")),
]


@pytest.mark.parametrize(("words", "code", "named"), MODELS, ids=[" ".join(words) for words, _, _ in MODELS])
def test_a_model_that_cannot_be(
    words: tuple[str, ...], code: int, named: tuple[str, ...], run: Run, folder: Path
) -> None:
    check_error(run("search", "--device", "cpu", "--model", *words), code, *named)
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    ("device", "code"), [("cuda:0", 4), ("cuda", 4), ("GPU-01234567", 4), ("gpu", 2), ("", 2), ("cuda:x", 2)]
)
def test_a_device_that_is_not_there(device: str, code: int, run: Run, folder: Path) -> None:
    check_error(run("search", "--model", "bert-tiny", "--device", device), code, device, "cpu")
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (("serch",), 2, ("serch", "autotune --help")),
        (("search",), 2, ("--model",)),
        (("show",), 2, ("STUDY", "autotune show --help")),
        (("show", "tiny"), 5, ("studies/autotune.db", "search")),
        (("export", "tiny"), 5, ("studies/autotune.db", "search")),
        (("resume", "tiny"), 5, ("studies/autotune.db", "search")),
        (("predict", "--memory-limit", "8GiB"), 2, ("--model",)),
        (("predict", "--model", "bert-tiny"), 2, ("--gpu rtx-3090",)),
        (("predict", "--model", "bert-tiny", "--gpu", "voodoo-2"), 2, ("voodoo-2", "rtx-3090")),
        (("export", "tiny", "--format", "xml"), 2, ("xml", "yaml")),
        (("studies",), 5, ("studies/autotune.db", "search")),
        (("dashboard",), 5, ("studies/autotune.db", "search")),
        (("dashboard", "--port", "99999"), 2, ("99999", "65535")),
        (("db", "current"), 5, ("studies/autotune.db", "search")),
        (("db", "downgrade"), 2, ("downgrade", "autotune db --help")),
        (("db", "upgrade", "--storage", ""), 5, ("no name", "--storage")),
        (("verify", "tiny", "--gpus", "2"), 2, ("autotune verify has no option --gpus;", "search", "resume")),
        (("search", "--effective-batch"), 2, ("requires an argument", "autotune search --help")),
        (("resume", "tiny", "--strategy", "ddp"), 2, ("no option --strategy; autotune search and predict have it",)),
        (("devices", "now"), 2, ("now", "autotune devices --help")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_a_command_that_cannot_be(
    arguments: tuple[str, ...], code: int, named: tuple[str, ...], run: Run, folder: Path
) -> None:
    """Looking at what is not there makes nothing."""
    check_error(run(*arguments), code, *named)
    assert not list(folder.iterdir())


def test_a_study_of_other_options_is_not_continued(studied: Studied, run: Run) -> None:
    words = ("--seq-len", "32", "--effective-batch", "8", "--study", "tiny", "--storage", studied.storage)
    check_error(run(*BERT, *words), 2, "tiny", "effective_batch", "--study")


def test_a_database_that_is_none(run: Run, folder: Path) -> None:
    """For every command; the file stays as it was, and no process is started."""
    file = folder / "text.db"
    file.write_text("no database\n")
    for arguments in (BERT, ("show", "tiny"), ("studies",), ("export", "tiny"), ("db", "upgrade"), ("db", "current")):
        ran = run(*arguments, "--storage", "text.db")
        check_error(ran, 5, "text.db", "--storage")
        assert "starting" not in ran.stderr
    assert file.read_text() == "no database\n"
    assert list(folder.iterdir()) == [file]


@pytest.mark.parametrize("storage", ["file/studies.db", "file"])
def test_a_place_where_no_database_can_be(storage: str, run: Run, folder: Path) -> None:
    """A file where a folder would have to be; also where logs would have to go."""
    (folder / "file").write_text("in the way")
    check_error(run(*BERT, "--storage", storage), 5, storage, "--storage")
    assert [path.name for path in folder.iterdir()] == ["file"]


def test_logs_that_have_no_place(run: Run, folder: Path) -> None:
    """The database could be made, but not the folder beside it."""
    (folder / "logs").write_text("in the way")
    check_error(run(*BERT, "--storage", "studies.db"), 5, "logs", "--storage")
    assert [path.name for path in folder.iterdir()] == ["logs"]


def test_a_busy_port(studied: Studied, run: Run) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        check_error(run("dashboard", "--port", port, "--storage", studied.storage), 2, port, "--port")


def test_a_config_of_which_no_model_can_be_built(run: Run, folder: Path) -> None:
    """The library's own words are passed on; what was in the folder stays alone."""
    (folder / "model").mkdir()
    config = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 7}
    (folder / "model" / "config.json").write_text(json.dumps(config))
    check_error(run("search", "--device", "cpu", "--model", "./model"), 3, "./model", "hidden size", "config.json")
    assert [path.name for path in folder.iterdir()] == ["model"]


def test_a_limit_under_which_nothing_fits(tmp_path: Path) -> None:
    """A real out-of-memory: the trial is recorded, the answer is an error, standard output stays empty."""
    words = ("--seq-len", "512", "--effective-batch", "1", "--precision", "fp32", "--gradient-checkpointing", "off")
    ran = run_process(*BERT, *words, "--memory-limit", "70MiB", "--study", "tight", "--json", folder=tmp_path)
    assert ran.code == 6, ran.stderr
    assert not ran.stdout
    error, hint = ran.stderr.splitlines()[-2:]
    assert error.startswith("autotune: error: nothing fits under 67.9 MiB (70.0 MiB less headroom)")
    assert "--memory-limit" in hint
    shown = run_process("show", "tight", "--json", folder=tmp_path).document
    assert shown["best"] is None
    assert [trial["state"] for trial in shown["trials"]] == ["out_of_memory"]
    assert run_process("export", "tight", folder=tmp_path).code == 7
    assert "1 trial (1 out of memory)" in run_process("show", "tight", folder=tmp_path).stdout


# Output that cannot go anywhere.
def run_into(stdout: IO[str] | int, *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command whose output goes there."""
    to = {"stdout": stdout, "stderr": subprocess.PIPE, "text": True}
    return subprocess.run(command(*words), cwd=folder, env=environment(), timeout=240, **to)  # type: ignore[call-overload]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_is_an_error_of_one_line(tmp_path: Path) -> None:
    """Standard output is redirected to it."""
    with open("/dev/full", "w") as full:
        ended = run_into(full, "models", folder=tmp_path)
    assert ended.returncode == 1
    assert "No space left" in ended.stderr.splitlines()[0]
    assert "Traceback" not in ended.stderr


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    """As ``autotune models --json | head -1``."""
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    ended = run_into(write_fd, "models", "--json", folder=tmp_path)
    os.close(write_fd)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_closed_stdout_is_no_error(studied: Studied, tmp_path: Path) -> None:
    """As ``autotune show STUDY >&-``."""
    words = shlex.join(command("show", "tiny", "--storage", studied.storage))
    ended = subprocess.run(
        f"{words} >&-", shell=True, cwd=tmp_path, env=environment(), timeout=240, stderr=subprocess.PIPE
    )
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_a_terminal_without_unicode_is_no_error(studied: Studied, tmp_path: Path) -> None:
    """A question mark stands for what it cannot show."""
    ran = run_process("show", "tiny", "--storage", studied.storage, folder=tmp_path, PYTHONIOENCODING="cp437")
    assert ran.code == 0, ran.stderr
    assert "8 ? 2" in ran.stdout


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("serach",), "did you mean search?"),
        (("predict", "--model", "bert-tiny", "--gpu", "rtx-309"), "did you mean rtx-3090"),
        (("show", "tyni"), "did you mean tiny?"),
        (("resume", "tyni"), "did you mean tiny?"),
        (("export", "tyni"), "did you mean tiny?"),
    ],
)
def test_what_is_nearly_right_is_pointed_out(studied: Studied, run: Run, words: tuple[str, ...], meant: str) -> None:
    ran = run(*words, *(("--storage", studied.storage) if words[0] != "serach" else ()))
    check_error(ran, 9 if "tyni" in words else 2, meant)
