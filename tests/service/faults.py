"""Disturb a service, its processes and their trials while searches run, and look whether anything was lost.

``python tests/service/faults.py --faults 100`` prints a table. Everything is a real process: the service, the one in
which it searches, and trials that answer from a formula (tests/faults).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "faults")]

from postgres import PostgresServer  # noqa: E402
from processes import is_alive, processes_named, processes_with, wait_until  # noqa: E402

MARK = "FAULTS_FOLDER"
STAND_IN = ROOT / "tests" / "faults" / "stand_in.py"
PATIENCE_SECONDS = 180.0
MODEL = {
    "model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 1, "intermediate_size": 8, "vocab_size": 64, "max_position_embeddings": 32,
}  # fmt: skip
REQUEST = {
    "seq_len": 8, "effective_batch": 64, "memory_limit": "2GiB", "precision": ["fp32"], "fresh": True,
    "optim": ["adamw_torch_fused", "adafactor"], "trial_timeout": "20s",
}  # fmt: skip
KINDS = (
    "kill -9 of the service", "kill -9 of a search", "kill -9 of a trial server", "kill -9 of a trial",
    "disk full at the service", "the clock jumps",
)  # fmt: skip
OF_DATABASE = "kill -9 of the database server"
# The server's own disk is never full here.
KINDS_ON_A_SERVER = (*(kind for kind in KINDS if kind != "disk full at the service"), OF_DATABASE, OF_DATABASE)

BAD = ("studies lost", "trials doubled", "wrong answers", "processes left")
"""What must be none."""


class Scene:
    """A folder with a service, and what was done to it."""

    def __init__(self, folder: Path, seed: int = 0, database: PostgresServer | None = None) -> None:
        self.folder = folder
        self.database = database
        self.storage = database.url(database.new_database()) if database is not None else "a.db"
        self.random = random.Random(seed)
        self.faults: Counter[str] = Counter()
        self.open: set[str] = set()
        """Studies that have not ended."""
        self.hit: dict[str, set[str]] = {}
        """Candidates whose trial was killed, with the studies that were open then: it was one of these."""
        self.token = ""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.service: subprocess.Popen[bytes] | None = None
        (folder / "model").mkdir(parents=True)
        (folder / "model" / "config.json").write_text(json.dumps(MODEL))
        interpreter = folder / "python"
        disturbed = Path(__file__).with_name("disturbed.py")
        child = f'exec "{sys.executable}" "{disturbed}" "{folder}" child "$4" "$5"'
        trial = f'shift 3\nexec "{sys.executable}" "{STAND_IN}" "$@"'
        interpreter.write_text(f'#!/bin/sh\nif [ "$3" = autotune.engine.child ]; then {child}; fi\n{trial}\n')
        interpreter.chmod(0o755)

    # Processes

    def _start(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        (self.folder / name).mkdir(exist_ok=True)
        environment = {
            **os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1",
            "AUTOTUNE_TOKEN": self.token, MARK: str(self.folder), "FAULTS_SECONDS": "0.1",
            "AUTOTUNE_LOCKS": str(self.folder / name),
        }  # fmt: skip
        with (self.folder / f"{name}.out").open("ab") as out, (self.folder / f"{name}.err").open("ab") as err:
            command = [sys.executable, str(Path(__file__).with_name("disturbed.py")), str(self.folder), *words]
            return subprocess.Popen(
                command, cwd=self.folder / name, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )

    def serve(self) -> None:
        """Start the service, again or for the first time, and wait until it answers."""
        words = ("serve", "--port", str(self.port), "--storage", self.storage)
        words = (*words, "--data", str(self.folder))
        self.service = self._start("service", *words)
        assert wait_until(self.is_up, PATIENCE_SECONDS), self.errors()
        if not self.token:
            first = (self.folder / "service.out").read_text().splitlines()[0]
            self.token = first.partition("/#token=")[2]

    def is_up(self) -> bool:
        """Whether the service answers."""
        try:
            return bool(self.call("GET", "/healthz"))
        except OSError:
            return False

    def call(self, method: str, path: str, document: Any = None, **more: str) -> Any:
        """Ask the service."""
        data = None if document is None else json.dumps(document).encode()
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json", **more}
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read())

    def submit(self, study: str) -> None:
        """Queue a search; asked again where the service was away, with a key that makes it one."""
        asked = {**REQUEST, "model": str(self.folder / "model"), "study": study}
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            with contextlib.suppress(OSError):
                self.call("POST", "/v1/searches", asked, **{"Idempotency-Key": study})
                return
            assert time.monotonic() < deadline, self.errors()
            time.sleep(0.2)

    def states(self) -> dict[str, str]:
        """The state of each search by its study; none while the service is away."""
        with contextlib.suppress(OSError):
            return {job["study"]: job["state"] for job in self.call("GET", "/v1/searches?limit=1000")["searches"]}
        return {}

    def errors(self) -> str:
        """The ends of what the processes said."""
        return "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in self.folder.glob("*.err"))

    def descendants(self) -> list[int]:
        """Every living process of this scene."""
        return processes_with(MARK, str(self.folder))

    # Faults

    def disturb(self, kind: str) -> None:
        """Inject one fault, and put right what does not come right by itself."""
        kinds: dict[str, Callable[[], bool]] = dict(
            zip(
                (*KINDS, OF_DATABASE),
                (self.kill_service, self.kill_search, lambda: self.kill_worker("server"),
                 lambda: self.kill_worker("trial"), self.fill_disk, self.jump, self.kill_database),
                strict=True,
            )
        )  # fmt: skip
        if kinds[kind]():
            self.faults[kind] += 1

    def kill_service(self) -> bool:
        """Kill the service; it is started again after a while."""
        assert self.service is not None
        self.service.kill()
        self.service.wait()
        time.sleep(self.random.uniform(0, 1))
        self.serve()
        return True

    def kill_search(self) -> bool:
        """Kill the process that searches; the service starts another in its place."""
        for pid in processes_named(" child ", self.descendants()):
            os.kill(pid, signal.SIGKILL)
            return True
        return False

    def kill_worker(self, victim: str) -> bool:
        """Kill the running trial or its server; none meets a candidate of a study twice, which would be a failure."""
        runs = self.folder / "runs"
        for line in reversed(runs.read_text().splitlines()[-4:] if runs.exists() else []):
            pid, candidate = int(line.split()[0]), line.partition(" ")[2]
            if not is_alive(pid) or candidate in self.hit:
                continue
            with contextlib.suppress(OSError, ValueError):
                parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
                if parent > 1:
                    self.hit[candidate] = set(self.open)
                    os.kill(pid if victim == "trial" else parent, signal.SIGKILL)
                    return True
        return False

    def fill_disk(self) -> bool:
        """Have the service's files grow no further for a while."""
        assert self.service is not None
        sizes = [path.stat().st_size for path in (self.folder / "service").glob("a.db*")]
        resource.prlimit(self.service.pid, resource.RLIMIT_FSIZE, (max(sizes, default=0), resource.RLIM_INFINITY))
        time.sleep(self.random.uniform(0.5, 2))
        resource.prlimit(self.service.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        return True

    def jump(self) -> bool:
        """Set the clock by hours, forwards or back."""
        (self.folder / "clock").write_text(str(self.random.choice([-7200, -40, 0, 40, 7200])))
        return True

    def kill_database(self) -> bool:
        """Kill the database server; it is started again after a while."""
        assert self.database is not None
        self.database.kill()
        time.sleep(self.random.uniform(0, 1))
        self.database.start()
        return True

    # What is recorded

    def results(
        self, study: str, states: tuple[str, ...] = ("completed", "out_of_memory")
    ) -> list[tuple[str, str, str, str]]:
        """What the trials of a study gave, read from the database without any of autotune."""
        named = ", ".join(f"'{state}'" for state in states)
        query = (
            "SELECT candidate, stage, autotune_trials.state, outcome FROM autotune_trials JOIN autotune_studies s "
            f"ON study_id = s.id WHERE s.name = '{study}' AND autotune_trials.state IN ({named})"
        )
        if self.database is not None:
            name = self.storage.partition("@/")[2].partition("?")[0]
            read = self.database.execute(query, name)
        else:
            with contextlib.closing(sqlite3.connect(self.folder / "service" / "a.db", timeout=60)) as connection:
                read = connection.execute(query).fetchall()
        found = []
        for candidate, stage, state, outcome in read:
            # A server's driver has read the JSON already.
            candidate, outcome = (json.loads(each) if isinstance(each, str) else each for each in (candidate, outcome))
            told = {name: value for name, value in outcome.items() if name != "phase_seconds"}
            found.append((json.dumps(candidate, sort_keys=True), stage, state, json.dumps(told, sort_keys=True)))
        return sorted(found)

    def winner(self, study: str) -> str:
        """The TrainingArguments that the service recommends."""
        try:
            return json.dumps(self.call("GET", f"/v1/searches/{study}/export"), sort_keys=True)
        except urllib.error.HTTPError as error:
            return f"none: {error.read().decode(errors='replace')}"

    def end(self) -> int:
        """End everything in an orderly way; return how many processes are left."""
        if self.service is not None:
            self.service.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.service.wait(60)
        wait_until(lambda: not self.descendants(), 20)
        left = self.descendants()
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        return len(left)


def measure(
    faults: int, folder: Path, seed: int = 0, kinds: tuple[str, ...] = KINDS, database: PostgresServer | None = None
) -> dict[str, Any]:
    """Disturb searches until so many faults were injected, let them end, and return what was found.

    The service's database is a file, or on a server.
    """
    scene = Scene(folder, seed, database)
    found: Counter[str] = Counter()
    try:
        scene.serve()
        scene.submit("undisturbed")
        assert wait_until(lambda: scene.states().get("undisturbed") == "finished", PATIENCE_SECONDS), scene.errors()
        expected, winner = scene.results("undisturbed"), scene.winner("undisturbed")
        assert len(expected) >= 5
        studies: list[str] = []
        order = [kinds[number % len(kinds)] for number in range(faults)]
        scene.random.shuffle(order)
        while scene.faults.total() < faults:
            # Two searches are always open, of which one runs.
            states = scene.states()
            while sum(states.get(study) != "finished" for study in studies) < 2:
                studies.append(f"study-{len(studies)}")
                states[studies[-1]] = "queued"
                scene.submit(studies[-1])
            # Of one that is killed twice in a study no more trials are run, and the answer may be another.
            scene.open = {study for study in studies if states.get(study) != "finished"}
            scene.hit = {candidate: those & scene.open for candidate, those in scene.hit.items() if those & scene.open}
            time.sleep(scene.random.uniform(0, 1.5))
            scene.disturb(order[scene.faults.total()])
        (scene.folder / "clock").unlink(missing_ok=True)
        wait_until(lambda: all(scene.states().get(study) == "finished" for study in studies), 2 * PATIENCE_SECONDS)
        states = scene.states()
        for study in studies:
            results = scene.results(study)
            found["studies lost"] += states.get(study) != "finished"
            # How often the winner is measured again depends on how well this machine is known by then.
            once = searched(results)
            found["trials doubled"] += len(once) - len({row[:2] for row in once})
            is_wrong = once != searched(expected) or scene.winner(study) != winner
            found["wrong answers"] += is_wrong
            if is_wrong or states.get(study) != "finished":
                problem = scene.call("GET", f"/v1/searches/{study}")["problem"]
                print(f"{study}: {states.get(study)}, {problem}, {scene.winner(study)}", file=sys.stderr)
                failed = scene.results(study, ("failed", "running"))
                for name, rows in {
                    "missing": [row for row in expected if row not in results],
                    "beyond": [row for row in results if row not in expected],
                    "failed": failed,
                }.items():
                    print("\n".join(f"{study}, {name}: {row}" for row in rows), file=sys.stderr)
        found["studies"] = len(studies)
        found["trials"] = len(studies) * len(expected)
    finally:
        found["processes left"] = scene.end()
    return {"faults": dict(scene.faults), **{name: found[name] for name in ("studies", "trials", *BAD)}}


def searched(results: list[tuple[str, str, str, str]]) -> list[tuple[str, str, str, str]]:
    """The trials that looked for the winner."""
    return [row for row in results if row[1] != "final"]


def table(told: dict[str, Any]) -> str:
    """Return what was injected and what came of it, as lines."""
    lines = [f"{'fault':<34} times", *(f"{kind:<34} {times:>5}" for kind, times in sorted(told["faults"].items()))]
    lines.append(f"{'all':<34} {sum(told['faults'].values()):>5}")
    lines += [f"{name}: {value}" for name, value in told.items() if name != "faults"]
    return "\n".join(lines)


def measure_on_a_server(faults: int, folder: Path, seed: int = 0) -> dict[str, Any]:
    """The same with the service's database on a PostgreSQL server, which is killed as well."""
    server = PostgresServer.make(durable=True)
    try:
        server.start()
        server.make_template()
        return measure(faults, folder, seed, KINDS_ON_A_SERVER, server)
    finally:
        server.close()


def main() -> None:
    """Measure, and print it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    given = parser.parse_args()
    run = measure if given.database == "sqlite" else measure_on_a_server
    with tempfile.TemporaryDirectory() as folder:
        told = run(given.faults, Path(folder) / "scene", given.seed)
    print(table(told))
    raise SystemExit(any(told[name] for name in BAD))


if __name__ == "__main__":
    main()
