"""Inspects a command with placeholders as a job does: ``inspect_script.py beside|in-turn PROTECTION BEFORE WORD…``.

The script is told BEFORE in a variable. Prints the answer, how its process ended, why another one ended it, the lines
of the log about steps, and the files that trials are to find.
"""

import json
import os
import sys
from pathlib import Path
from typing import NoReturn

from autotune.core.device import CPU_UUID
from autotune.core.inspection import InspectionAnswer
from autotune.core.jobs import InspectionWork
from autotune.core.placement import RankDevices
from autotune.core.protection import Protection
from autotune.core.schema import encode
from autotune.core.scratch import Scratch, make_scratch
from autotune.core.training_source import TrainingSource, find_script
from autotune.worker.imports import import_everything
from autotune.worker.process import leave, redirect_output
from autotune.worker.rendezvous import Ranks
from autotune.worker.user import placeholder_inspection, protection
from autotune.worker.user.inspection import Code


def log_of(scratch: Scratch) -> str:
    return os.path.join(scratch.path, "job.log")


def inspect(source: TrainingSource, scratch: Scratch, answer_file: Path) -> NoReturn:
    def finish(answer: InspectionAnswer) -> NoReturn:
        answer_file.write_text(json.dumps(encode(answer)))
        leave(0)

    redirect_output(log_of(scratch))
    os.environ["BEFORE"] = sys.argv[3]
    protection.protect(Protection(sys.argv[2]), scratch, source.cwd, Ranks(), shares=False)  # type: ignore[arg-type]
    scratch.enter()
    code = Code(source, InspectionWork(RankDevices("cpu", (CPU_UUID,))), scratch)
    placeholder_inspection.inspect(code, finish, beside=sys.argv[1] == "beside")


def main() -> None:
    source = find_script(sys.argv[4:])
    import_everything({}, is_plain=True)
    scratch, layer = make_scratch("autotune-test-"), make_scratch("autotune-test-layer-")
    answer, stop = Path(scratch.path, "answer"), Path(scratch.stop_file)
    if (pid := os.fork()) == 0:
        inspect(source, scratch, answer)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    protection.take_kept(scratch, layer.output_dir)
    said = {
        "answer": json.loads(answer.read_text()) if answer.exists() else None,
        "code": code,
        "stopped": json.loads(stop.read_text())["message"] if stop.exists() else None,
        "log": [line for line in Path(log_of(scratch)).read_text().splitlines() if line.startswith("step ")],
        "kept": sorted({name for _, _, names in os.walk(layer.output_dir) for name in names}),
    }
    print(json.dumps(said))
    layer.remove()
    scratch.remove()


if __name__ == "__main__":
    main()
