"""Measure time, memory and energy on a device, the share in which a GPU is busy, and the arithmetic of a step.

Kineto records every kernel, copy and memset that the GPU executes. Only CUDA activity is recorded, not torch's
operators. Profiling slows down the host but hardly the kernels. So the GPU's busy seconds are taken from the profiled
step and divided by the seconds of the timed steps.

At most two micro-steps are profiled, whatever the accumulation. One adds to existing gradients and stands for all but
the last. The other is the last one, with clipping and the optimizer. Copies to the GPU before the step begins are left
out: they are part of waiting for data, which is measured separately.

The arithmetic is that of one forward pass. In the backward pass each product is computed once more for each of its two
inputs that has a gradient. Nothing that is computed again, for checkpointing or within attention, counts.
"""

from __future__ import annotations

import contextlib
import resource
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from autotune.core.outcome import Failed, OutOfMemory, kind_of_kernel
from autotune.core.real_training import PeakBytes
from autotune.devices import nvml
from autotune.devices.gpus import MOST_CONTEXT_BYTES
from autotune.worker.failures import classify
from autotune.worker.trial.step_checks import NotTrainedError

# Number of last steps that are looked at for growing memory, and the least growth per step in bytes. Choices.
_LOOKED_AT, _LEAST_GROWTH = 24, 2**16
_NS = 1e-9


class Meter:
    """Measures a trial's device. A method returns ``None`` where the device does not provide the value."""

    device: torch.device
    fewest_growing_steps = 4
    """Least number of steps from which it is judged whether memory grows with each. A choice."""

    def limit(self, cap_bytes: int) -> None:
        """Make every allocation beyond ``cap_bytes`` fail from now on."""
        raise NotImplementedError

    def lift_limit(self) -> None:
        """Lift the limit on the process's memory, since reporting a failure needs some."""

    def synchronize(self) -> None:
        """Wait until the device has finished all work."""

    def mark(self) -> Any:
        """Return a point on the device's timeline, for ``seconds_between``; cheap enough for every micro-step."""
        return perf_counter()

    def seconds_between(self, start: Any, end: Any) -> float:
        """Return the seconds between two marks from before the last ``synchronize``."""
        return float(end - start)

    def reset_peaks(self) -> None:
        """Reset the peaks to the current memory, where possible."""
        raise NotImplementedError

    def peaks(self) -> PeakBytes:
        """Return the peak bytes since ``reset_peaks``."""
        raise NotImplementedError

    def allocated_bytes(self) -> int | None:
        """Return the allocated bytes; on a CPU, the resident memory without the pages of files."""
        return None

    def allocation_retries(self) -> int | None:
        """Return how often the allocator freed its cache to retry an allocation."""
        return None

    def device_used_bytes(self) -> int | None:
        """Return the bytes of the device's memory that all processes use."""
        return None

    def context_bytes(self) -> int | None:
        """Return this process's device memory beyond its allocator's reserved bytes."""
        return None

    def energy_joules(self) -> float | None:
        """Return the device's energy counter, which starts at an arbitrary value."""
        return None


class CudaMeter(Meter):
    """Measures with CUDA events, the caching allocator's statistics and NVML. ``is_alone``: there is no other rank."""

    def __init__(self, uuid: str, index: int = 0, *, is_alone: bool = True) -> None:
        self.device = torch.device("cuda", index)
        self._uuid = uuid
        self._is_alone = is_alone
        # Before CUDA starts: the growth since then is the size of its context.
        self._used_before_bytes = nvml.current_session().used_bytes(uuid)
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.cuda.set_device(self.device)
        torch.zeros(1, device=self.device)

    def limit(self, cap_bytes: int) -> None:
        total = torch.cuda.get_device_properties(self.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap_bytes / total), self.device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds_between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(start.elapsed_time(end)) / 1000

    def reset_peaks(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)

    def peaks(self) -> PeakBytes:
        return PeakBytes(torch.cuda.max_memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device))

    def allocated_bytes(self) -> int | None:
        return torch.cuda.memory_allocated(self.device)

    def allocation_retries(self) -> int | None:
        return int(torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0))

    def device_used_bytes(self) -> int | None:
        return nvml.current_session().used_bytes(self._uuid)

    def context_bytes(self) -> int | None:
        reserved_bytes = torch.cuda.memory_reserved(self.device)
        return context_beside(self._uuid, self._used_before_bytes, reserved_bytes, is_alone=self._is_alone)

    def energy_joules(self) -> float | None:
        return nvml.current_session().energy_joules(self._uuid)


