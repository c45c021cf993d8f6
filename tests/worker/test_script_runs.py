"""Test runs of a script beside one another, which show what they show in turn."""

import json
import math
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest
import warm

from autotune.core.scratch import Scratch, make_scratch
from autotune.execution.protection import find_protection
from autotune.worker.user.script_runs import ScriptRuns

# BEFORE names what happens before the training begins, by the batch: 4 and 2, and 3 by itself.
SCRIPT = """
import argparse, os, socket, subprocess, sys, time
p = argparse.ArgumentParser()
p.add_argument("-b", type=int, default=3)
p.add_argument("--accum", type=int, default=1)
args = p.parse_args()
with open(f"begun-{args.b}", "w") as file:
    file.write(str(os.getpid()))
def wait_for(path):
    while not os.path.exists(path):
        time.sleep(0.01)
exec(os.environ.get("BEFORE", ""))
import torch
net = torch.nn.Linear(8, 8)
opt = torch.optim.SGD(net.parameters(), 0.1)
for step in range(3):
    for _ in range(args.accum):
        net(torch.randn(args.b, 8)).mean().backward()
    open(f"done-{args.b}", "w").close()
    print("step", step, "of", args.b)
    opt.step(), opt.zero_grad()
"""


@pytest.fixture(autouse=True)
def script(folder: Path) -> Path:
    (folder / "train.py").write_text(SCRIPT)
    return folder


def inspected(how: str, before: str = "", protection: str = "none") -> dict[str, Any]:
    """What is said of the script."""
    for path in Path.cwd().glob("done-*"):
        path.unlink()
    program = str(Path(__file__).with_name("inspect_script.py"))
    words = ["python", "train.py", "-b", "{batch}", "--accum", "{accumulation}"]
    said: dict[str, Any] = json.loads(warm.output_of(program, how, protection, before, *words))
    return said


@pytest.mark.parametrize(("last", "then", "first"), [(3, 2, 4), (4, 2, 3)])
def test_whichever_ends_first_the_answer_is_that_of_runs_in_turn(last: int, then: int, first: int) -> None:
    """Each waits for one that would begin after it in one of these orders."""
    wait = f"args.b == {first} or wait_for('done-%s' % {{ {then}: {first}, {last}: {then} }}[args.b])"
    beside = inspected("beside", wait)
    assert beside["answer"]["inspection"]["model"]["own"]["per_device_train_batch_size"] == 3
    assert beside == inspected("in-turn")


def test_trials_find_what_the_last_run_has_written() -> None:
    kind = find_protection().kind
    said = inspected("beside", "time.sleep(4 - args.b)", kind)
    assert said == inspected("in-turn", "", kind)
    assert said["kept"] == (["begun-3", "done-3"] if kind == "overlay" else [])


def test_the_first_refusal_counts_and_ends_the_others() -> None:
    """With 2 it is refused first, with 4 thereafter; by itself it would never end, and neither would its child."""
    before = """
if args.b == 3:
    child = subprocess.Popen(["sleep", "600"])
    with open("child", "w") as file:
        file.write(str(child.pid))
    open("done-3", "w").close()
    time.sleep(600)
wait_for("done-3")
if args.b == 4:
    wait_for("done-2")
open(f"done-{args.b}", "w").close()
raise ValueError(f"no batch of {args.b}")
"""
    beside = inspected("beside", before)
    assert beside["answer"]["problem"]["message"] == "train.py raised ValueError: no batch of 4"
    assert not psutil.pid_exists(int(Path("begun-3").read_text()))
    os.kill(int(Path("child").read_text()), 9)
    assert beside == inspected("in-turn", "raise ValueError(f'no batch of {args.b}')")


def test_an_option_that_only_the_second_run_refuses_is_named() -> None:
    before = "args.b == 2 and p.error('--b must be 4'); args.b == 3 and time.sleep(600)"
    said = inspected("beside", before)
    assert "left with exit code 2: " in said["answer"]["problem"]["message"]
    assert said["answer"]["problem"]["message"].endswith("--b must be 4")
    assert said == inspected("in-turn", before)


def test_what_only_one_run_can_have_is_had_in_turn() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    before = f"""
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
try:
    server.bind(("127.0.0.1", {port}))
except OSError:
    open("taken", "w").close()
    raise
server.listen()
wait_for("taken")
"""
    beside = inspected("beside", before)
    assert Path("taken").exists()
    assert beside["answer"]["inspection"]["model"]["own"] is not None
    assert beside == inspected("in-turn")


def test_a_training_in_another_process_is_told_of_the_second_run_as_well(folder: Path) -> None:
    (folder / "other.py").write_text("import torch\ntorch.ones(1, requires_grad=True).sum().backward()\n")
    before = "args.b == 2 and subprocess.run([sys.executable, 'other.py'])"
    beside = inspected("beside", before)
    assert beside["code"] == -9
    assert beside["stopped"].startswith("train.py trains in another process that it starts: ")
    assert beside == inspected("in-turn", before)


@dataclass
class Said:
    """Where a run has its files."""

    folder: str


@pytest.mark.parametrize(("share", "folders"), [(0.0, ("", "1", "2")), (math.inf, ("", "", ""))])
def test_where_memory_becomes_scarce_runs_go_on_in_turn(share: float, folders: tuple[str, ...]) -> None:
    def run(scratch: Scratch, send: Any) -> NoReturn:
        send(Said(os.path.basename(scratch.path)))

    scratch = make_scratch("autotune-test-")
    runs = ScriptRuns(Said, [run] * 3, scratch, lambda _: False)
    runs.begin_all(share)
    said = [runs.take(at) for at in range(3)]
    job = os.path.basename(scratch.path)
    assert [each and each.folder for each in said] == [folder or job for folder in folders]
    scratch.remove()
