"""One core or all: the same trials free and pinned in alternation, each in a process of its own.

    python studies/affinity.py --seconds 240 --json FILE.jsonl
    python studies/affinity.py --only bert-base,gpt2 --processes 6 --json FILE.jsonl

Trials go through autotune's own runner, on synthetic samples. Every case has one server process, which forks the
trials. The cases come in the order of what they tell; none is begun after ``--seconds``. One JSON object a trial is
written as it ends; a table of all cases comes at the end: mean samples/s, their standard deviation between processes,
the ratio of the means and the share of a step in which the GPU computes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from autotune.core.candidate import Arm, Candidate, Document
from autotune.core.outcome import Completed, Effort, Outcome
from autotune.core.workload import Workload
from autotune.devices import Device, find_device
from autotune.devices.cores import core_for, usable_core_numbers
from autotune.estimate.history import cap_of
from autotune.execution import TrialJob, TrialServer, run_trial
from autotune.models.resolve import resolve_model
from autotune.models.tasks import choose_seq_len, infer_task
from autotune.tuning.prepare import prepare
from autotune.tuning.request import SearchRequest

# As many steps as fit into so many seconds, so that what differs is the process and not the sample of its steps.
_EFFORT = Effort(warmup_steps=5, min_steps=20, max_steps=100, target_spread=0.0, max_seconds=3.0, busy_steps=1)
_PLAIN = Arm("bf16")
_TIMEOUT_SECONDS = 120.0
_COMPILE_TIMEOUT_SECONDS = 400.0


@dataclass(frozen=True)
class Case:
    """What is trained, and how it is placed."""

    name: str
    model: str
    batch: int
    accumulation: int = 1
    seq_len: int | None = None
    arm: Arm = _PLAIN
    processes: int | None = None
    """Of each placement; ``None``: as many as the command line says."""
    cores: tuple[str, ...] = ("chosen",)
    """Of pinned trials: ``chosen`` as a search chooses; ``first``, ``middle``, ``last`` of those that may be used."""


CASES = (
    Case("bert-base", "bert-base-uncased", 32, seq_len=128),
    Case("qwen", "Qwen2.5-0.5B", 2, 8, seq_len=512),
    Case("gpt2", "gpt2", 16, seq_len=1024, processes=2),
    Case("bert-base-loaders", "bert-base-uncased", 32, seq_len=128, arm=Arm("bf16", dataloader_num_workers=4)),
    Case("distilbert", "distilbert-base-uncased", 32, seq_len=128),
    Case("bert-base-cores", "bert-base-uncased", 32, seq_len=128, processes=3, cores=("first", "middle", "last")),
    Case("vit", "vit-base-patch16-224", 16),
    Case("bert-base-checkpointed", "bert-base-uncased", 32, seq_len=128, arm=Arm("bf16", gradient_checkpointing=True)),
    Case("bert-base-tf32", "bert-base-uncased", 32, seq_len=128, arm=Arm("tf32")),
    Case("bert-base-compiled", "bert-base-uncased", 32, seq_len=128, arm=Arm("bf16", torch_compile=True), processes=3),
)


def _core(which: str, device: Device, usable: tuple[int, ...]) -> int | None:
    """The number of a core that a case names."""
    places = {"first": 0, "middle": len(usable) // 2, "last": -1}
    return usable[places[which]] if which in places else core_for(device.uuid, usable)


class _Bench:
    """The trials of one case on one server."""

    def __init__(self, case: Case, device: Device, logs: Path) -> None:
        source = resolve_model(case.model)
        task = infer_task(source.config)
        workload = Workload(source.name, source.config, task, choose_seq_len(source.config, task, case.seq_len))
        self._case, self._device, self._logs = case, device, logs
        self._request = SearchRequest(workload, device, effective_batch=case.batch * case.accumulation)
        self._usable = usable_core_numbers()

    def trials(self, processes: int) -> Iterator[Document]:
        """Free and pinned in turn, in an order that changes; each trial as it ends."""
        case = self._case
        with TrialServer(self._device, self._request.workload, self._logs) as runner:
            ceiling = prepare(self._request, runner.inspect()).ceiling
            for index in range(processes):
                placements = [None, *case.cores]
                for which in placements if index % 2 == 0 else placements[::-1]:
                    arm = replace(case.arm, cpu_affinity=which is not None)
                    candidate = Candidate(arm, case.batch, case.accumulation)
                    started, before = time.monotonic(), _core_seconds()
                    outcome = self._run(runner, candidate, cap_of(arm, ceiling), which)
                    seconds, after = time.monotonic() - started, _core_seconds()
                    record = self._record(candidate, outcome, which, index, seconds)
                    yield record | _taken_away(before, after, record.get("cpu_core"))

    def _run(self, runner: TrialServer, candidate: Candidate, cap_bytes: int, which: str | None) -> Outcome:
        """One trial; a core that is named is the only one that the server may use meanwhile, and so its child."""
        limit = _COMPILE_TIMEOUT_SECONDS if candidate.arm.torch_compile else _TIMEOUT_SECONDS
        name = uuid.uuid4().hex
        job = TrialJob(name, candidate, cap_bytes, _EFFORT, 42, limit, str(self._logs / f"{name}.log"))
        core = None if which in (None, "chosen") else _core(which or "", self._device, self._usable)
        if core is None:
            return run_trial(runner, job)
        servers = _children()
        try:
            for process in servers:
                os.sched_setaffinity(process, {core})
            return run_trial(runner, job)
        finally:
            for process in servers:
                os.sched_setaffinity(process, self._usable)

    def _record(
        self, candidate: Candidate, outcome: Outcome, which: str | None, index: int, seconds: float
    ) -> Document:
        record: Document = {"case": self._case.name, "placement": which or "free", "round": index}
        record |= {"candidate": candidate.parameters(), "trial_seconds": round(seconds, 2), "state": outcome.state}
        if not isinstance(outcome, Completed):
            return record | {"message": outcome.message}
        measured = outcome.measurement
        each = sorted(measured.step_seconds_each)
        return record | {
            "samples_per_second": round(measured.samples_per_second, 3),
            "mean_samples_per_second": round(candidate.samples_per_step / statistics.fmean(each), 3),
            "steps": len(each),
            "step_seconds": round(measured.step_seconds, 6),
            "slowest_step_seconds": round(each[-1], 6),
            "gpu_busy_share": measured.gpu_busy_share,
            "gpu_busy_cost_seconds": measured.gpu_busy_cost_seconds,
            "data_seconds": measured.data_seconds,
            "cpu_core": measured.cpu_core,
            "compile_seconds": measured.compile_seconds,
            "peak_reserved_bytes": measured.peak_reserved_bytes,
            "phase_seconds": outcome.phase_seconds,
        }


# Columns of /proc/stat after the name of the core (proc_stat(5)).
_STAT_COLUMNS = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")


def _core_seconds() -> dict[str, dict[str, float]]:
    """What each core has done since the machine started, in seconds; ``cpu`` is all of them."""
    ticks = os.sysconf("SC_CLK_TCK")
    found = {}
    for line in _lines("/proc/stat"):
        name, *counts = line.split()
        if name.startswith("cpu"):
            found[name] = {column: int(count) / ticks for column, count in zip(_STAT_COLUMNS, counts, strict=False)}
    return found


def _taken_away(before: dict[str, Any], after: dict[str, Any], core: int | None) -> Document:
    """What the pinned core, or all of them, did while a trial ran: interrupts and the hypervisor take from it."""
    name = "cpu" if core is None else f"cpu{core}"
    columns = ("user", "system", "idle", "irq", "softirq", "steal")
    if name not in before or name not in after:
        return {}
    return {"core_seconds": {column: round(after[name][column] - before[name][column], 2) for column in columns}}


def _children() -> list[int]:
    """Process ids of this process's children: the trial server's."""
    own = Path(f"/proc/self/task/{os.getpid()}/children")
    return [int(pid) for pid in own.read_text().split()]


def table(records: list[Document]) -> str:
    """Case by case what each placement gave, and its ratio to the free one."""
    lines = [f"{'case':<24}{'placement':<10}{'n':>3}{'samples/s':>11}{'sd %':>7}{'ratio':>7}{'GPU busy':>10}  cores"]
    kinds = dict.fromkeys((record["case"], record["placement"]) for record in records)
    for case, placement in kinds:
        found = _completed(records, case, placement)
        if not found:
            lines.append(f"{case:<24}{placement:<10}{0:>3}  no trial completed")
            continue
        speeds = [record["samples_per_second"] for record in found]
        mean, free = statistics.fmean(speeds), _completed(records, case, "free")
        spread = statistics.stdev(speeds) / mean if len(speeds) > 1 else float("nan")
        ratio = mean / statistics.fmean(record["samples_per_second"] for record in free) if free else float("nan")
        shares = [record["gpu_busy_share"] for record in found if record["gpu_busy_share"] is not None]
        busy = f"{statistics.fmean(shares):.0%}" if shares else "?"
        cores = ",".join(str(core) for core in sorted({r["cpu_core"] for r in found if r["cpu_core"] is not None}))
        lines.append(
            f"{case:<24}{placement:<10}{len(found):>3}{mean:>11.1f}{spread:>7.1%}{ratio:>7.3f}{busy:>10}  {cores}"
        )
    return "\n".join(lines)


def _completed(records: list[Document], case: str, placement: str) -> list[Document]:
    return [
        record
        for record in records
        if (record["case"], record["placement"]) == (case, placement) and record["state"] == "completed"
    ]


def _machine(device: Device) -> Document:
    import importlib.metadata

    models = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "meta": True,
        "command": ["python", "studies/affinity.py", *sys.argv[1:]],
        "date": time.strftime("%Y-%m-%d"),
        "device": device.name,
        "cpu": models[0] if models else platform.processor(),
        "usable_cores": list(usable_core_numbers()),
        "chosen_core": core_for(device.uuid, usable_core_numbers()),
        "packages": {name: importlib.metadata.version(name) for name in ("torch", "transformers", "accelerate")},
        "python": platform.python_version(),
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _write(stream: TextIO, record: Document) -> None:
    print(json.dumps(record), file=stream, flush=True)


def main() -> None:
    """Run the cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=240.0, help="begin no trial after so long")
    parser.add_argument("--processes", type=int, default=4, help="trials of each placement")
    parser.add_argument("--only", help="names of cases, with commas")
    parser.add_argument("--json", required=True, help="a line for each trial goes here")
    parser.add_argument("--device")
    options = parser.parse_args()
    device = find_device(options.device)
    wanted = options.only.split(",") if options.only else [case.name for case in CASES]
    if unknown := sorted(set(wanted) - {case.name for case in CASES}):
        parser.error(f"no case of the name {', '.join(unknown)}; there are {', '.join(case.name for case in CASES)}")
    deadline = time.monotonic() + options.seconds
    records: list[Document] = []
    with open(options.json, "a", encoding="utf-8") as stream, tempfile.TemporaryDirectory() as logs:
        _write(stream, _machine(device))
        for case in CASES:
            if case.name in wanted and time.monotonic() < deadline:
                _run_case(case, device, Path(logs) / case.name, options.processes, deadline, stream, records)
    print(table(records))


def _run_case(
    case: Case, device: Device, logs: Path, processes: int, deadline: float, stream: TextIO, records: list[Document]
) -> None:
    """All trials of a case, until the time is over; a case that cannot be run is told and left out."""
    trials: Any = _Bench(case, device, logs).trials(case.processes or processes)
    try:
        for record in trials:
            records.append(record)
            _write(stream, record)
            print(record["case"], record["placement"], record.get("samples_per_second", record.get("message")))
            if time.monotonic() > deadline:
                break
    except Exception as error:
        print(f"{case.name}: {type(error).__name__}: {error}")
        _write(stream, {"case": case.name, "error": f"{type(error).__name__}: {error}"})
    finally:
        trials.close()


if __name__ == "__main__":
    main()
