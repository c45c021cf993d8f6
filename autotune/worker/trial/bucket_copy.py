"""Keep a second copy of DDP's gradient buckets out of a trial's peaks: it is there in one step, and only by chance.

DDP begins with one bucket that holds all gradients. At the first forward pass of the second step it makes new ones, in
the order in which the gradients came (``Reducer::rebuild_buckets`` in torch/csrc/distributed/c10d/reducer.cpp), and
drops the first. But since torch 2.7 an asynchronous collective of NCCL keeps its tensors until somebody waits for the
collective itself (``TensorShelf`` in torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp, pytorch#148590). DDP waits for a
future of it instead, so that its bucket is only released by the watchdog: a thread that looks for completed collectives
every 100 ms (``kWatchdogThreadSleepMillis``), and leaves what it finds to the next collective that is begun.

In the second step the first collectives are those that agree on the new buckets. If the watchdog looked between the
last exchange of the first step and them, the old bucket is free before the new ones are made. Else both are there until
the backward pass exchanges gradients, after the step's peak, or until a later step where steps are short.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from autotune.worker.trial.meter import Meter, PeakBytes

# More than two of the watchdog's rounds, so that it has looked even on a busy host.
_PAUSE_SECONDS = 0.25


def bucket_copy_bytes(model: Any) -> int | None:
    """Return the bytes of a wrapped model's gradient buckets, of which one step may hold a second copy.

    ``None`` where it cannot: see ``Measurement.bucket_copy_bytes``.
    """
    if not isinstance(model, DistributedDataParallel):
        return None
    rebuilds = model.static_graph or not model.find_unused_parameters
    if not rebuilds or dist.get_world_size(model.process_group) == 1 or not _is_nccl(model.process_group):
        return None
    ignored = model.parameters_to_ignore
    trained = (p for name, p in model.module.named_parameters() if p.requires_grad and name not in ignored)
    return sum(int(parameter.nbytes) for parameter in trained)


def _is_nccl(group: Any) -> bool:
    return "nccl" in dist.get_backend_config(group)


class BucketCopy:
    """Waits between the first two steps for the old bucket to be released, and tells peaks with and without it."""

    def __init__(self, meter: Meter, wrapped_model: Callable[[], Any], equal_steps: float = math.inf) -> None:
        """Watch a trial. ``wrapped_model`` returns what DDP made of the model, once training began.

        ``equal_steps`` is how many steps from the first on have batches of the same size. The peaks of others are not
        compared with theirs.
        """
        self._meter = meter
        self._wrapped_model = wrapped_model
        self._equal_steps = equal_steps
        self._last: PeakBytes | None = None
        """Peaks of the last of the equal steps, from the third on."""
        self.size_bytes: int | None = None
        """As in ``Measurement.bucket_copy_bytes``; known after the first step."""

    def end_step(self, steps: int) -> bool:
        """Take down that a number of steps have ended; return whether there was a pause."""
        if steps == 1:
            self.size_bytes = bucket_copy_bytes(self._wrapped_model())
            if self.size_bytes is not None:
                time.sleep(_PAUSE_SECONDS)
                return True
        elif self.size_bytes is not None and steps <= self._equal_steps:
            if steps > 2:
                self._last = self._meter.recent_peaks()
            self._meter.begin_recent_peaks()
        return False

    def met_bytes(self) -> int:
        """Return the bytes of the copy that were there at the highest peak; 0 where the trial did not meet it.

        That peak is compared with the last of the equal steps, which have the same but for the copy. Smaller
        differences have other causes.
        """
        if self.size_bytes is None or self._last is None:
            return 0
        more_bytes = self._meter.peaks().allocated - self._last.allocated
        return min(more_bytes, self.size_bytes) if more_bytes > self.size_bytes / 2 else 0


def without_copy(peaks: PeakBytes, copy_bytes: int) -> PeakBytes:
    """Return peaks without a copy of so many bytes.

    The freed copy stays reserved as a cached segment of its own, so that reserved bytes shrink by it, too.
    """
    allocated = peaks.allocated - copy_bytes
    return PeakBytes(allocated, max(allocated, peaks.reserved - copy_bytes))
