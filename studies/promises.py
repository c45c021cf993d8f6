"""Record whether promises are kept, and what answers gain over an expert's settings: twelve workloads.

    python studies/promises.py --json FILE [--rounds 3] [--seconds S] [--only NAME,…] [--skip-first K]
    python studies/promises.py --compare OLD_TREE --json FILE [--rounds 1] [--seconds S]
    python studies/promises.py --summarize FILE…
    python studies/promises.py --try --json FILE

The first form runs ``autotune search … --fresh --json`` and then ``autotune verify STUDY --steps 100 --json``: one
round of all workloads, then the second round. A JSON line is appended after each pair. ``--skip-first`` leaves out the
first pairs of that order, so that a second machine can continue where the first one ended.

The second form searches five workloads in alternation with this checkout and with the one in ``OLD_TREE``, and compares
the seconds of the whole processes. The third form prints the tables from files of several machines. With ``--try``
the first two take tiny models on the CPU, to see that everything works before a GPU is used.

Databases, logs and checkpoints go to a temporary folder. Before anything is timed, the libraries are imported once and
a tiny model is searched, so that no run pays for a cold disk. A process that fails or takes too long is recorded with
the end of its stderr, and the others go on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from promise_tables import ANSWERED, each_search, rate, read_records, read_search, read_verification, table

from autotune.core.candidate import Document
from autotune.devices.host import processor_name
from autotune.devices.listing import find_device
from autotune.models import catalog
from autotune.space.dataloader import usable_cores

ROOT = Path(__file__).resolve().parents[1]
_LAST_WORDS = 1500
_GRACE_SECONDS = 10.0
_LOOP_ITERATIONS = 5_000_000
_WARM_UP = """
import importlib, sys
for name in ["accelerate", "datasets", "optuna", "sqlalchemy", "transformers.trainer", "torch.profiler", *sys.argv[1:]]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(name, error, file=sys.stderr)
"""


@dataclass(frozen=True)
class Case:
    """A workload of the catalog with random weights and made-up samples."""

    name: str
    model: str
    effective_batch: int
    seq_len: int | None = None
    task: str | None = None
    others: tuple[str, ...] = ()

    def words(self) -> list[str]:
        """Return the options of ``autotune search`` that say what is trained."""
        words = ["--model", self.model, "--effective-batch", str(self.effective_batch)]
        words += ["--seq-len", str(self.seq_len)] if self.seq_len is not None else []
        words += ["--task", self.task] if self.task is not None else []
        return [*words, *self.others]


PROMISES = (
    Case("bert-base", "bert-base-uncased", 32, 128),
    Case("distilbert", "distilbert-base-uncased", 32, 128),
    Case("qwen", "Qwen2.5-0.5B", 16, 512),
    Case("roberta-mlm", "roberta-base", 128, 512, "masked-lm"),
    Case("bert-large", "bert-large-uncased", 64, 512),
    Case("vit-large", "vit-large-patch16-224", 64),
    Case("gpt2-medium", "gpt2-medium", 32, 1024),
    Case("t5-base", "t5-base", 64, 256),
    Case("modernbert", "ModernBERT-base", 64, 512, "masked-lm"),
    Case("llama-1b", "Llama-3.2-1B", 16, 1024, others=("--dtype", "bfloat16")),
    Case("whisper", "whisper-small", 64),
    Case("lora-8b", "Llama-3.1-8B", 16, 1024, others=("--peft", "lora", "--dtype", "bfloat16")),
)
"""The host limits the first three; the order within a round is that of their value."""

RECORDED = (
    Case("bert-large", "bert-large-uncased", 64, 512),
    Case("gpt2-medium", "gpt2-medium", 64, 1024),
    Case("roberta", "roberta-base", 64, 512),
    Case("vit-large", "vit-large-patch16-224", 64),
    Case("qwen", "Qwen2.5-0.5B", 64, 512),
)
"""Those of ``studies/landscapes/*effective64.jsonl``, as they were recorded."""

TINY = (
    Case("bert-tiny", "bert-tiny", 8, 16),
    Case("gpt2-tiny", "gpt2-tiny", 8, 16),
)


# One process


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    exit_code: int | None
    """``None`` where it was ended because its time was over."""
    seconds: float
    document: Document | None
    """What it printed, where that is a JSON object."""
    last_words: str
    """The end of its stderr."""

    @property
    def error(self) -> str | None:
        """Say why there is no answer; ``None`` where there is one."""
        if self.exit_code in ANSWERED and self.document is not None:
            return None
        how = "its time was over" if self.exit_code is None else f"exit code {self.exit_code}"
        return f"{how} after {self.seconds:.1f} s: {self.last_words}"


def run(command: Sequence[str], folder: Path, environment: dict[str, str], timeout_seconds: float) -> Ended:
    """Run one process in ``folder`` to its end, or until its time is over."""
    out_path, err_path = folder / "out.txt", folder / "err.txt"
    with open(out_path, "wb") as out, open(err_path, "wb") as err:
        started = time.monotonic()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
        try:
            exit_code: int | None = process.wait(timeout=max(timeout_seconds, 1.0))
        except subprocess.TimeoutExpired:
            exit_code = None
        finally:
            _end(process)
        seconds = time.monotonic() - started
    last_words = err_path.read_text(encoding="utf-8", errors="replace")[-_LAST_WORDS:].strip()
    return Ended(exit_code, round(seconds, 3), _document(out_path), last_words)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process that still runs: politely, so that it ends its own children, and then by force."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(timeout=_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _document(path: Path) -> Document | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def environment_of(tree: Path, variables: dict[str, str], here: Path = ROOT) -> dict[str, str]:
    """Return the variables with which Python finds ``tree`` first and this checkout only if that is ``tree``."""
    paths = [path for path in variables.get("PYTHONPATH", "").split(os.pathsep) if path]
    others = [path for path in paths if Path(path).resolve() not in (here.resolve(), tree.resolve())]
    absolute = [str(Path(path).resolve()) for path in others]
    return {**variables, "PYTHONPATH": os.pathsep.join([str(tree.resolve()), *absolute]), "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Bench:
    """What all processes of this run share."""

    options: argparse.Namespace
    folder: Path
    deadline: float
    facts: Document

    @property
    def seconds_left(self) -> float:
        """Seconds until the run must end."""
        return self.deadline - time.monotonic()

    def autotune(self, tree: Path, folder: Path, *words: str) -> Ended:
        """Run one command of the ``autotune`` that lies in ``tree``."""
        timeout = min(self.options.timeout, self.seconds_left)
        command = [sys.executable, "-m", "autotune", *words]
        return run(command, folder, environment_of(tree, dict(os.environ)), timeout)

    def search(self, tree: Path, case: Case, folder: Path, *more: str) -> tuple[Ended, Document]:
        """Search a workload in a database of its own; return how that ended, and its record."""
        words = ["search", *case.words(), *self._where(), "--fresh", "--json"]
        words += ["--study", case.name, "--storage", str(folder / "autotune.db"), *more]
        ended = self.autotune(tree, folder, *words)
        record = {"search_exit_code": ended.exit_code, "search_wall_seconds": ended.seconds}
        return ended, record | (read_search(ended.document) if ended.document is not None else {})

    def _where(self) -> list[str]:
        device = ["--device", self.options.device] if self.options.device else []
        return ["--memory-limit", self.options.memory_limit, *device]

    def begin(self, kind: str, case: Case, index: int) -> Document:
        """Return what every record begins with."""
        date = datetime.now(UTC).isoformat(timespec="seconds")
        load = round(os.getloadavg()[0], 2)
        begun = {"kind": kind, "date": date, "round": index, "workload": case.name, "search_options": case.words()}
        return {**begun, "load_average": load, "python_loop_seconds": python_loop_seconds(), "facts": self.facts}


# The machine


def python_loop_seconds() -> float:
    """Measure how fast a core runs Python: seconds of 5 million additions in a loop."""
    started, total = time.perf_counter(), 0
    for number in range(_LOOP_ITERATIONS):
        total += number
    return round(time.perf_counter() - started, 3)


def facts_of(options: argparse.Namespace) -> Document:
    """Record the machine, the checkout and the command."""
    device = find_device(options.device)
    return {
        "command": ["python", "studies/promises.py", *sys.argv[1:]],
        "commit": options.commit or commit_of(ROOT),
        "source_digest": source_digest(ROOT),
        "device": device.name,
        "device_uuid": device.uuid,
        "driver": device.driver,
        "cpu": processor_name(),
        "cores": usable_cores(),
        "python": platform.python_version(),
        "kernel": platform.release(),
    }


def commit_of(tree: Path) -> str | None:
    """Return the commit of a checkout, with ``-dirty`` where files differ; ``None`` where git does not know."""
    if not (tree / ".git").exists():
        return None  # git would answer for a checkout around it
    words = ["git", "-C", str(tree), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True, timeout=30).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def source_digest(tree: Path) -> str:
    """Return a digest of the package's source, which tells two trees apart where git is absent."""
    digest = hashlib.sha256()
    for path in sorted((tree / "autotune").rglob("*.py")):
        digest.update(path.relative_to(tree).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


# Promises


def schedule(cases: Sequence[Case], rounds: int, skip_first: int = 0) -> list[tuple[int, Case]]:
    """Order all workloads once, then all once more; leave out the first ones."""
    return [(index, case) for index in range(rounds) for case in cases][skip_first:]


def keep_promise(bench: Bench, case: Case, index: int, folder: Path) -> Document:
    """Search a workload, verify its winner, and return the record of both."""
    record = bench.begin("promise", case, index)
    searched, found = bench.search(ROOT, case, folder)
    record |= found
    if searched.error is not None or "winner" not in found:
        return record | {"error": f"search: {searched.error or 'no winner'}", "cut_off": bench.seconds_left <= 0}
    words = ["--steps", str(bench.options.steps), "--json", "--storage", str(folder / "autotune.db")]
    verified = bench.autotune(ROOT, folder, "verify", case.name, *words)
    record |= {"verify_exit_code": verified.exit_code, "verify_wall_seconds": verified.seconds}
    if verified.document is not None:
        record |= read_verification(verified.document)
        record["verification"] = verified.document
    if verified.error is not None:
        record |= {"error": f"verify: {verified.error}", "cut_off": bench.seconds_left <= 0}
    return record


# Two checkouts


def compare(bench: Bench, case: Case, index: int, folder: Path) -> Document:
    """Search a workload with both checkouts; which goes first depends on the round and the workload."""
    record = bench.begin("comparison", case, index)
    old = bench.options.compare
    record |= {"old_commit": bench.options.old_commit or commit_of(old), "old_source_digest": source_digest(old)}
    names = [case.name for case in RECORDED]
    place = names.index(case.name) if case.name in names else 0
    trees = [("new", ROOT), ("old", old)]
    record["first"] = trees[(index + place) % 2][0]
    for name, tree in trees if record["first"] == "new" else trees[::-1]:
        own = folder / name
        own.mkdir()
        ended, found = bench.search(tree, case, own)
        record[name] = found
        if ended.error is not None:
            record |= {"error": f"{name}: {ended.error}", "cut_off": bench.seconds_left <= 0}
            return record
    record["ratio"] = round(record["new"]["search_wall_seconds"] / record["old"]["search_wall_seconds"], 4)
    return record


def check_tree(tree: Path) -> None:
    """End the program where Python would not import ``autotune`` from ``tree``."""
    words = [sys.executable, "-c", "import autotune; print(autotune.__file__)"]
    with tempfile.TemporaryDirectory() as elsewhere:
        environment = environment_of(tree, dict(os.environ))
        done = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=elsewhere, timeout=60)
    if done.returncode or not Path(done.stdout.strip()).resolve().is_relative_to(tree.resolve()):
        raise SystemExit(f"{tree} is not a checkout: autotune would come from {done.stdout.strip() or done.stderr}")


# All of it


def warm_up(bench: Bench, cases: Sequence[Case]) -> None:
    """Read libraries from the disk and the GPU's driver into memory, so that the first timed process has them."""
    modules = []
    for case in cases:
        entry = catalog.find(case.model)
        kind = entry.config["model_type"] if entry is not None else None
        modules += [f"transformers.models.{kind}.modeling_{kind}"] if kind else []
    folder = bench.folder / "warm-up"
    folder.mkdir()
    environment = environment_of(ROOT, dict(os.environ))
    imported = run([sys.executable, "-c", _WARM_UP, *modules], folder, environment, bench.options.timeout)
    print(f"warm-up: {imported.seconds:.1f} s of imports", flush=True)
    if imported.exit_code != 0:
        print(imported.last_words, flush=True)
    for number, tree in enumerate([ROOT, bench.options.compare] if bench.options.compare else [ROOT]):
        own = folder / str(number)
        own.mkdir()
        searched, _ = bench.search(tree, TINY[0], own, "--trials", "2")
        print(f"warm-up: a search of {searched.seconds:.1f} s {searched.error or ''}", flush=True)


def run_all(bench: Bench, jobs: Sequence[tuple[int, Case]], stream: TextIO) -> list[Document]:
    """Run the jobs in order; one that probably takes longer than the time that is left is passed over."""
    records: list[Document] = []
    took: dict[str, float] = {}
    for index, case in jobs:
        expected = took.get(case.name, statistics.median(took.values()) if took else 0.0)
        if bench.seconds_left <= expected:
            print(f"{case.name}, round {index}: {bench.seconds_left:.0f} s are too few", flush=True)
            continue
        started = time.monotonic()
        with tempfile.TemporaryDirectory(dir=bench.folder, ignore_cleanup_errors=True) as folder:
            record = _attempt(bench, case, index, Path(folder))
        took[case.name] = time.monotonic() - started
        records.append(record)
        print(json.dumps(record), file=stream, flush=True)
        print(_progress(record), flush=True)
    return records


def _attempt(bench: Bench, case: Case, index: int, folder: Path) -> Document:
    """Run one job; an answer that cannot be read is recorded as an error and does not end the run."""
    one = compare if bench.options.compare else keep_promise
    try:
        return one(bench, case, index, folder)
    except (LookupError, TypeError, ValueError, OSError) as error:
        kind = "comparison" if bench.options.compare else "promise"
        return bench.begin(kind, case, index) | {"error": f"{type(error).__name__}: {error}"}


def _progress(record: Document) -> str:
    words = f"{record['workload']}, round {record['round']}: "
    if "error" in record:
        return words + str(record["error"])
    if record["kind"] == "comparison":
        return words + f"new {each_search([record], 'new')}, old {each_search([record], 'old')}: {record['ratio']:.3f}"
    speeds = rate(record["promised_samples_per_second"]), rate(record["obtained_samples_per_second"])
    return words + f"{record['winner']}: promised {speeds[0]}, obtained {speeds[1]}: {record['verdict']}"


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="a line for each pair of processes is appended here")
    parser.add_argument("--compare", type=Path, metavar="OLD_TREE", help="another checkout of this project")
    parser.add_argument("--summarize", type=Path, nargs="+", metavar="FILE", help="print the tables of these files")
    parser.add_argument("--rounds", type=int, help="[default: 3, with --compare 1]")
    parser.add_argument("--only", help="names of workloads, with commas")
    parser.add_argument("--skip-first", type=int, default=0, metavar="K", help="leave out so many of the order")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end after so long, warm-up included")
    parser.add_argument("--timeout", type=float, default=150.0, help="seconds for one process")
    parser.add_argument("--steps", type=int, default=100, help="of the stock run")
    parser.add_argument("--memory-limit", default="24GiB")
    parser.add_argument("--device")
    parser.add_argument("--commit", help="what is recorded as the commit [default: git's answer]")
    parser.add_argument("--old-commit", help="the same for OLD_TREE")
    parser.add_argument("--try", dest="tries", action="store_true", help="tiny models on the CPU")
    options = parser.parse_args(words)
    if options.tries:
        options.device, options.memory_limit, options.steps = "cpu", "4GiB", 20
    if options.rounds is None:
        options.rounds = 1 if options.compare else 3
    if not options.summarize and options.json is None:
        parser.error("--json FILE is missing: the records go there")
    options.cases = TINY if options.tries else RECORDED if options.compare else PROMISES
    if options.only:
        known = {case.name: case for case in options.cases}
        if unknown := sorted(set(options.only.split(",")) - set(known)):
            parser.error(f"no workload of the name {', '.join(unknown)}; there are {', '.join(known)}")
        options.cases = tuple(known[name] for name in options.only.split(","))
    return options


def main() -> int:
    """Run what was asked for, and print the table."""
    options = parse()
    if options.summarize:
        print(table(read_records(options.summarize)))
        return 0
    deadline = time.monotonic() + options.seconds
    if options.compare:
        check_tree(options.compare)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="promises-", ignore_cleanup_errors=True) as folder,
        open(options.json, "a", encoding="utf-8") as stream,
    ):
        bench = Bench(options, Path(folder), deadline, facts_of(options))
        warm_up(bench, options.cases)
        records = run_all(bench, schedule(options.cases, options.rounds, options.skip_first), stream)
    print(table(records))
    return 0 if any("error" not in record for record in records) else 1


if __name__ == "__main__":
    sys.exit(main())