def _status_bytes(field: str) -> int:
    """Return a ``kB`` field of /proc/self/status in bytes; 0 without such a file."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def most_host_bytes() -> int | None:
    """Return the peak resident memory of this process; ``None`` where the kernel does not provide it."""
    return _status_bytes("VmHWM") or None


class CpuMeter(Meter):
    """Measures with the process's own clock and its resident memory.

    The limit is ``RLIMIT_DATA``, on top of what is mapped already: beyond it torch's CPU allocator raises a clean
    error, reproducibly. The peak is the growth of the high-water mark of resident memory (VmHWM) since the limit was
    set, less the pages of library files read since. A forked process reads those again (30 to 40 MiB in a training
    step), and the limit does not count them. A CPU has no caching allocator, so allocated and reserved bytes are the
    same here.
    """

    # Resident memory grows for some steps, while the allocator of the C library finds its size: in 2 of 4 searches of
    # bert-tiny by 2 MiB in each of the first four or so (28 November 2026).
    fewest_growing_steps = 16

    device = torch.device("cpu")

    def __init__(self) -> None:
        self._note_start()

    def _note_start(self) -> None:
        """Record the high-water mark of resident memory, and the file pages, as the reference for later peaks."""
        self._start_bytes = _status_bytes("VmHWM")
        self._start_file_bytes = _status_bytes("RssFile")
        self._peak_bytes = 0

    def limit(self, cap_bytes: int) -> None:
        ceiling = _status_bytes("VmData") + cap_bytes
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        if hard != resource.RLIM_INFINITY:
            ceiling = min(ceiling, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (ceiling, hard))
        self._note_start()

    def lift_limit(self) -> None:
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))

    def allocated_bytes(self) -> int | None:
        return _status_bytes("VmRSS") - _status_bytes("RssFile")

    def reset_peaks(self) -> None:
        # proc_pid_clear_refs(5): writing a 5 resets VmHWM.
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
            self._peak_bytes = 0

    def peaks(self) -> PeakBytes:
        file_bytes = max(0, _status_bytes("RssFile") - self._start_file_bytes)
        # File pages that are read after the peak would lower it, so the largest value is kept.
        self._peak_bytes = max(self._peak_bytes, _status_bytes("VmHWM") - self._start_bytes - file_bytes)
        return PeakBytes(self._peak_bytes, self._peak_bytes)


def failure_of(
    error: BaseException, meter: Meter | None, during: str, cap_bytes: int | None, *, on_cpu: bool
) -> OutOfMemory | Failed:
    """Return the outcome of a training that ended with an exception, and print the exception to the log.

    ``during`` names the phase that failed. ``meter`` is ``None`` where the training ended before its device was opened.
    """
    peaks = None
    if meter is not None:
        meter.lift_limit()
        peaks = meter.peaks()
    outcome: OutOfMemory | Failed
    if isinstance(error, NotTrainedError):
        text = f"autotune: {error}"
        outcome = Failed(error.reason, str(error), during=during)
        if error.is_out_of_memory and peaks is not None:
            outcome = OutOfMemory(str(error), "device", during, peaks.allocated, peaks.reserved)
    else:
        outcome = classify(error, during=during, on_cpu=on_cpu, peaks=peaks, cap_bytes=cap_bytes)
        text = outcome.traceback if isinstance(outcome, Failed) else outcome.message
    # After running out of host memory there may be none left for printing.
    with contextlib.suppress(MemoryError):
        print(text, file=sys.stderr)
    return outcome


def growth_of(held_bytes: Sequence[int | None], fewest_steps: int = Meter.fewest_growing_steps) -> int | None:
    """Return the growth of memory per step in bytes, such as from graphs that are kept, from the bytes after each step.

    ``None`` without growth, and where fewer than ``fewest_steps`` after the first are known. Memory grows if it grew by
    ``_LEAST_GROWTH`` or more per step in both halves of the last steps, by amounts within a factor of 2.
    """
    # In the first step the optimizer gets its state.
    last = [each for each in held_bytes[1:] if each is not None][-_LOOKED_AT:]
    if len(last) < fewest_steps:
        return None
    middle, end = len(last) // 2, len(last) - 1
    halves = (last[middle] - last[0]) / middle, (last[end] - last[middle]) / (end - middle)
    return int(halves[1]) if min(halves) >= _LEAST_GROWTH and max(halves) <= 2 * min(halves) else None


def open_meter(device_kind: str, uuid: str, index: int = 0, ranks: int = 1) -> Meter:
    """Return the meter of this rank's device: the CPU, or the visible GPU at ``index``."""
    return CudaMeter(uuid, index, is_alone=ranks == 1) if device_kind == "cuda" else CpuMeter()


