"""Test Ctrl-C, as a terminal sends it, during a real search with real trials."""

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from command_line import TINY_SEARCH, Studied, environment, run_process, start
from processes import all_gone, children, processes_named, wait_until

# Trials of half a second or more each, so that a signal meets one under way.
SLOW = ("--effective-batch", "32", "--seq-len", "128", "--study", "slow")
# Of many seconds, so that the second signal meets the same one, too.
SLOWER = (*SLOW, "--effective-batch", "64", "--seq-len", "512")


class Search:
    """A search that runs, what it has said on stderr so far, and the processes that it started."""

    def __init__(self, folder: Path, words: tuple[str, ...]) -> None:
        self.folder = folder
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self._process = start(*TINY_SEARCH, *words, folder=folder, text=True, **pipes)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, args=[self._process.stderr], daemon=True)
        self._reader.start()
        self.started: set[int] = set()

    def _read(self, stream: IO[str]) -> None:
        self.lines.extend(iter(stream.readline, ""))

    def await_line(self, start: str) -> None:
        """Wait until a line on stderr begins so."""
        assert wait_until(lambda: any(line.startswith(start) for line in self.lines), 120), self.lines
        self._remember()

    def await_server(self) -> None:
        """Wait until there is a process for trials."""
        assert wait_until(lambda: bool(children(self._process.pid)), 120), self.lines
        self._remember()

    def await_trial(self, number: int) -> None:
        """Wait until the trial has a process, which writes its log."""
        log = self.folder / "studies" / "logs" / "slow" / f"trial-{number:04d}.log"
        assert wait_until(log.exists, 120), self.lines
        self._remember()

    def _remember(self) -> None:
        servers = children(self._process.pid)
        self.started |= {*servers, *(child for server in servers for child in children(server))}

    def interrupt(self) -> None:
        """What Ctrl-C sends. The server has a session of its own, so that it goes to this process alone."""
        self._process.send_signal(signal.SIGINT)

    def end(self) -> tuple[int, str]:
        """Wait for the end; exit code and stdout."""
        stdout = self._process.stdout.read()
        code = self._process.wait(120)
        self._reader.join(120)
        assert all_gone(self.started), "no process is left"
        assert self.started
        return code, stdout

    def kill(self) -> None:
        """For a test that failed."""
        self._process.kill()
        self._process.wait(120)


@pytest.fixture
def search(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Search]:
    """A search in an empty folder, slow where its parameter does not say otherwise."""
    running = Search(tmp_path, getattr(request, "param", SLOW))
    yield running
    running.kill()


def test_once_ends_after_the_running_trial(search: Search) -> None:
    """The answer so far is printed, the study can be continued."""
    search.await_line(" 0 ")
    search.await_trial(1)
    search.interrupt()
    code, stdout = search.end()
    assert code == 130
    assert any(line.startswith("ending after the running trial") for line in search.lines)
    assert "note: the search is interrupted: autotune resume slow continues it" in stdout
    for next_one in ("export slow >", "resume slow", "show slow"):
        assert f"  autotune {next_one}" in stdout
    document = run_process("show", "slow", "--json", folder=search.folder).document
    assert document["state"] == "interrupted"
    assert {trial["state"] for trial in document["trials"]} == {"completed"}
    assert len(document["trials"]) >= 2


@pytest.mark.parametrize("search", [SLOWER], indirect=True, ids=["slower"])
def test_twice_ends_at_once(search: Search) -> None:
    search.await_trial(0)
    search.interrupt()
    search.await_line("ending after the running trial")
    search.interrupt()
    code, stdout = search.end()
    assert code == 130
    assert not stdout
    stopped = [line for line in search.lines if line.startswith("trial 0: the search was stopped after ")]
    assert len(stopped) == 1
    assert stopped[0].endswith(")\n")
    assert "every trial is recorded in the study slow; autotune resume slow goes on with it\n" in search.lines
    document = run_process("show", "slow", "--json", folder=search.folder).document
    assert document["state"] == "interrupted"
    assert document["trials"][-1]["state"] == "failed"
    assert document["trials"][-1]["reason"] == "interrupted"


@pytest.fixture
def endless_start(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that train get no further than what Python imports at its start, however fast the machine is."""
    folder = tmp_path_factory.mktemp("site")
    trains = 'any(word.startswith("autotune.worker.") for word in sys.orig_argv)'
    (folder / "sitecustomize.py").write_text(f"import sys, time\nif {trains}: time.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")


@pytest.mark.usefixtures("endless_start")
def test_before_the_first_trial_leaves_nothing_behind(search: Search) -> None:
    search.await_line("starting a process")
    search.await_server()
    search.interrupt()
    code, stdout = search.end()
    assert (code, stdout) == (130, "")
    assert not list(search.folder.iterdir())
    assert not any("Traceback" in line for line in search.lines)


@pytest.mark.usefixtures("endless_start")
def test_of_a_verification_leaves_nothing_behind_where_a_batch_system_ends_it(studied: Studied, tmp_path: Path) -> None:
    """SIGTERM, too: no process trains on, and no checkpoint is left in the temporary folder."""

    def trainers() -> list[int]:
        return processes_named("autotune.worker.verify", children(verifier.pid))

    unread = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    verifier = start("verify", studied.name, "--storage", studied.storage, folder=tmp_path, **unread)
    try:
        assert wait_until(lambda: bool(trainers()), 120)
        (trainer,) = trainers()
        variables = Path(f"/proc/{trainer}/environ").read_bytes().decode().split("\0")
        (temporary,) = [Path(each.removeprefix("TMPDIR=")) for each in variables if each.startswith("TMPDIR=")]
        assert temporary.is_dir()
        verifier.send_signal(signal.SIGTERM)
        assert verifier.wait(60) == 130
    finally:
        verifier.kill()
        verifier.wait(120)
    assert all_gone([trainer])
    assert not temporary.parent.exists()


# Python would end by the signal itself, whatever the command made of it.
IN_CODE_OF_AN_IMPORT = """
import autotune.cli.devices as devices
def interrupted(*_, **__): exec('raise KeyboardInterrupt')
devices.devices.callback = interrupted
from autotune.cli.main import main
main(['devices'])
"""


@pytest.mark.parametrize(
    ("module", "text", "words", "end_of_line"),
    [
        ("interrupted", IN_CODE_OF_AN_IMPORT, ["interrupted"], "\n"),
        # The first library that the command line imports.
        ("click", "exec('raise KeyboardInterrupt')\n", ["autotune", "devices"], ""),
    ],
)
def test_while_something_is_imported(
    tmp_path: Path, module: str, text: str, words: list[str], end_of_line: str
) -> None:
    (tmp_path / f"{module}.py").write_text(text)
    variables = environment()
    variables["PYTHONPATH"] = f"{tmp_path}:{variables['PYTHONPATH']}"
    ended = subprocess.run([sys.executable, "-m", *words], env=variables, capture_output=True, text=True, timeout=240)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", f"{end_of_line}autotune: interrupted\n")
