"""Search on a real Ray cluster of two nodes on this machine: ``make test-ray``."""

import contextlib
import importlib.util
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import pytest
from processes import all_gone, is_alive, processes_named, processes_with, wait_until

from autotune.engine.ray_cluster import WITHOUT_TOKEN_VARIABLE
from autotune.service.client import Client

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'traintune[ray]'"),
]

TOKEN = "a-token-of-these-tests-alone"
TESTS = Path(__file__).parents[1]
MARK = "TEST_CLUSTER"
"""A variable of every process that a cluster starts, directly or not."""
SEARCH = ["search", "--model", "bert-tiny", "--seq-len", "16", "--effective-batch", "16", "--precision", "fp32"]
RANDOM = [*SEARCH, "--sampler", "random", "--trials", "3", "--no-baseline"]
SECONDS = 240.0


def free_port() -> int:
    """A port that the kernel gives nobody, nor Ray its own processes (10002 to 19999, and from 23000 on)."""
    while True:
        port = random.randrange(28_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
            return port


def answers(port: int) -> bool:
    """Whether something listens there."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
        return True
    return False


def environment(**changes: str) -> dict[str, str]:
    """This process's variables without what would name another cluster, or keep a core from trials."""
    left_out = {"OMP_NUM_THREADS", "RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")])
    return {**kept, "PYTHONPATH": paths, "RAY_USAGE_STATS_ENABLED": "0", **changes}