# The memory that a training process holds outside its allocator: the CUDA context with its kernels

# A small transformer layer. Kernels are chosen by shape, so it must not be too small either.
_WIDTH = 512
_HEADS = 8
_TOKENS = 128
_SAMPLES = 4
_VOCABULARY = 1024


def context_bytes(uuid: str, *, convolves: bool) -> int:
    """Measure this process's device memory beyond its allocator's, in training.

    The process trains first, with a convolution where the model ``convolves``, since CUDA loads kernels and libraries
    allocate memory on first use: a context without training is 130 to 150 MiB smaller than a trial's (H200, torch
    2.11). Returns 0 where NVML gives no value.
    """
    before = nvml.current_session().used_bytes(uuid)
    torch.cuda.init()  # type: ignore[no-untyped-call]
    device = torch.device("cuda", 0)
    torch.zeros(1, device=device)
    # Where the layer does not fit, or an operation is missing, the context is measured without it.
    with contextlib.suppress(RuntimeError):
        use_kernels(device, convolves=convolves)
    torch.cuda.synchronize()
    measured_bytes = context_beside(uuid, before, torch.cuda.memory_reserved(0))
    torch.cuda.empty_cache()
    return measured_bytes or 0


def context_beside(
    uuid: str, used_before_bytes: int | None, reserved_bytes: int, *, is_alone: bool = True
) -> int | None:
    """Return the memory that this process holds on a GPU beside its allocator's reserved bytes; ``None`` if unknown.

    NVML does not report memory by process everywhere (containers hide process ids). Where it does not, this is the
    growth of all used memory since a reading before CUDA started, which includes other processes. So the growth is
    limited to the largest context, unless this is one of several ranks: their libraries take more.
    """
    own_bytes = nvml.current_session().own_bytes(uuid)
    # In a container, NVML may give the memory of another process of the host, one with the same number.
    if own_bytes is not None and own_bytes > reserved_bytes:
        return own_bytes - reserved_bytes
    used_bytes = nvml.current_session().used_bytes(uuid)
    if used_bytes is None or used_before_bytes is None:
        return None
    grown_bytes = max(0, used_bytes - used_before_bytes - reserved_bytes)
    return min(grown_bytes, MOST_CONTEXT_BYTES) if is_alone else grown_bytes


def use_kernels(device: torch.device, *, convolves: bool) -> None:
    """Train a small transformer layer for one step in 16 bits, to load its kernels, the largest of all precisions.

    On an H200 a trial held 767 MiB in bf16 and 751 MiB in tf32. Each further precision would take another second here.
    """
    layer = torch.nn.TransformerEncoderLayer(_WIDTH, _HEADS, 4 * _WIDTH, activation="gelu", batch_first=True)
    parts = torch.nn.ModuleList([torch.nn.Embedding(_VOCABULARY, _WIDTH), layer, torch.nn.Linear(_WIDTH, _VOCABULARY)])
    if convolves:
        parts.append(torch.nn.Conv2d(3, _WIDTH, 16, 16))
    model = parts.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.zeros((_SAMPLES, _TOKENS), dtype=torch.int64, device=device)
    # The precision that a trial may use: bfloat16 arithmetic from compute capability 8.0 (CUDA C++ Programming Guide).
    has_bf16 = device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 0)
    with torch.autocast(device.type, torch.bfloat16 if has_bf16 else torch.float16):
        hidden = model[0](tokens)
        if convolves:
            images = torch.zeros((_SAMPLES, 3, 224, 224), device=device)
            hidden = hidden + model[3](images).flatten(2).transpose(1, 2)[:, :_TOKENS]
        logits = model[2](model[1](hidden))
    loss = functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


