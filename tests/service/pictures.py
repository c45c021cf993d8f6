"""Take the pictures of the service's pages that the documentation shows.

``python tests/service/pictures.py docs/images`` starts a service over two searches that were recorded on an H200, with
stand-ins for its devices, and photographs its pages in the system's Chromium.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "studies")]

import serving  # noqa: E402
from browsing import PHONE, open_tab  # noqa: E402
from recorded import EFFECTIVE_64, RecordedRunner  # noqa: E402
from searching import H200, search  # noqa: E402
from starlette.testclient import TestClient  # noqa: E402

from autotune.service.app import make_app  # noqa: E402
from autotune.service.searches import Searches  # noqa: E402
from autotune.service.tokens import add_token  # noqa: E402
from autotune.store.opening import open_store  # noqa: E402

LARGE = {"model": "bert-large-uncased", "effective_batch": 64, "memory_limit": "23.5GiB"}
WIDE = (1000, 860)


def record(storage: str) -> str:
    """Record two searches that have finished; return a token."""
    engine = serving.StandInEngine()
    engine.add(H200)
    with open_store(storage) as store:
        searches, token = Searches(store, storage, engine), add_token(store.queue, "ann", "run")
        with TestClient(make_app(searches), base_url=serving.URL) as plain:
            client = serving.with_token(plain, token)
            client.post("/v1/searches", json=LARGE).raise_for_status()
            serving.run_recorded(searches, engine)
            in_fp32 = {**LARGE, "precision": ["fp32"], "study": "bert-large-uncased-64-fp32"}
            client.post("/v1/searches", json=in_fp32).raise_for_status()
            run = engine.next_run()
            search(store, RecordedRunner(EFFECTIVE_64), study=run.work.study, precisions=("fp32",))
            run.end("finished")
            serving.waits_for_state(searches, run.job, "finished")
    return token


class Visitor:
    """A client of the service that runs."""

    def __init__(self, url: str, token: str) -> None:
        self.url, self.token = url, token

    def post(self, path: str, document: object) -> Any:
        """Send a document and return the answer."""
        headers = {"Authorization": f"Bearer {self.token}"}
        request = urllib.request.Request(self.url + path, json.dumps(document).encode(), headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read())

    def fill_queue(self) -> None:
        """Have one search run, and others wait."""
        self.post("/v1/searches", {"model": "gpt2-medium", "effective_batch": 32, "device": "h200"})
        self.post("/v1/searches", {"model": "roberta-large", "effective_batch": 64, "gpus": 2})


@contextlib.contextmanager
def service(storage: str, port: int = 8321) -> Iterator[str]:
    """Run a service over a database; yield its address."""
    plan = Path(storage).with_name("plan.json")
    hosts = [{"name": name, "gpus": 1} for name in ("gpu-1", "gpu-2")]
    plan.write_text(json.dumps({"devices": hosts, "seconds": None}))
    program = str(Path(__file__).with_name("standing_in.py"))
    words = [sys.executable, program, str(plan), "serve", "--port", str(port), "--storage", storage]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def photograph(visitor: Visitor, folder: Path) -> None:
    """Save a picture of each page that the documentation shows."""
    result = f"{visitor.url}/searches/bert-large-uncased-64"
    comparison = f"{visitor.url}/compare?s=bert-large-uncased-64&s=bert-large-uncased-64-fp32"
    with open_tab(visitor.url, WIDE) as tab:
        tab.page.goto(f"{visitor.url}/#token={visitor.token}")
        for label, text in {"Model": "bert-large-uncased", "Effective batch": "64", "GPU": "b200"}.items():
            tab.page.get_by_label(label, exact=True).fill(text)
        tab.page.get_by_text("It will wait: no machine has").wait_for()
        tab.page.locator("h1").click()
        tab.picture(folder, "service-form-light")
        tab.page.goto(comparison)
        tab.picture(folder, "service-compare-light")
    with open_tab(visitor.url, (1000, 1080), "dark") as tab:
        tab.page.goto(f"{visitor.url}/#token={visitor.token}")
        tab.page.get_by_role("main").wait_for()
        tab.page.goto(result)
        tab.picture(folder, "service-result-dark", whole=False)
    with open_tab(visitor.url, PHONE) as tab:
        tab.page.goto(f"{visitor.url}/#token={visitor.token}")
        tab.page.get_by_role("main").wait_for()
        tab.page.goto(result)
        tab.picture(folder, "service-phone-light", whole=False)


def main() -> None:
    """Take the pictures into the folder that was named."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        storage = f"{place}/a.db"
        token = record(storage)
        with service(storage) as url:
            visitor = Visitor(url, token)
            visitor.fill_queue()
            photograph(visitor, folder)


if __name__ == "__main__":
    main()
