"""Faults injected into real searches: after each the study is resumed, and nothing may be lost, doubled, left or wrong.

A few of each kind run always; ``make test-faults`` runs them all.
"""

import json
import os
import random
import shutil
import signal
import sqlite3
import time
from collections.abc import Callable
from typing import Any

import pytest
from processes import is_alive, wait_until
from scene import PATIENCE_SECONDS, TALLY, Scene, Victim

SceneOf = Callable[..., Scene]

EVERY_TEST = 100
"""Of this file, the last one among them."""


def seeds(few: int, all_of_them: int) -> Any:
    """A parametrisation: the first few always, the rest under ``make test-faults``."""
    marks = [pytest.mark.faults, pytest.mark.timeout(900)]
    rest = [pytest.param(seed, marks=marks) for seed in range(few, all_of_them)]
    return pytest.mark.parametrize("seed", [*range(few), *rest])


KILLED = "kill -9 of the controller"


def kill_controller(scene: Scene, most_seconds: float) -> None:
    """One search that is killed at a random moment; what it had recorded stays."""
    scene.start()
    scene.pause(most_seconds)
    before = scene.ended() if scene.is_recorded() else []
    if is_alive(scene.pid):
        os.kill(scene.pid, signal.SIGKILL)
        TALLY.faults[scene.kind if "kill" in scene.kind else KILLED] += 1
    scene.wait()
    scene.check_nothing_runs()
    scene.check_kept(before)


@seeds(1, 11)
def test_the_controller_is_killed(scene_of: SceneOf, reference: Scene, seed: int) -> None:
    """Five times, wherever that strikes."""
    scene = scene_of(KILLED, seed)
    for _ in range(5 if seed else 3):
        kill_controller(scene, reference.seconds)
    scene.finish()
    scene.check_nothing_runs()
    scene.check_answer(reference)


def strike_while_it_runs(scene: Scene, victim: Victim, numbers: list[int], within: float) -> None:
    """One search, with a signal to a part of it each time a random while has passed; then on to the end."""
    scene.start()
    for number in numbers:
        scene.pause(within)
        scene.strike(victim, number)
    before = scene.ended() if scene.is_recorded() else []
    code = scene.wait()
    assert code in (0, 8), scene.outputs[-1]
    if code:
        scene.finish()
    scene.check_kept(before)
    scene.check_nothing_runs()


@seeds(1, 9)
def test_the_trial_server_is_killed(scene_of: SceneOf, reference: Scene, seed: int) -> None:
    """Up to three times in one search, which goes on by itself."""
    scene = scene_of("kill -9 of the trial server", seed)
    strike_while_it_runs(scene, "server", [signal.SIGKILL] * 3, reference.seconds / 3)
    scene.check_answer(reference)


@seeds(1, 11)
def test_trials_are_ended_by_signals(scene_of: SceneOf, reference: Scene, seed: int) -> None:
    scene = scene_of("a signal to the trial", seed)
    numbers = [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM, signal.SIGABRT, signal.SIGBUS]
    strike_while_it_runs(scene, "trial", scene.random.sample(numbers, 3), reference.seconds / 3)
    scene.check_answer(reference)
    killed = [row.outcome for row in scene.trials() if row.outcome and row.outcome.get("reason") == "killed"]
    assert all("SIG" in outcome["message"] for outcome in killed)


@seeds(0, 4)
def test_everything_is_killed_while_a_model_trains(
    scene_of: SceneOf, reference: Scene, real_reference: Scene, seed: int
) -> None:
    """With torch and a real Trainer in the trials; only their figures are the formula's."""
    scene = scene_of("kills while a real model trains", seed, real=True)
    for _ in range(3 if seed else 0):
        # What is struck once is not struck again, so something must be left for what follows.
        kill_controller(scene, 0.6 * real_reference.seconds)
    scene.start()
    victims: list[Victim] = ["trial", "trial", "server", "trial", "trial", "server", "trial"]
    for victim in victims if seed else victims[:2]:
        scene.strike(victim, signal.SIGKILL, PATIENCE_SECONDS)
        scene.pause(0.5)
    scene.wait()
    scene.finish()
    scene.check_nothing_runs()
    scene.check_answer(reference)


