"""Test the output of a search: a document or a summary on stdout, everything else on stderr."""

import contextlib
import fcntl
import os
import pty
import re
import shlex
import struct
import subprocess
import termios
from pathlib import Path

from command_line import TINY_SEARCH, Studied, command, environment, run_process, start
from processes import wait_until

from autotune.cli.output import wrapped


def test_the_document_tells_what_was_measured(studied: Studied) -> None:
    document = studied.document
    assert document["study"] == "tiny"
    assert document["workload"]["seq_len"] == 32
    assert document["environment"]["packages"]["torch"]
    assert document["ceiling_bytes"] > 0
    assert document["baseline"]["number"] == document["trials"][0]["number"]
    # The mean of its processes: where it is the winner, too, it may have been measured again.
    settings = ("per_device_train_batch_size", "precision", "gradient_checkpointing")
    own = [each for each in document["trials"] if all(each[name] == document["baseline"][name] for name in settings)]
    speeds = [each["samples_per_second"] for each in own]
    # A winner's speed is corrected for its having been chosen, on a noisy machine by more than rounding.
    is_winner = all(document["best"][name] == document["baseline"][name] for name in settings)
    least = document["next_run"]["samples_per_second_low"] if is_winner else 0.999 * min(speeds)
    assert least < document["baseline"]["samples_per_second"] < 1.001 * max(speeds)
    for trial in document["trials"]:
        assert trial["state"] == "completed"
        assert trial["per_device_train_batch_size"] * trial["gradient_accumulation_steps"] == 16
        assert abs(trial["samples_per_second"] * trial["step_seconds"] - 16) < 1e-6
        assert 0 < trial["peak_reserved_bytes"] <= document["ceiling_bytes"]
    assert sum(trial["seconds"] for trial in document["trials"]) <= document["seconds"]


def test_without_a_terminal_stderr_has_plain_lines(studied: Studied) -> None:
    """What is searched, a head, a line a trial: nothing that moves a cursor, nothing that spins."""
    lines = studied.ran.stderr.splitlines()
    assert "\x1b" not in studied.ran.stderr
    assert "\r" not in studied.ran.stderr
    head = next(index for index, line in enumerate(lines) if line.startswith(" # batch×acc"))
    assert [line.split()[0] for line in lines[1:head]] == ["model", "data", "device", "memory", "study"]
    rows = lines[head + 1 :]
    assert [int(row.split()[0]) for row in rows] == [0, 1, 2]
    assert rows[0].endswith("baseline")
    for row, trial in zip(rows, studied.document["trials"], strict=True):
        assert f"{trial['per_device_train_batch_size']} × {trial['gradient_accumulation_steps']}" in row
        assert re.search(r"\d (MiB|GiB)", row)


def test_the_log_of_every_trial_is_beside_the_database(studied: Studied) -> None:
    logs = Path(studied.storage).parent / "logs" / "tiny"
    assert {Path(trial["log_path"]) for trial in studied.document["trials"]} <= set(logs.iterdir())


def test_the_next_commands_can_be_pasted(studied: Studied, tmp_path: Path) -> None:
    """On stdout, below the answer, with the database quoted; a budget of one trial continues no study."""
    storage = tmp_path / "my studies.db"
    options = ("--effective-batch", "16", "--trials", "1", "--no-baseline", "--storage", str(storage))
    ran = run_process(*TINY_SEARCH, *options, folder=tmp_path)
    assert ran.code == 0, ran.stderr
    assert "× baseline" not in ran.stderr
    answer, _, following = ran.stdout.partition("\n\nNext:\n")
    assert answer.startswith("Best: per-device batch")
    export, resume, show, report, _ = following.splitlines()
    assert resume.split()[1:4] == ["resume", "tiny-bert-16", "--storage"]
    assert resume.endswith(" --trials 2")
    exported = subprocess.run(
        export.replace("autotune", " ".join(command()), 1),
        shell=True,
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert exported.returncode == 0, exported.stderr
    for line in (show, report):
        shown = run_process(*shlex.split(line)[1:], folder=tmp_path)
        assert shown.code == 0, shown.stderr
    assert (tmp_path / "training_arguments.json").stat().st_size > 0
    assert "<html" in (tmp_path / "report.html").read_text()


def _terminal(columns: int) -> tuple[int, int]:
    """Both ends of a pseudo-terminal, ours first."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    return ours, theirs


def _read_to_end(ours: int) -> bytes:
    """What was written to a pseudo-terminal until its other end was closed."""
    shown = b""
    # What Linux answers once the other end is closed.
    with contextlib.suppress(OSError):
        while chunk := os.read(ours, 4096):
            shown += chunk
    os.close(ours)
    return shown


def test_a_terminal_sees_a_status_line(tmp_path: Path) -> None:
    """On a pseudo-terminal of 20 columns: what happens now is shown, and gone at the end."""
    ours, theirs = _terminal(20)
    options = ("--effective-batch", "8", "--trials", "1")
    env = {**environment(), "TERM": "xterm-256color"}
    search = start(*TINY_SEARCH, *options, folder=tmp_path, env=env, stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    shown = _read_to_end(ours)
    assert wait_until(lambda: search.poll() is not None, 60)
    stdout = search.stdout.read().decode()
    assert search.returncode == 0, shown.decode()
    assert stdout.startswith("Best: per-device batch 8")
    assert b"\x1b[?25l" in shown, "the cursor is hidden while the status line is there"
    assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l"), "and shown again at the end"
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert "starting" in text
    assert re.search(r" 0\s+8 × 1\s+fp32\s", text)


def test_a_number_is_not_parted_from_its_interval() -> None:
    assert wrapped("* bf16  67.0 (41.5–107.3)", 22) == "* bf16\n    67.0 (41.5–107.3)"


def test_a_terminal_shows_no_line_that_is_wider(studied: Studied, tmp_path: Path) -> None:
    """Longer ones are broken between words, and go on indented; a file gets them whole."""
    show = ("show", studied.name, "--storage", studied.storage)
    ours, theirs = _terminal(60)
    shower = start(*show, folder=tmp_path, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = _read_to_end(ours).decode()
    assert wait_until(lambda: shower.poll() is not None, 60)
    whole = run_process(*show, folder=tmp_path).stdout
    assert max(map(len, whole.splitlines())) > 60
    # A word, such as the path of a model, is not broken.
    assert [line for line in shown.splitlines() if len(line) > 60 and len(line.split()) > 1] == []
    assert shown.split() == whole.split()
    assert "\n      " in shown.replace("\r", "")
