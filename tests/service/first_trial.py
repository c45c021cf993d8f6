"""Measure how soon a search's first trial starts after it was started: cold, and with a warm trial server.

``python tests/service/first_trial.py`` runs five searches on this machine's CPU, through a real service,
and prints the seconds from its start to the start of the first trial's process. A trial's process makes its log first.

``python tests/service/first_trial.py --gpu`` runs whole searches of BERT-large on the first GPU, at a limit of 24 GiB.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TINY = {"effective_batch": 16, "seq_len": 32, "trials": 1, "fresh": True}
WARM = "the same workload again"
SEARCHES = (
    ("the service has just started", "bert-tiny"),
    (WARM, "bert-tiny"),
    (WARM, "bert-tiny"),
    ("another model", "gpt2-tiny"),
    (WARM, "gpt2-tiny"),
)
LARGE = {"effective_batch": 64, "memory_limit": "24GiB", "fresh": True}
SEARCHES_ON_A_GPU = (
    ("the service has just started", "bert-large-uncased"),
    (WARM, "bert-large-uncased"),
    (WARM, "bert-large-uncased"),
)


class Service:
    """A service in a folder of its own."""

    def __init__(self, folder: Path, gpus: str) -> None:
        self.folder = folder
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": gpus, "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "autotune", "serve", "--port", "0"],
            cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.url, _, self.token = self.process.stdout.readline().strip().partition("/#token=")

    def call(self, method: str, path: str, document: Any = None) -> Any:
        """Ask the service."""
        data = None if document is None else json.dumps(document).encode()
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def first_trial(self, model: str, options: dict[str, Any]) -> tuple[float, float]:
        """Run a search; return the seconds from its start to the first trial, and from its submission to its end."""
        submitted = time.time()
        search = self.call("POST", "/v1/searches", {**options, "model": model})
        log = self.folder / "studies" / "logs" / search["study"] / "trial-0000.log"
        deadline = submitted + 300
        while not log.exists():
            if time.time() > deadline:
                raise TimeoutError(f"no trial of {search['study']} began")
            time.sleep(0.005)
        began = time.time()
        while (told := self.call("GET", f"/v1/searches/{search['id']}"))["state"] in ("queued", "running"):
            if time.time() > deadline:
                raise TimeoutError(f"{search['study']} did not end")
            time.sleep(0.2)
        if told["state"] != "finished":
            raise RuntimeError(told["problem"])
        started = _moment(told["started_at"])
        return began - started, time.time() - submitted


def _moment(text: str) -> float:
    from datetime import datetime

    return datetime.fromisoformat(text).timestamp()


def measure(on_gpu: bool = False) -> Iterator[tuple[str, str, float, float]]:
    """Run the searches; yield what each was, its model, the seconds to its first trial, and those of the whole."""
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0") if on_gpu else ""
    with tempfile.TemporaryDirectory() as folder:
        service = Service(Path(folder), gpus)
        try:
            for what, model in SEARCHES_ON_A_GPU if on_gpu else SEARCHES:
                yield what, model, *service.first_trial(model, LARGE if on_gpu else TINY)
        finally:
            service.process.terminate()
            service.process.wait(60)


def main() -> None:
    """Measure, and print it."""
    print(f"{'search':<28} {'model':<19} start to first trial   whole")
    for what, model, seconds, whole in measure(sys.argv[1:] == ["--gpu"]):
        print(f"{what:<28} {model:<19} {seconds:>18.2f} s {whole:>7.1f} s", flush=True)
    print(f"load average {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