class Profiler:
    """Records what the GPU executes, with ``torch.profiler``: CUDA activity only."""

    _profile: Any = None

    def start(self) -> None:
        """Start recording."""
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self._profile.start()

    def stop(self) -> tuple[float | None, dict[str, float]]:
        """Wait for the device and stop; return its busy seconds (``None`` if unknown), and seconds by kind of work."""
        profile, self._profile = self._profile, None
        profile.stop()
        return work_on_gpu(profile)


def work_on_gpu(profile: Any) -> tuple[float | None, dict[str, float]]:
    """Return the GPU's busy seconds during ``profile``, ``None`` without work, and the seconds of work by kind.

    The seconds by kind count kernels that run at the same time separately. The raw events are read, since
    ``profile.events()`` builds a tree of Python objects, which takes many times as long. They have no public name; the
    names used here are the same from torch 2.6 to 2.13. Spans of ``record_function`` are no work of the GPU.
    """
    events = profile.profiler.kineto_results.events()
    on_gpu = [event for event in events if event.device_type().name == "CUDA" and not event.is_user_annotation()]
    seconds_by_kind: defaultdict[str, float] = defaultdict(float)
    for event in on_gpu:
        seconds_by_kind[kind_of_kernel(event.name())] += event.duration_ns() * _NS
    return busy_seconds((event.start_ns(), event.start_ns() + event.duration_ns()) for event in on_gpu), seconds_by_kind


def busy_seconds(intervals: Iterable[tuple[int, int]]) -> float | None:
    """Return the seconds covered by at least one interval of nanoseconds; ``None`` without intervals."""
    covered, covered_until = 0, None
    for start, end in sorted(intervals):
        begin = start if covered_until is None else max(start, covered_until)
        covered += max(0, end - begin)
        covered_until = end if covered_until is None else max(covered_until, end)
    return None if covered_until is None else covered * _NS


class BusyStep:
    """Profiles one or two micro-steps of a step for the GPU's busy share; errors of the profiler never leave it."""

    def __init__(self, profiler: Profiler | None, meter: Meter, micro_steps_run: int, micro_steps: int) -> None:
        self._profiler = profiler
        self._meter = meter
        self._micro_steps_run = micro_steps_run
        self._takes_all = micro_steps_run < 3
        """Whether the whole step is profiled in one part. Steps of three micro-steps and more are profiled in two."""
        self._micro_steps = micro_steps
        self._is_recording = False
        self.is_broken = profiler is None
        """Whether nothing is profiled, since the device has no profiler or it failed."""
        self._shares: list[float] = []
        self._parts: list[tuple[float, dict[str, float]]] = []
        """Busy seconds of each profiled part of the current step, and seconds by kind of work."""
        self._kinds: list[dict[str, float]] = []

    def step_begins(self) -> None:
        """Begin a step whose batches have arrived. Profiling starts here if the whole step is one part."""
        self._parts = []
        if self._takes_all:
            self._start()

    def micro_step_ends(self, number: int) -> None:
        """Start or stop profiling after ``number`` micro-steps: the second one and the last one are profiled."""
        if self._takes_all:
            return
        if number == 2:
            self.stop()
        if number in (1, self._micro_steps_run - 1):
            self._start()

    def step_ends(self, step_seconds: float, relative_size: float) -> None:
        """Record the busy share of the step that ends, over ``step_seconds``, the time of steps without a profiler.

        ``relative_size`` is the size of its batches over the mean size of the batches behind ``step_seconds``.
        """
        self.stop()
        if self.is_broken or not self._parts or not all(busy > 0 for busy, _ in self._parts):
            return
        whole_seconds = 0.0
        seconds_by_kind: defaultdict[str, float] = defaultdict(float)
        for number, (busy, kinds) in enumerate(self._parts, start=1):
            # The last part is counted once. Of two parts, the first stands for all micro-steps but the last.
            times = 1 if number == len(self._parts) else self._micro_steps - 1
            whole_seconds += times * busy
            for kind, seconds in kinds.items():
                seconds_by_kind[kind] += times * seconds / relative_size
        self._shares.append(whole_seconds / relative_size / step_seconds)
        self._kinds.append(seconds_by_kind)

    @property
    def share(self) -> float | None:
        """Mean busy share of the profiled steps, above 0 and at most 1; ``None`` where the profiler failed."""
        if self.is_broken or not self._shares:
            return None
        # The kernels of a profiled step may be slightly slower than those of the timed steps.
        return min(1.0, sum(self._shares) / len(self._shares))

    @property
    def seconds_by_kind(self) -> tuple[tuple[str, float], ...] | None:
        """Mean seconds of each kind of work in the profiled steps, the longest first; ``None`` if unknown."""
        if self.is_broken or not any(self._kinds):
            return None
        names = dict.fromkeys(name for kinds in self._kinds for name in kinds)
        means = {name: sum(kinds.get(name, 0.0) for kinds in self._kinds) / len(self._kinds) for name in names}
        return tuple(sorted(means.items(), key=lambda kind: -kind[1]))

    def _start(self) -> None:
        """Start profiling, unless there is no profiler or it failed."""
        if self._profiler is not None and not self.is_broken:
            with self._broken_by_error():
                self._profiler.start()
                self._is_recording = True

    def stop(self) -> None:
        """Stop profiling, if it was started, and keep what was profiled as a part of this step."""
        if self._profiler is not None and self._is_recording and not self.is_broken:
            with self._broken_by_error():
                seconds, kinds = self._profiler.stop()
                self._is_recording = False
                self._parts.append((seconds or 0.0, kinds))

    @contextlib.contextmanager
    def _broken_by_error(self) -> Iterator[None]:
        """Wait for the device, and run the block, which uses the profiler; after an error in it, profile no more."""
        # Work that was issued before this call belongs to the part before.
        self._meter.synchronize()
        try:
            yield
        except Exception as error:
            print(f"autotune: the profiler gives no answer: {error}", file=sys.stderr)
            self.is_broken = True


