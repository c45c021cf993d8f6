"""Code that trains where nothing measures it is stopped before its first step, in whatever process that is."""

import shlex
import sys
from pathlib import Path

import pytest
from server_client import ServerClient, of_command

from autotune.core.candidate import Arm, Candidate
from autotune.core.training_source import find_script
from autotune.core.workload import Workload

LOOP = """
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    loss = model(torch.ones(4, 2)).mean()
    loss.backward()
    print("has trained", flush=True)
    optimizer.step()
"""
RANKED = """
import argparse, os, torch
p = argparse.ArgumentParser()
p.add_argument("--eval-batch-size", type=int, default=3)
p.add_argument("-b", "--batch-size", type=int, default=3)
p.add_argument("--grad-accum-steps", type=int, default=1)
args = p.parse_args()
rank = int(os.environ["RANK"])
net = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(60):
    net(torch.ones(args.batch_size, 2)).mean().backward()
    optimizer.step()
"""
SPAWNS = """
import torch.multiprocessing
def train(_):
    import loop
if __name__ == "__main__":
    torch.multiprocessing.spawn(train, nprocs=1)
"""
LAUNCHES = "import os\nos.system('torchrun --nproc-per-node 1 loop.py --lr 1')\n"
BECOMES = "import os, sys\nos.execv(sys.executable, [sys.executable, 'loop.py'])\n"
FORKS = "import os\npid = os.fork()\nif not pid:\n    import loop\nos.waitpid(pid, 0)\nprint('has trained')\n"
STEPS_ALONE = (
    "import torch\np = torch.nn.Parameter(torch.ones(1))\np.grad = p.detach()\ntorch.optim.SGD([p], 1).step()\n"
)
OWN_TRAIN = """
from transformers import Trainer, TrainingArguments
import torch
class Rollouts(Trainer):
    def train(self):
        torch.nn.Linear(2, 1)(torch.ones(4, 2)).sum().backward()
        print("has trained", flush=True)
Rollouts(torch.nn.Linear(2, 1), TrainingArguments("out")).train()
"""


@pytest.fixture
def folder(folder: Path) -> Path:
    """A working folder with a loop in it."""
    (folder / "loop.py").write_text(LOOP)
    return folder


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        (LOOP, "run.py trains in a loop of its own at run.py:7", "-- python run.py OPTION '{batch}' (see docs/how-to/"),
        (STEPS_ALONE, "run.py trains in a loop of its own at run.py:4", ""),
        (OWN_TRAIN, "Rollouts of run.py trains by a method of its own, which never calls Trainer.train", ""),
        (SPAWNS, "run.py starts processes of its own to train in (torch.multiprocessing)", ""),
        (LAUNCHES, "run.py starts another process, in which nothing can be measured: torchrun",
         "-- python loop.py --lr 1"),
        (BECOMES, "run.py becomes another process, in which nothing can be measured: ", "-- python loop.py"),
        (FORKS, "run.py trains in a loop of its own at loop.py:7", ""),
    ],
    ids=["loop", "step alone", "own train", "spawns", "launches", "becomes", "forks"],
)  # fmt: skip
def test_a_training_that_is_not_measured_is_stopped_before_its_first_step(
    trial_server: ServerClient, folder: Path, text: str, message: str, hint: str
) -> None:
    (folder / "run.py").write_text(text)
    workload = of_command("run.py")
    answer = trial_server.inspection(workload)
    assert answer.problem.message.startswith(message)
    assert hint in answer.problem.hint
    assert "has trained" not in answer.log
    assert {path.name for path in folder.iterdir()} - {"__pycache__"} == {"loop.py", "run.py"}
    if text == LOOP:
        outcome = trial_server.trial(workload, Candidate(Arm(), 8)).failed
        assert outcome.message.startswith(message)


def test_what_asks_torchrun_for_its_rank_is_told_it_with_placeholders(trial_server: ServerClient, folder: Path) -> None:
    (folder / "run.py").write_text(RANKED)
    problem = trial_server.inspection(of_command("torchrun", "run.py")).problem
    assert problem.message.startswith("run.py asks what torchrun tells a process")
    options = "its options are --batch-size, --grad-accum-steps"
    assert f"-- torchrun run.py --batch-size '{{batch}}' ({options}; see" in problem.hint
    pasted = find_script(["torchrun", "run.py", "--batch-size", "{batch}"])
    assert trial_server.model(Workload.of_source(pasted)).interface.searched == ("batch",)


def test_what_starts_python_again_is_refused_with_the_whole_command(trial_server: ServerClient, folder: Path) -> None:
    """With the folder that the user named in place of the trial's own; ``sitecustomize`` stays imported."""
    (folder / "loop.py").write_text("import sys\nassert 'sitecustomize' in sys.modules\n" + LOOP)
    (folder / "run.py").write_text(
        "import subprocess, sys\nsubprocess.run([sys.executable, 'loop.py', *sys.argv[1:]], check=True)\n"
    )
    long = [word for number in range(60) for word in (f"--option-{number}", "value")]
    workload = of_command("run.py", "--output_dir", "my/out", *long)
    answer = trial_server.inspection(workload)
    words = shlex.split(answer.problem.hint.partition("-- ")[2])
    assert words == ["python", "loop.py", "--output_dir", "my/out", *long]
    assert answer.problem.message.startswith("run.py trains in another process that it starts: ")
    assert "has trained" not in answer.log
    assert "sitecustomize" not in answer.log


ANOTHER_PROGRAM = f"""
import subprocess, sys
subprocess.run([{sys.executable!r}, "says.py"], check=True)
subprocess.run(["true"], check=True)
raise SystemExit("ran " + open("said").read())
"""
COMPILES = """
from torch._inductor.compile_worker.subproc_pool import SubprocPool
pool = SubprocPool(1)
said = pool.submit(int, "7").result()
pool.shutdown()
raise SystemExit(f"compiled {said}")
"""
# As peft's LoRA-GA makes some before the Trainer is built.
PREPARES_WEIGHTS = """
import sys, torch
sys.modules.pop("peft", None)
from peft.ga import prepare
prepare(torch.ones(1, requires_grad=True).sum())
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ANOTHER_PROGRAM, "run.py left with exit code 1: ran tensor(1.)"),
        (COMPILES, "run.py left with exit code 1: compiled 7"),
        (PREPARES_WEIGHTS, "run.py ended without having trained"),
    ],
    ids=["another Python", "a process in which torch compiles", "a backward pass that prepares weights"],
)
def test_what_trains_nothing_may_run(trial_server: ServerClient, folder: Path, text: str, message: str) -> None:
    (folder / "says.py").write_text("import torch, pathlib\npathlib.Path('said').write_text(str(torch.ones(1).sum()))")
    (folder / "peft").mkdir()
    (folder / "peft" / "__init__.py").write_text("")
    (folder / "peft" / "ga.py").write_text("def prepare(loss):\n    loss.backward()\n")
    (folder / "run.py").write_text(text)
    answer = trial_server.inspection(of_command("run.py"))
    assert answer.problem.message == message