class RealCluster:
    """A cluster of its own, in processes that carry a mark."""

    def __init__(self, *, has_token: bool = True) -> None:
        self.port = free_port()
        self.mark = uuid.uuid4().hex
        # The paths of its sockets must be short.
        self._folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        auth = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN} if has_token else {"RAY_AUTH_MODE": "disabled"}
        # Where Ray notes the address of its latest cluster: it expects the folder to be there.
        (self._folder / "ray").mkdir()
        self.auth = {**auth, "HOME": str(self._folder), "RAY_TMPDIR": str(self._folder)}
        self._log_path = self._folder / "cluster.log"
        with open(self._log_path, "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(TESTS / "engine" / "ray_nodes.py"), str(self.port), str(self._folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment(**self.auth, **{MARK: self.mark}),
                text=True,
            )

    def __enter__(self) -> Self:
        self.control_address = self._process.stdout.readline().strip()
        assert self.control_address, self._log_path.read_text()[-2000:]
        # The server for clients starts later than the rest.
        assert wait_until(lambda: answers(self.port), 60)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired, OSError):
            self._process.communicate("end\n", timeout=60)
        self._process.kill()
        for pid in processes_with(MARK, self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def add_node(self) -> None:
        self._process.stdin.write("add\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline().strip() == "done"

    @property
    def address(self) -> str:
        return f"ray://127.0.0.1:{self.port}"

    def pids(self, words: str) -> list[int]:
        """Processes of this cluster whose command lines have these words."""
        return [pid for pid in processes_named(words, processes_with(MARK, self.mark)) if is_alive(pid)]

    def trial_processes(self) -> list[int]:
        return self.pids("autotune.worker")

    def has_trial(self) -> bool:
        """Whether a trial runs: the server has a child."""
        return len(self.pids("autotune.worker.server")) > 1

    def actors(self) -> list[int]:
        return self.pids("ray::SearchActor")

    def is_left_alone(self) -> bool:
        """Whether no process of a search is left on the nodes."""
        return wait_until(lambda: not self.trial_processes() and not self.actors(), 60)


class Command:
    """The command line in a process of its own."""

    def __init__(
        self, folder: Path, words: list[str], program: Sequence[str] = ("-m", "autotune.cli.main"), **variables: str
    ) -> None:
        self.errors = folder / f"stderr-{uuid.uuid4().hex[:6]}"
        self._output = folder / f"stdout-{uuid.uuid4().hex[:6]}"
        with open(self._output, "wb") as output, open(self.errors, "wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, *program, *words],
                stdout=output,
                stderr=errors,
                cwd=folder,
                env=environment(**variables),
                start_new_session=True,
            )

    def said(self) -> str:
        return self.errors.read_text(errors="replace")

    def waits_until(self, condition: Callable[[], object]) -> None:
        """Wait until the condition was seen to hold: what comes and goes, as a trial does, may be gone by then."""
        seen: list[bool] = []

        def is_over() -> bool:
            seen.append(bool(condition()))
            return seen[-1] or self.process.poll() is not None

        wait_until(is_over, SECONDS)
        assert seen[-1], self.said()[-2000:]

    def printed(self) -> str:
        return self._output.read_text(errors="replace")

    def end(self) -> int:
        try:
            return self.process.wait(SECONDS)
        finally:
            self.process.kill()

    def document(self) -> dict[str, Any]:
        assert self.end() == 0, self.said()[-2000:]
        return json.loads(self._output.read_text())


@pytest.fixture(scope="module")
def cluster() -> Iterator[RealCluster]:
    """Two nodes without a GPU, and a token."""
    with RealCluster() as made:
        made.add_node()
        made.add_node()
        yield made


def test_a_search_on_a_cluster_is_what_it_is_here(cluster: RealCluster, tmp_path: Path) -> None:
    there = Command(tmp_path, [*RANDOM, "--json", "--executor", cluster.address], **cluster.auth).document()
    assert cluster.is_left_alone()
    here = Command(tmp_path, [*RANDOM, "--trials", "1", "--json", "--study", "again"]).document()
    assert there["environment"] == here["environment"]
    assert there["best"].keys() == here["best"].keys()
    assert {trial["state"] for trial in there["trials"]} == {"completed"}
    # The sampler proposes the same, and as the environment is the same, it is not measured again.
    first = here["trials"][0]
    (known,) = [trial for trial in there["trials"] if trial["number"] == first["reused_from"]["number"]]
    assert (first["reused_from"]["study"], first["samples_per_second"]) == (there["study"], known["samples_per_second"])
    logs = tmp_path / "studies" / "logs" / there["study"]
    assert "trial-0001.log" in {path.name for path in logs.iterdir()}


def test_a_node_that_dies_costs_its_trial_which_runs_again(cluster: RealCluster, tmp_path: Path) -> None:
    search = Command(tmp_path, [*RANDOM, "--json", "--executor", cluster.address], **cluster.auth)
    search.waits_until(cluster.has_trial)
    (actor,) = cluster.actors()
    os.kill(actor, signal.SIGKILL)
    search.waits_until(lambda: "was lost" in search.said())
    # The process on the next node, and with it the raylet that is that node.
    search.waits_until(lambda: any(pid != actor for pid in cluster.actors()))
    search.waits_until(cluster.has_trial)
    (actor,) = cluster.actors()
    before = cluster.trial_processes()
    raylet = int(Path(f"/proc/{actor}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(raylet, signal.SIGKILL)
    document = search.document()
    assert [trial["state"] for trial in document["trials"]].count("completed") == 3
    assert search.said().count("was lost") == 2
    assert all_gone([actor, *before])
    assert cluster.is_left_alone()
    cluster.add_node()


def test_a_search_that_is_told_to_end_leaves_nothing_on_the_nodes(cluster: RealCluster, tmp_path: Path) -> None:
    search = Command(tmp_path, [*RANDOM, "--json", "--executor", cluster.address, "--study", "ended"], **cluster.auth)
    search.waits_until(lambda: "batch×acc" in search.said() and cluster.has_trial())
    search.process.send_signal(signal.SIGTERM)
    assert search.end() == 130, search.said()
    assert cluster.is_left_alone()
    again = Command(tmp_path, ["resume", "ended", "--json", "--executor", cluster.address], **cluster.auth)
    assert [trial["state"] for trial in again.document()["trials"]].count("completed") == 3


def test_a_command_that_is_killed_finds_its_search_again(cluster: RealCluster, tmp_path: Path) -> None:
    search = Command(tmp_path, [*RANDOM, "--json", "--executor", cluster.address, "--study", "kept"], **cluster.auth)
    search.waits_until(lambda: "batch×acc" in search.said() and cluster.has_trial())
    (actor,) = cluster.actors()
    search.process.kill()
    search.process.wait()
    again = Command(tmp_path, ["resume", "kept", "--json", "--executor", cluster.address], **cluster.auth)
    # It prints what happened since, from the same actor.
    assert is_alive(actor)
    assert [trial["state"] for trial in again.document()["trials"]] == ["completed"] * 3
    assert cluster.is_left_alone()


LONELY = """
import sys, time
from autotune.core.errors import AutotuneError
from autotune.engine.ray import RayEngine, SearchActor
from autotune.engine.work import Work

engine = RayEngine(sys.argv[1], patience_seconds=5.0)
(host, *_) = engine.hosts()
options = {"model": "bert-tiny", "seq_len": 16, "effective_batch": 16, "trials": 30}
engine._cluster.start(SearchActor, (5.0,), host.node, gpus=0, cpus=0, name="never begun")
engine.start(Work("lonely", "lonely", options, devices=(host.devices[0].uuid,)), host)
deadline = time.monotonic() + 120
while engine.find("lonely") is not None or engine.find("never begun") is not None:
    assert time.monotonic() < deadline
    time.sleep(0.5)
"""


def test_an_actor_that_nobody_asks_ends_with_its_search(cluster: RealCluster, tmp_path: Path) -> None:
    (tmp_path / "lonely.py").write_text(LONELY)
    program = Command(tmp_path, [cluster.address], program=["lonely.py"], **cluster.auth)
    assert program.end() == 0, program.said()[-2000:]
    assert cluster.is_left_alone()


def test_a_service_that_is_killed_finds_its_searches_again(cluster: RealCluster, tmp_path: Path) -> None:
    port = free_port()
    words = ["serve", "--port", str(port), "--executor", cluster.address]
    service = Command(tmp_path, words, **cluster.auth)
    token = ""

    def is_up() -> bool:
        nonlocal token
        printed = service.printed()
        token = printed.strip().partition("#token=")[2] or token
        return "\n" in printed

    service.waits_until(is_up)
    client = Client(f"http://127.0.0.1:{port}", token)
    options = {"model": "bert-tiny", "seq_len": 16, "effective_batch": 16, "precision": "fp32", "sampler": "random"}
    search = client.request("POST", "/v1/searches", {**options, "trials": 3, "baseline": False})["id"]
    service.waits_until(cluster.has_trial)
    (actor,) = cluster.actors()
    service.process.kill()
    service.process.wait()
    service = Command(tmp_path, words, **cluster.auth)
    service.waits_until(is_up)
    kinds = [event.document.get("state") for event in client.events(search) if event.kind == "state"]
    assert kinds == ["queued", "running", "finished"]
    found = client.request("GET", f"/v1/searches/{search}")
    assert (found["state"], found["attempts"]) == ("finished", 1)
    assert [trial["state"] for trial in client.request("GET", f"/v1/searches/{search}/trials")["trials"]].count(
        "completed"
    ) == 3
    assert cluster.is_left_alone()
    # One that runs when the service ends goes on as well, and a second one finds its node.
    second = client.request("POST", "/v1/searches", {**options, "trials": 3, "seed": 1, "baseline": False})["id"]
    service.waits_until(cluster.has_trial)
    (other,) = cluster.actors()
    assert other != actor
    os.kill(other, signal.SIGKILL)
    service.waits_until(lambda: client.request("GET", f"/v1/searches/{second}")["state"] == "finished")
    assert client.request("GET", f"/v1/searches/{second}")["attempts"] == 2
    service.process.send_signal(signal.SIGTERM)
    assert service.end() == 0
    assert cluster.is_left_alone()


class TestRefusals:
    def said(self, folder: Path, *words: str, code: int, **variables: str) -> str:
        command = Command(folder, [*SEARCH, *words], **variables)
        assert command.end() == code, command.said()
        # On a busy machine it is said every 20 s that it still looks.
        lines = [line for line in command.said().splitlines() if not line.endswith("; looking for a node")]
        assert len(lines) == 2, command.said()
        assert not list(folder.glob("studies*"))
        return command.said()

    def test_another_token(self, cluster: RealCluster, tmp_path: Path) -> None:
        auth = {**cluster.auth, "RAY_AUTH_TOKEN": "another"}
        said = self.said(tmp_path, "--executor", cluster.address, code=13, **auth)
        assert "does not take the token in RAY_AUTH_TOKEN" in said

    def test_a_gpu_that_no_node_has(self, cluster: RealCluster, tmp_path: Path) -> None:
        said = self.said(tmp_path, "--executor", cluster.address, "--gpus", "2", code=4, **cluster.auth)
        assert "no node of the Ray cluster has 2 GPUs; it has " in said
        assert "(no GPU)" in said

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ("import ray; ray.__version__ = '2.0.0'", r"Version mismatch: .* Ray: 2\.0\.0"),
            ("import autotune; autotune.__version__ = '9.9'", r"the node .* has autotune .*, and here is 9\.9"),
        ],
    )
    def test_another_version(self, cluster: RealCluster, tmp_path: Path, change: str, said: str) -> None:
        (tmp_path / "sitecustomize.py").write_text(change)
        auth = {**cluster.auth, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(TESTS.parent)])}
        assert re.search(said, self.said(tmp_path, "--executor", cluster.address, code=13, **auth))

    def test_no_cluster(self, tmp_path: Path) -> None:
        port = free_port()
        said = self.said(tmp_path, "--executor", f"ray://127.0.0.1:{port}", code=13, RAY_AUTH_TOKEN=TOKEN)
        assert f"no Ray cluster answers at 127.0.0.1:{port}" in said

    def test_a_cluster_without_token_unless_it_is_trusted(self, tmp_path: Path) -> None:
        with RealCluster(has_token=False) as open_cluster:
            open_cluster.add_node()
            auth = {"RAY_AUTH_TOKEN": TOKEN, "HOME": open_cluster.auth["HOME"]}
            for address in (open_cluster.address, "ray://auto"):
                variables = {**auth, "RAY_ADDRESS": open_cluster.control_address}
                said = self.said(tmp_path, "--executor", address, code=13, **variables)
                assert "asks for no token: everyone who reaches it can run code there" in said
            trusted = {**open_cluster.auth, "RAY_ADDRESS": open_cluster.control_address, WITHOUT_TOKEN_VARIABLE: "1"}
            search = Command(tmp_path, [*RANDOM, "--trials", "1", "--json", "--executor", "ray://auto"], **trusted)
            assert len(search.document()["trials"]) == 1