ENDS = {
    "SIGINT once": ([signal.SIGINT], 130),
    "SIGINT twice": ([signal.SIGINT, signal.SIGINT], 130),
    "SIGTERM": ([signal.SIGTERM], 130),
    "SIGHUP": ([signal.SIGHUP], 130),
}


@pytest.mark.parametrize("kind", ENDS)
@seeds(0, 5)
def test_the_search_is_asked_to_end(scene_of: SceneOf, reference: Scene, kind: str, seed: int) -> None:
    """In an orderly way; the best so far can be exported, and resuming goes on."""
    scene = scene_of(f"{kind} to the controller", seed)
    numbers, expected = ENDS[kind]
    scene.start()
    assert wait_until(lambda: scene.running() is not None, PATIENCE_SECONDS)
    scene.pause(reference.seconds / 3)
    before = scene.ended()
    # One that has ended by itself is not asked to.
    scene.fault(is_alive(scene.pid))
    for number in numbers:
        os.kill(scene.pid, number)
        time.sleep(scene.random.uniform(0, 0.1))
    assert scene.wait() in (expected, 0)
    # An orderly end leaves none for the next search to find.
    assert not [row for row in scene.trials() if row.state == "running"]
    if kind == "SIGINT once" and scene.ended():
        assert "autotune resume study" in scene.outputs[-1] or "no remaining candidate" in scene.outputs[-1]
    scene.check_nothing_runs()
    scene.check_kept(before)
    scene.finish()
    scene.check_answer(reference)


# Transient ones: the candidate has a second trial, and the answer is the same.
MISBEHAVIOURS = [
    "write garbage", "write 7", 'write {"result":{"state":"splendid"}}', 'write {"result":[]}', "half", "long",
    "signal SIGKILL", "signal SIGSEGV", "signal SIGFPE", "output", "descend", "ignore",
]  # fmt: skip


@seeds(1, 6)
def test_trials_misbehave(scene_of: SceneOf, reference: Scene, seed: int) -> None:
    """Malformed answers, 100 MB of output, descendants that hide, deafness to signals; six in a search."""
    scene = scene_of("a malformed answer, output, descendants", seed)
    # Every second trial, so that none misbehaves when it is run again.
    chosen = random.Random(seed).sample(MISBEHAVIOURS, 6) if seed else ["write garbage", "descend", "output"]
    scene.environment["FAULTS_PLAN"] = json.dumps({str(2 * n): what for n, what in enumerate(chosen)})
    scene.start()
    assert scene.wait() == 0, scene.outputs[-1]
    begun = len((scene.folder / "runs").read_text().splitlines())
    scene.fault(sum(2 * n < begun for n in range(len(chosen))))
    scene.check_nothing_runs()
    scene.check_answer(reference)
    for log in (scene.folder / "logs").rglob("*.log"):
        log.unlink()


@seeds(0, 4)
def test_trials_fail_for_good(scene_of: SceneOf, reference: Scene, seed: int) -> None:
    """A hang and an error are not tried again; the study goes on and its winner is another or the same."""
    scene = scene_of("a trial that hangs or raises", seed, options=("--trial-timeout", "1s"))
    number = seed % 2
    scene.environment["FAULTS_PLAN"] = json.dumps({str(number): "hang" if seed < 2 else "raise"})
    scene.start()
    assert scene.wait() == 0, scene.outputs[-1]
    scene.fault()
    (failed,) = [row for row in scene.trials() if row.state == "failed"]
    assert failed.outcome
    assert failed.outcome["reason"] == ("timeout" if seed < 2 else "error")
    scene.check_nothing_runs()
    winner, best = scene.winner(), reference.winner()
    assert winner
    assert best
    assert best in (winner, failed.candidate)


