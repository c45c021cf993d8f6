"""Prints what ``TrainingArguments`` a trial would train with; each line of the input is a candidate's parameters."""

import json
import os
import sys
import tempfile

from autotune.core.candidate import Candidate
from autotune.core.outcome import Effort
from autotune.worker.trial.run import trainer_arguments


def main() -> None:
    """One line of JSON for every line of standard input; the device's kind is the only argument."""
    with tempfile.TemporaryDirectory() as folder:
        for line in sys.stdin:
            arguments = trainer_arguments(Candidate.from_parameters(json.loads(line)), sys.argv[1], Effort(), folder, 7)
            derived = {
                name: getattr(arguments, name) for name in ("world_size", "process_index", "n_gpu", "train_batch_size")
            }
            facts = {**arguments.to_dict(), **derived, "parallel_mode": arguments.parallel_mode.value}
            print(json.dumps({**facts, "files": os.listdir(folder)}, default=str))


if __name__ == "__main__":
    main()
