"""Code that does what a training in a trial cannot: it is told so in one line, and nothing of it is left."""

import os
import socket
from pathlib import Path

import psutil
import pytest
from server_client import ServerClient

from autotune.core.candidate import OWN_OPTIM, Arm, Candidate
from autotune.core.messages import Answer
from autotune.core.training_source import TrainingSource, find_script
from autotune.core.workload import Workload

TRAINS = """
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
accelerator = Accelerator()
model = torch.nn.Linear(4, 2)
def train(model, loader, optimizer, others=()):
    model, loader, optimizer = accelerator.prepare(model, loader, optimizer)
    for inputs, in loader:
        loss = model(inputs).mean()
        for other in others:
            loss = loss + other(inputs).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
data = TensorDataset(torch.ones(96, 4))
def sgd(model): return torch.optim.SGD(model.parameters(), 0.1)
"""
ASKS = TRAINS + "input('Go on? [y/n] ')\n"
ANOTHER_MODEL = TRAINS + "optimizer = sgd(model)\ntrain(torch.nn.Linear(4, 2), DataLoader(data), optimizer)\n"
SAYS_MORE = "print('Could not override x.', 'See --help.', sep='\\n'); raise SystemExit(2)"
DAEMON = """
import os, time
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
open("daemon", "w").close()
time.sleep(600)
"""
TWO_MODELS = TRAINS + (
    "other = accelerator.prepare(torch.nn.Linear(4, 2))\n"
    "train(model, DataLoader(data, batch_size=8), sgd(model), [other])\n"
)
STREAMS = TRAINS + (
    "class Stream(IterableDataset):\n    def __iter__(self):\n        while True: yield torch.ones(4),\n"
    "train(model, DataLoader(Stream(), batch_size=8), sgd(model))\n"
)
LISTENS = TRAINS + (
    "import http.server, threading\n"
    "server = http.server.ThreadingHTTPServer(('127.0.0.1', PORT), http.server.BaseHTTPRequestHandler)\n"
    "threading.Thread(target=server.serve_forever).start()\n"
    "train(model, DataLoader(data, batch_size=8), sgd(model))\n"
)


def script(folder: Path, text: str) -> TrainingSource:
    """A script of this text."""
    (folder / "run.py").write_text(text)
    return find_script(["run.py"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ASKS, "run.py asks for input, and nobody answers in a trial"),
        (ANOTHER_MODEL, "run.py steps an optimizer whose parameters get no gradients"),
        (SAYS_MORE, "run.py left with exit code 2: Could not override x."),
    ],
    ids=["asks", "another model", "says more"],
)
def test_it_is_told(trial_server: ServerClient, folder: Path, text: str, message: str) -> None:
    problem = trial_server.inspection(Workload.of_source(script(folder, text))).problem
    assert problem.message == message
    assert problem.hint


def test_nothing_is_left_of_a_daemon(trial_server: ServerClient, folder: Path) -> None:
    answer = trial_server.inspection(Workload.of_source(script(folder, DAEMON)))
    assert (answer.progress, answer.end) == ([], Answer(exit_code=1))
    assert [path.name for path in folder.iterdir()] == ["run.py"]
    here = [process for process in psutil.process_iter(["cwd"]) if process.info["cwd"] == str(folder)]
    assert [process.pid for process in here] == [os.getpid()]


@pytest.mark.parametrize("text", [TWO_MODELS, STREAMS, LISTENS], ids=["two models", "no length", "listens"])
def test_it_is_measured_all_the_same(trial_server: ServerClient, folder: Path, text: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    workload, model = trial_server.prepared(Workload.of_source(script(folder, text.replace("PORT", str(port)))))
    measured = trial_server.trial(workload, Candidate(Arm(optim=OWN_OPTIM), 16)).completed.measurement
    assert measured.samples_per_second == pytest.approx(16 / measured.step_seconds)
    assert model.interface.tunes_loader == (text != STREAMS)
    # Whoever listened is gone.
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))
