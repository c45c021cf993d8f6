"""Disturb a service, its processes and their trials while searches run, and look whether anything was lost.

Everything is a real process: the service, the one in which it searches, and trials that answer from a formula
(tests/faults).
"""

import contextlib
import json
import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.error
from collections import Counter
from pathlib import Path

from formula_trials import MARK, begun, server_of, write_model
from postgres import PostgresServer
from processes import processes_named, processes_with, wait_until
from served import Service
from standing_in import program

PATIENCE_SECONDS = 180.0
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

AIMS = dict.fromkeys(("studies lost", "trials doubled", "wrong answers", "processes left"), 0)


class Scene(Service):
    """A folder with a service, and what was done to it."""

    def __init__(self, folder: Path, seed: int, storage: str, database: PostgresServer | None) -> None:
        locks = {"AUTOTUNE_LOCKS": str(folder / "locks"), "FAULTS_SECONDS": "0.1"}
        super().__init__(folder, program("trials", folder), **{MARK: str(folder)}, **locks)
        self.storage, self.database = storage, database
        self.random = random.Random(seed)
        self.faults: Counter[str] = Counter()
        self.open: set[str] = set()
        """Studies that have not ended."""
        self.hit: dict[str, set[str]] = {}
        """Candidates whose trial was killed, with the studies that were open then: it was one of these."""
        self.model = str(write_model(folder))

    def queue(self, study: str) -> None:
        self.submit({**REQUEST, "model": self.model, "study": study}, key=study)

    def states(self) -> dict[str, str]:
        """The state of each search by its study; none while the service is away."""
        with contextlib.suppress(OSError):
            return {job["study"]: job["state"] for job in self.call("GET", "/v1/searches?limit=1000")["searches"]}
        return {}

    def descendants(self) -> list[int]:
        return processes_with(MARK, str(self.folder))

    # Faults

    def disturb(self, kind: str) -> None:
        """Inject one fault, and put right what does not come right by itself."""
        strokes = (
            self.kill_service, self.kill_search, lambda: self.kill_worker("server"), lambda: self.kill_worker("trial"),
            self.fill_disk, self.jump, self.kill_database,
        )  # fmt: skip
        self.faults[kind] += dict(zip((*KINDS, OF_DATABASE), strokes, strict=True))[kind]()

    def kill_service(self) -> bool:
        """Kill the service; it is started again after a while."""
        self.kill()
        time.sleep(self.random.uniform(0, 1))
        self.serve_again()
        return True

    def kill_search(self) -> bool:
        """Kill the process that searches; the service starts another in its place."""
        for pid in processes_named(" child ", self.descendants()):
            os.kill(pid, signal.SIGKILL)
            return True
        return False

    def kill_worker(self, victim: str) -> bool:
        """Kill the running trial or its server; none meets a candidate of a study twice, which would be a failure."""
        for pid, candidate in reversed(begun(self.folder)[-4:]):
            server = server_of(pid)
            if server is None or candidate in self.hit:
                continue
            with contextlib.suppress(OSError):
                self.hit[candidate] = set(self.open)
                os.kill(pid if victim == "trial" else server, signal.SIGKILL)
                return True
        return False

    def fill_disk(self) -> bool:
        """Have the service's files grow no further for a while."""
        pid, forever = self.process.pid, resource.RLIM_INFINITY
        sizes = [path.stat().st_size for path in self.folder.glob("a.db*")]
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (max(sizes, default=0), forever))
        time.sleep(self.random.uniform(0.5, 2))
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (forever, forever))
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
            with contextlib.closing(sqlite3.connect(self.storage, timeout=60)) as connection:
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

    def close(self) -> int:
        """End everything in an orderly way; return how many processes are left."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.end()
        wait_until(lambda: not self.descendants(), 20)
        left = self.descendants()
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        return len(left)


def measure(
    faults: int, folder: Path, seed: int = 0, storage: str = "", database: PostgresServer | None = None
) -> dict[str, int]:
    """Disturb searches until so many faults were injected, let them end, and return what was found.

    The service's database is a file, or on a server.
    """
    kinds = KINDS if database is None else KINDS_ON_A_SERVER
    scene = Scene(folder, seed, storage or str(folder / "a.db"), database)
    found: Counter[str] = Counter()
    try:
        scene.serve("--storage", scene.storage, "--data", str(folder))
        scene.queue("undisturbed")
        is_finished = wait_until(lambda: scene.states().get("undisturbed") == "finished", PATIENCE_SECONDS)
        assert is_finished, scene.text("serve.err")[-2000:]
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
                scene.queue(studies[-1])
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
        found["processes left"] = scene.close()
    whole = {"faults": scene.faults.total(), **dict(sorted(scene.faults.items()))}
    return {**whole, **{name: found[name] for name in ("studies", "trials", *AIMS)}}


def searched(results: list[tuple[str, str, str, str]]) -> list[tuple[str, str, str, str]]:
    """The trials that looked for the winner."""
    return [row for row in results if row[1] != "final"]
