"""Measure how soon a search's first trial starts after it was started: cold, and with a warm trial server.

Five searches on this machine's CPU through a real service, or whole searches of BERT-large on the first GPU at a limit
of 24 GiB. A trial's process makes its log first.
"""

import os
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from served import Service

TINY = {"effective_batch": 16, "seq_len": 32, "trials": 1, "fresh": True}
LARGE = {"effective_batch": 64, "memory_limit": "24GiB", "fresh": True}
COLD, WARM, AGAIN, OTHER = (
    "the service has just started", "the same workload again", "the same workload once more", "another model",
)  # fmt: skip
SEARCHES = (
    (COLD, "bert-tiny"), (WARM, "bert-tiny"), (AGAIN, "bert-tiny"), (OTHER, "gpt2-tiny"), (WARM, "gpt2-tiny"),
)  # fmt: skip
SEARCHES_ON_A_GPU = tuple((what, "bert-large-uncased") for what in (COLD, WARM, AGAIN))
START = "{}, {}: start to first trial (s)"
AIMS = {START.format(model, what): 1.0 for what, model in SEARCHES if what in (WARM, AGAIN)}
"""On a device that is warm."""


def measure(folder: Path, *, on_gpu: bool = False) -> dict[str, Any]:
    """Run the searches; return the seconds from the start of each to its first trial, and those of the whole."""
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0") if on_gpu else ""
    found = {}
    with Service(folder, CUDA_VISIBLE_DEVICES=gpus) as service:
        service.serve()
        for what, model in SEARCHES_ON_A_GPU if on_gpu else SEARCHES:
            to_first, whole = _search(service, {**(LARGE if on_gpu else TINY), "model": model})
            found[START.format(model, what)] = round(to_first, 2)
            found[f"{model}, {what}: submitted to answered (s)"] = round(whole, 1)
    return found


def _search(service: Service, request: dict[str, Any]) -> tuple[float, float]:
    submitted = time.time()
    search = service.call("POST", "/v1/searches", request)
    log = service.folder / "studies" / "logs" / search["study"] / "trial-0000.log"
    deadline = submitted + 300
    while not log.exists():
        if time.time() > deadline:
            raise TimeoutError(f"no trial of {search['study']} began")
        time.sleep(0.005)
    began = time.time()
    while (told := service.call("GET", f"/v1/searches/{search['id']}"))["state"] in ("queued", "running"):
        if time.time() > deadline:
            raise TimeoutError(f"{search['study']} did not end")
        time.sleep(0.2)
    if told["state"] != "finished":
        raise RuntimeError(told["problem"])
    return began - datetime.fromisoformat(told["started_at"]).timestamp(), time.time() - submitted