class Arithmetic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the FLOPs of forward passes that run within it, and of the backward passes that will follow them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.forward_flops = 0
        self.flops = 0
        """FLOPs of the forward and the backward pass."""
        self.tokens: int | None = None
        """Tokens of the counted micro-step, padding included; ``None`` where the model takes no ``input_ids``."""

    def __torch_dispatch__(self, function: Any, _: Any, given: Any = (), named: Any = None) -> Any:
        """Run and count an operation."""
        named = named or {}
        result = function(*given, **named)
        if (flops := _flops_of(function, given, named, result)) is not None:
            self.forward_flops += flops
            self.flops += flops * (1 + _backward_factor(function, given))
        return result

    def count_first(self, trainer: Any) -> None:
        """Have the first micro-step of a ``Trainer`` counted, during warm-up, and no later one."""
        compute_loss: Callable[..., Any] = trainer.compute_loss

        def counted(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            trainer.compute_loss = compute_loss
            tokens = inputs.get("input_ids")
            self.tokens = None if tokens is None else tokens.numel()
            with self:
                return compute_loss(model, inputs, *args, **kwargs)

        trainer.compute_loss = counted


def _flops_of(function: Any, given: Any, named: Any, result: Any) -> int | None:
    """Return the FLOPs of an operation; ``None`` for an operation that does not count."""
    packet = function.overloadpacket
    if packet._qualified_op_name in ("aten::_grouped_mm", "aten::_scaled_grouped_mm"):
        # Each row of the first factor is multiplied by one matrix of the second.
        return 2 * int(given[0].shape[-2]) * int(given[0].shape[-1]) * int(given[1].shape[-1])
    if packet._qualified_op_name == "aten::_scaled_dot_product_flash_attention_for_cpu":
        packet = torch.ops.aten._scaled_dot_product_flash_attention
    formula = flop_registry.get(packet)
    if formula is None:
        return None
    if "attention" in packet.__name__:
        given = _with_all_heads(given, axis=1 if "scaled_dot_product" in packet.__name__ else -2)
    return int(formula(*given, **named, out_val=result))


def _with_all_heads(given: Any, axis: int) -> Any:
    """Return attention inputs with keys and values expanded to all heads, as torch 2.11's formulas require."""
    query, *others = given[:3]
    whole = []
    for each in others:
        shape = list(each.shape)
        shape[axis] = query.shape[axis]
        whole.append(each.new_empty(shape, device="meta"))
    return (query, *whole, *given[3:])


def _backward_factor(function: Any, given: Any) -> int:
    """Return the cost of a product's backward pass, in forward passes: the number of its inputs with a gradient."""
    matrices = [each for each in given if isinstance(each, torch.Tensor) and each.dim() > 1]
    if "attention" in function.__name__:
        # Two products, of queries by keys and of the result by values, with two inputs each.
        return 2 * matrices[0].requires_grad
    return sum(each.requires_grad for each in matrices[-2:])
