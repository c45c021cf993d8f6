"""Live, on one machine: our search against the batch finders that people use today, whole processes in turn.

    python studies/peers.py --model bert-large-uncased --memory-limit 24GiB --repeats 3 --json FILE

Every contender is a fresh process, timed from its start to its end, imports included:

- ``autotune``: ``autotune search`` over precision × checkpointing × batch × accumulation, in a database of its own;
- ``autotune grid``: the same with ``--sampler grid``, every candidate that is not known to be out of memory;
- ``accelerate``: ``find_executable_batch_size`` from ``--start`` down, 4 steps a try;
- ``Trainer``: ``auto_find_batch_size=True`` from ``--start`` down, 4 steps;
- ``Lightning power`` and ``Lightning binsearch``: its batch size finder at its defaults, 3 steps a try.

The finders search one integer, the per-device batch, with bf16 autocast and fused AdamW; their allocator is capped
as that of a trial is. Which goes first changes from repeat to repeat. Afterwards, untimed, each answer is measured by a
trial of ours: at the effective batch, with accumulation, where the answer divides it, and by itself.

The JSON is written after every process; started again with the same options, only what is missing is run, so that a
measurement may be taken in several goes. A contender that fails is reported with its last words, and the others go on.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from replay import ROOT
from rich import box
from rich.console import Console
from rich.table import Table

from autotune.core.candidate import Arm, Candidate, Document
from autotune.core.outcome import Completed, Effort, Failed
from autotune.core.units import parse_bytes
from autotune.core.workload import Workload
from autotune.devices import Device, find_device
from autotune.execution import TrialJob, TrialServer, run_trial
from autotune.models.resolve import resolve_model
from autotune.models.tasks import choose_seq_len, infer_task
from autotune.tuning.prepare import Prepared, prepare
from autotune.tuning.request import SearchRequest

FINDERS = Path(__file__).resolve().parent / "finders"
CONTENDERS: dict[str, list[str]] = {
    "autotune": [],
    "accelerate": ["by_accelerate.py"],
    "Trainer": ["by_trainer.py"],
    "Lightning power": ["by_lightning.py", "power"],
    "Lightning binsearch": ["by_lightning.py", "binsearch"],
    "autotune grid": ["--sampler", "grid"],
}
_STEPS = 4
_LAST_WORDS = 600
# Read once before anything is timed, so that nobody pays for a cold disk.
_WARM_UP = "import accelerate, datasets, lightning.pytorch, optuna, sqlalchemy, transformers.trainer"


@dataclass(frozen=True)
class Setting:
    """Where and on what the contenders run; the same for all."""

    options: argparse.Namespace
    device: Device
    workload: Workload
    prepared: Prepared
    folder: Path
    """For what the contenders write."""

    @property
    def environment(self) -> dict[str, str]:
        """What every process sees: the one device, the checkout, no network."""
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        visible = self.device.uuid if self.device.kind == "cuda" else ""
        return {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": visible, "HF_HUB_OFFLINE": "1"}


def request_of(options: argparse.Namespace) -> SearchRequest:
    """The search that ``autotune search`` makes of the same options."""
    source = resolve_model(options.model)
    task = infer_task(source.config)
    seq_len = choose_seq_len(source.config, task, options.seq_len)
    return SearchRequest(
        workload=Workload(source.name, source.config, task, seq_len),
        device=find_device(options.device),
        effective_batch=options.effective_batch,
        memory_limit_bytes=parse_bytes(options.memory_limit),
    )


# One process


def command_of(name: str, setting: Setting, folder: Path) -> list[str]:
    """The words that start a contender; its answer will be on stdout (ours) or in ``result.json``."""
    options, words = setting.options, CONTENDERS[name]
    if name.startswith("autotune"):
        # Not through the visible device: the search hides the others from its trials itself.
        asked = ["--model", options.model, "--effective-batch", str(options.effective_batch)]
        asked += ["--memory-limit", options.memory_limit, "--seq-len", str(setting.workload.seq_len)]
        asked += ["--storage", str(folder / "autotune.db"), "--json", *words]
        asked += ["--device", "cpu"] if setting.device.kind == "cpu" else []
        return [sys.executable, "-m", "autotune", "search", *asked]
    given = {
        "config": setting.workload.config,
        "seq_len": setting.workload.seq_len,
        "device": setting.device.kind,
        "bf16": setting.device.kind == "cuda",
        "cap_bytes": setting.prepared.ceiling.cap_bytes,
        "start": options.start,
        "steps": _STEPS,
    }
    (folder / "settings.json").write_text(json.dumps(given), encoding="utf-8")
    script, *mode = words
    return [sys.executable, str(FINDERS / script), str(folder / "settings.json"), str(folder / "result.json"), *mode]


def answer_of(name: str, folder: Path) -> Document:
    """What a contender found, and how much it tried."""
    if not name.startswith("autotune"):
        found: Document = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        return {"parameters": {"per_device_train_batch_size": found["per_device_train_batch_size"]}, **found}
    report = json.loads((folder / "out.txt").read_text(encoding="utf-8"))
    trials = report["trials"]
    ooms = sum(trial["state"] == "out_of_memory" for trial in trials)
    best = {name: report["best"][name] for name in Candidate(Arm(), 1).parameters()}
    told = {"samples_per_second": report["best"]["samples_per_second"], "search_seconds": report["seconds"]}
    return {"parameters": best, "trials": len(trials), "out_of_memory": ooms, **told}


def run_one(name: str, setting: Setting, repeat: int) -> Document:
    """One contender, once; whatever happens to it is a result."""
    folder = setting.folder / f"{name.replace(' ', '-')}-{repeat}"
    folder.mkdir()
    command = command_of(name, setting, folder)
    run: Document = {"contender": name, "repeat": repeat, "ok": False}
    with open(folder / "out.txt", "wb") as out, open(folder / "err.txt", "wb") as err:
        started = time.monotonic()
        process = subprocess.Popen(
            command, stdout=out, stderr=err, cwd=folder, env=setting.environment, start_new_session=True
        )
        try:
            code: int | None = process.wait(timeout=setting.options.timeout)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            code = None
        run["seconds"] = round(time.monotonic() - started, 2)
    last_words = (folder / "err.txt").read_text(encoding="utf-8", errors="replace")[-_LAST_WORDS:]
    if code != 0:
        how = f"exit code {code}" if code is not None else f"no end after {setting.options.timeout:g} s"
        return {**run, "error": f"{how}: {last_words}"}
    try:
        return {**run, "ok": True, "answer": answer_of(name, folder)}
    except (OSError, ValueError, KeyError, TypeError) as error:
        return {**run, "error": f"no answer ({error!r}): {last_words}"}


# The answers, measured


def candidates_of(parameters: Document, effective_batch: int, bf16: bool) -> dict[str, Candidate]:
    """What to measure of an answer: at the effective batch where it divides that, and by itself."""
    if "precision" in parameters:
        return {"at_effective_batch": Candidate.from_parameters(parameters)}
    batch = int(parameters["per_device_train_batch_size"])
    arm = Arm("bf16" if bf16 else "fp32")
    found = {"by_itself": Candidate(arm, batch, 1)}
    if effective_batch % batch == 0:
        found["at_effective_batch"] = Candidate(arm, batch, effective_batch // batch)
    return found


def measure(candidate: Candidate, setting: Setting, runner: TrialServer) -> Document:
    """One trial in full; its speed and whether it stays under the line."""
    effort = Effort(min_steps=5, max_micro_steps=candidate.gradient_accumulation_steps, max_seconds=4.0)
    ceiling = setting.prepared.ceiling
    log = str(setting.folder / "measure.log")
    job = TrialJob(uuid.uuid4().hex, candidate, ceiling.cap_bytes, effort, 42, 300.0, log)
    outcome = run_trial(runner, job)
    told: Document = {**candidate.parameters(), "state": outcome.state}
    if isinstance(outcome, Completed):
        measured = outcome.measurement
        told["samples_per_second"] = round(measured.samples_per_second, 2)
        told["relative_spread"] = round(measured.relative_spread, 4)
        told["peak_reserved_bytes"] = measured.peak_reserved_bytes
        told["leaves_the_headroom"] = ceiling.fits(measured.peak_reserved_bytes)
    elif isinstance(outcome, Failed):
        told["message"] = outcome.message
    return told


def measure_answers(document: Document, setting: Setting, runner: TrialServer, save: Callable[[], None]) -> None:
    """Every answer that was given, each once."""
    for run in document["runs"]:
        if not run["ok"]:
            continue
        parameters = run["answer"]["parameters"]
        effective_batch, bf16 = setting.options.effective_batch, setting.device.kind == "cuda"
        for candidate in candidates_of(parameters, effective_batch, bf16).values():
            if candidate.describe() not in document["measured"]:
                document["measured"][candidate.describe()] = measure(candidate, setting, runner)
                save()


# All of it


def schedule(names: list[str], repeats: int) -> list[tuple[str, int]]:
    """Each contender once a repeat; another one goes first each time."""
    turns = [names[repeat % len(names) :] + names[: repeat % len(names)] for repeat in range(repeats)]
    return [(name, repeat) for repeat, turn in enumerate(turns) for name in turn]


def print_table(document: Document) -> None:
    """One row a contender, as Markdown."""
    table = Table(box=box.MARKDOWN)
    titles = ("contender", "seconds: median (each)", "tries", "answer", "samples/s at the effective batch", "by itself")
    for title in titles:
        table.add_column(title, no_wrap=True)
    settings, measured = document["settings"], document["measured"]
    for name in CONTENDERS:
        runs = [run for run in document["runs"] if run["contender"] == name]
        good = [run for run in runs if run["ok"]]
        if runs and not good:
            table.add_row(name, "failed", "", runs[-1]["error"].strip().splitlines()[-1][:60], "", "")
        if not good:
            continue
        seconds = [run["seconds"] for run in good]
        each = " ".join(f"{value:.1f}" for value in seconds)
        answers: dict[str, dict[str, str]] = {}
        for run in good:
            parameters = run["answer"]["parameters"]
            found = candidates_of(parameters, settings["effective_batch"], settings["device_kind"] == "cuda")
            shown = Candidate.from_parameters(parameters).describe() if "precision" in parameters else None
            words = shown or f"batch {parameters['per_device_train_batch_size']}"
            answers[words] = {where: _speed(measured.get(one.describe())) for where, one in found.items()}
        tries = {run["answer"].get("trials") or len(run["answer"].get("tried", ())) for run in good}
        table.add_row(
            name,
            f"{statistics.median(seconds):.1f} ({each})",
            "–".join(map(str, sorted({min(tries), max(tries)}))),
            ", ".join(answers),
            ", ".join(figures.get("at_effective_batch", "cannot") for figures in answers.values()),
            ", ".join(figures.get("by_itself", "") for figures in answers.values()),
        )
    Console(width=200).print(table)


def _speed(measured: Document | None) -> str:
    if measured is None:
        return "not measured"
    if "samples_per_second" not in measured:
        return str(measured["state"]).replace("_", " ")
    over = "" if measured["leaves_the_headroom"] else " (over the headroom)"
    return f"{measured['samples_per_second']:.0f}{over}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bert-large-uncased", help="a text encoder of the catalog")
    parser.add_argument("--seq-len", type=int)
    parser.add_argument("--effective-batch", type=int, default=64)
    parser.add_argument("--memory-limit", default="24GiB")
    parser.add_argument("--device")
    parser.add_argument("--start", type=int, default=128, help="where those that go down begin; accelerate's default")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", help="contenders, separated by commas")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one process")
    parser.add_argument("--stop-after", type=float, default=float("inf"), help="seconds; then nobody else is started")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    return parser.parse_args()


def _begin(options: argparse.Namespace, prepared: Prepared) -> Document:
    """The document so far, where the file holds one of the same settings; else an empty one."""
    names = ("model", "effective_batch", "memory_limit", "start")
    settings = {name: getattr(options, name) for name in names}
    settings |= {"seq_len": prepared.request.workload.seq_len, "device_kind": prepared.request.device.kind}
    settings["device_name"] = prepared.request.device.name
    environment = {k: v for k, v in prepared.environment.items() if k != "training_arguments_fields"}
    if options.json.exists():
        known: Document = json.loads(options.json.read_text(encoding="utf-8"))
        if known["settings"] == settings:
            return known
        raise SystemExit(f"{options.json} is of other settings: {known['settings']}")
    ceiling = {"cap_bytes": prepared.ceiling.cap_bytes, "line_bytes": prepared.ceiling.line_bytes}
    date = datetime.now(UTC).isoformat(timespec="seconds")
    begun = {"date": date, "settings": settings, "environment": environment, "ceiling": ceiling}
    return {**begun, "runs": [], "measured": {}}


def main() -> None:
    """Run what is missing, then measure the answers."""
    options = _options()
    begun = time.monotonic()
    request = request_of(options)
    folder = Path(tempfile.mkdtemp(prefix="peers-"))
    with TrialServer(request.device, request.workload, folder / "inspect") as runner:
        prepared = prepare(request, runner.inspect())
    setting = Setting(options, request.device, request.workload, prepared, folder)
    document = _begin(options, prepared)

    def save() -> None:
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    subprocess.run([sys.executable, "-c", _WARM_UP], env=setting.environment, capture_output=True, check=False)
    names = options.only.split(",") if options.only else list(CONTENDERS)
    done = {(run["contender"], run["repeat"]) for run in document["runs"] if run["ok"]}
    for name, repeat in schedule(names, options.repeats):
        if (name, repeat) in done:
            continue
        if time.monotonic() - begun > options.stop_after:
            print("stopped; the same command goes on from here", file=sys.stderr)
            break
        run = run_one(name, setting, repeat)
        document["runs"].append(run)
        save()
        said = json.dumps(run["answer"]["parameters"]) if run["ok"] else run["error"].strip()
        print(f"{name}, repeat {repeat}: {run['seconds']} s, {said}", file=sys.stderr, flush=True)
    with TrialServer(request.device, request.workload, folder / "measure") as runner:
        measure_answers(document, setting, runner, save)
    print_table(document)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
