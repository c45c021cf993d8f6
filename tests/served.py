"""A service in a process of its own, and what a client asks of it: for tests and for ``make test-service``."""

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any, Self

from checkout import ROOT
from processes import wait_until

START_SECONDS = 60.0
SUBMIT_SECONDS = 180.0


class Service:
    """``autotune serve`` in a folder, which can be killed and started again at its address.

    ``program`` is run in place of ``-m autotune``, with ``variables`` in its environment. What it prints is in
    ``serve.out`` and ``serve.err``; the latter is kept when it is started again.
    """

    popen: type[subprocess.Popen[Any]] = subprocess.Popen

    def __init__(self, folder: Path, program: Sequence[str] = ("-m", "autotune"), **variables: str) -> None:
        self.folder = folder
        self.url = self.token = ""
        self._program = program
        self._variables = variables
        self._words: tuple[str, ...] = ()
        self._process: subprocess.Popen[Any] | None = None
        self._every: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End what is left, the service in an orderly way."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(START_SECONDS)
        for process in self._every:
            if process.poll() is None:
                process.kill()
                process.wait()

    @property
    def process(self) -> subprocess.Popen[Any]:
        """The process of the service, the latest one."""
        assert self._process is not None
        return self._process

    def start(self, name: str, *words: str, **options: Any) -> subprocess.Popen[Any]:
        """Start a command; its output goes to files of this name."""
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {
            **os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1",
            "AUTOTUNE_TOKEN": self.token, **self._variables,
        }  # fmt: skip
        with (self.folder / f"{name}.out").open("wb") as out, (self.folder / f"{name}.err").open("ab") as err:
            process = self.popen(
                [sys.executable, *self._program, *words],
                cwd=self.folder, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err, **options,
            )  # fmt: skip
        self._every.append(process)
        return process

    def text(self, name: str) -> str:
        """What a command printed: ``serve.out``, ``search.err``."""
        return (self.folder / name).read_text()

    def serve(self, *words: str, **options: Any) -> subprocess.Popen[Any]:
        """Start the service, and wait for its address."""
        self._words = words
        self._serve("--port", "0", *words, **options)
        return self.process

    def serve_again(self) -> subprocess.Popen[Any]:
        """Start it again at the same address."""
        self._serve("--port", self.url.rpartition(":")[2], *self._words)
        return self.process

    def _serve(self, *words: str, **options: Any) -> None:
        process = self._process = self.start("serve", "serve", *words, **options)
        wait_until(lambda: "\n" in self.text("serve.out") or process.poll() is not None, START_SECONDS)
        assert "\n" in self.text("serve.out"), self.text("serve.err")[-2000:]
        # A token is shown once, where the database has none.
        self.url, _, token = self.text("serve.out").splitlines()[0].partition("/#token=")
        self.token = token or self.token

    def kill(self) -> None:
        """Kill the service."""
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """End the service in an orderly way."""
        self.process.terminate()
        self.process.wait(START_SECONDS)

    def call(self, method: str, path: str, document: Any = None, *, token: str = "", key: str = "") -> Any:
        """Ask the service; return the answer's JSON."""
        data = None if document is None else json.dumps(document).encode()
        headers = {"Authorization": f"Bearer {token or self.token}", "Content-Type": "application/json"}
        if key:
            headers["Idempotency-Key"] = key
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=240) as answer:
            return json.load(answer)

    def submit(self, document: Any, *, token: str = "", key: str) -> Any:
        """Queue a search; sent again with its key, which makes it one, where the service is away."""
        deadline = time.monotonic() + SUBMIT_SECONDS
        while True:
            with contextlib.suppress(OSError, HTTPException):
                return self.call("POST", "/v1/searches", document, token=token, key=key)
            assert time.monotonic() < deadline, self.text("serve.err")[-2000:]
            time.sleep(0.1)