@seeds(0, 5)
def test_the_database_is_locked_for_seconds(scene_of: SceneOf, reference: Scene, seed: int) -> None:
    """Three times by another program; the search waits."""
    scene = scene_of("a database that is locked", seed)
    scene.start()
    for _ in range(3):
        assert wait_until(lambda: scene.is_recorded() or not (scene.pid and is_alive(scene.pid)), PATIENCE_SECONDS)
        scene.pause(0.4)
        other = sqlite3.connect(scene.database, isolation_level=None, timeout=PATIENCE_SECONDS)
        other.execute("BEGIN IMMEDIATE")
        # A search that has ended meets no lock.
        scene.fault(bool(scene.pid and is_alive(scene.pid)))
        time.sleep(scene.random.uniform(0.2, 2.0))
        other.execute("ROLLBACK")
        other.close()
    assert scene.wait() == 0, scene.outputs[-1]
    scene.check_nothing_runs()
    scene.check_answer(reference)


@seeds(1, 12)
def test_the_disk_is_full(scene_of: SceneOf, reference: Scene, seed: int) -> None:
    """A limit on the size of files stands in for it: writes fail from then on, with words that say so."""
    scene = scene_of("a disk that is full", seed)
    if seed % 2:
        kill_controller(scene, reference.seconds)
    before = scene.ended() if scene.is_recorded() else []
    # A whole search needs more than this.
    scene.start(file_limit_bytes=scene.random.randrange(4096, reference.database.stat().st_size))
    code = scene.wait()
    # What the killed search wrote may be more than the limit, or all that there is to write.
    assert code in ((0, 1, 5, 8) if seed % 2 else (1, 5, 8)), (code, scene.outputs[-1])
    if code != 0:
        assert "autotune: error: " in scene.outputs[-1]
        assert code != 5 or "choose another file with --storage" in scene.outputs[-1]
        scene.fault()
    scene.check_nothing_runs()
    scene.check_kept(before)
    scene.finish()
    scene.check_answer(reference)


@pytest.mark.parametrize("place", ["/proc/autotune.db", "/sys/autotune.db", "/dev/null/autotune.db", "/proc/1/no/a.db"])
def test_the_folder_cannot_be_written(scene_of: SceneOf, place: str) -> None:
    """Not even by root; said before any process is started."""
    scene = scene_of("a folder that cannot be written")
    scene.start_search(place)
    assert scene.wait() == 5, scene.outputs[-1]
    assert "autotune: error: " in scene.outputs[-1]
    scene.fault()
    scene.check_nothing_runs()
    assert scene.running() is None


@seeds(2, 16)
def test_the_database_is_damaged(scene_of: SceneOf, halfway: Scene, reference: Scene, seed: int) -> None:
    """Cut off or overwritten in places: an error that says so or an answer, never a traceback; the copy goes on."""
    scene = scene_of("a corrupt or truncated database", seed)
    data = bytearray(halfway.database.read_bytes())
    if seed % 2:
        data = data[: scene.random.randrange(len(data))]
    else:
        for _ in range(scene.random.randrange(1, 200)):
            data[scene.random.randrange(len(data))] = scene.random.randrange(256)
    scene.database.write_bytes(data)
    scene.start_resume()
    code = scene.wait()
    assert code in (0, 2, 5, 7, 9), (code, scene.outputs[-1])
    assert code == 0 or "autotune: error: " in scene.outputs[-1]
    scene.fault()
    scene.check_nothing_runs()
    for suffix in ("-wal", "-shm"):
        scene.database.with_name(scene.database.name + suffix).unlink(missing_ok=True)
    shutil.copy(halfway.database, scene.database)
    # What goes on is the same copy whatever the damage was.
    if seed in (0, 2, 3):
        scene.finish()
        scene.check_kept(halfway.ended())
        scene.check_answer(reference)


@pytest.mark.faults
def test_as_many_were_injected_as_was_meant(request: pytest.FixtureRequest) -> None:
    """A search that has become quicker may end before the random moment at which it is struck."""
    here = [item for item in request.session.items if item.path == request.path]
    if len(here) < EVERY_TEST:
        pytest.skip("only some of the tests were chosen")
    assert TALLY.faults.total() >= 200
