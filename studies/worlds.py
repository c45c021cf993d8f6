"""Random machines and models, computed rather than run: what a search answers on them, and what it promises.

    python studies/worlds.py [--worlds 10000] [--first 0] [--levers | --texts] [--json FILE]

A world is a model on a GPU, drawn at random: memory that is affine in the batch above a floor and reserved with some
fragmentation; step times with a floor that the host sets; arms whose order differs from the usual; trials that run out
of the host's memory, fail or are killed; noise between the steps of a process and between processes, white, drifting or
autocorrelated; predictions of memory that are right, wrong by a factor of two, or missing. Some things hold in every
world, as they do on real machines: recomputing takes longer at the same batch, fp16 is no faster than bf16 and fp32 no
faster than tf32, and a larger batch needs no less memory.

The real policy, judge and plan of a search decide what to try. Regret is the share by which the answer's true speed is
below that of the best candidate of the world. Coverage is how often the interval that was promised holds the true speed
of one more process of the answer.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import json
import math
import os
import random
import statistics
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import optuna

from autotune.core.candidate import Arm, Candidate
from autotune.core.ceiling import Ceiling, Headroom
from autotune.core.device import Device
from autotune.core.inspection import Inspection, ModelFacts, Software
from autotune.core.measured_steps import is_enough, mean_step
from autotune.core.outcome import Completed, Effort, Failed, Measurement, Outcome, OutOfMemory
from autotune.core.prediction import MemoryPrediction
from autotune.core.units import GIB, MIB
from autotune.core.workload import Workload
from autotune.estimate.history import History
from autotune.estimate.memory import MemoryModel
from autotune.space.arms import excluding, levers_of, prediction_class, with_lever
from autotune.store.records import TrialRecord
from autotune.tuning.effort import effort_of
from autotune.tuning.optuna_study import OptunaStudy
from autotune.tuning.plan import Plan
from autotune.tuning.policy import make_policy
from autotune.tuning.prepare import Prepared, prepare
from autotune.tuning.request import SearchRequest

_CONTEXT_BYTES = 600 * MIB
_MOST_NOISE = 0.10
_16_BIT = ("bf16", "fp16")
WORKLOAD = Workload(
    model="world",
    config={"model_type": "bert", "architectures": ["BertForMaskedLM"], "num_hidden_layers": 24},
    task="sequence-classification",
    seq_len=512,
)
_NOISES = ("white", "drifting", "autocorrelated")


@dataclass(frozen=True)
class World:
    """One machine with one model; every figure follows from ``seed``."""

    seed: int
    effective_batch: int | None
    objective: str
    trials: int | None
    precisions: tuple[str, ...]
    cap_bytes: int
    weights_bytes: int
    sample_bytes: dict[str, float]
    """Of activations, by ``16`` and ``32`` bits."""
    checkpointed_share: float
    gradient_bytes: int
    """That an accumulating step keeps besides."""
    fragmentation: float
    gpu_seconds: dict[str, float]
    """A sample takes in each precision."""
    recomputing: float
    small_batch: float
    """So many samples' GPU time each micro-step costs in addition."""
    host_seconds: dict[str, float]
    """The least that a micro-step takes in each precision, whatever its size."""
    optimizer_seconds: float
    noise: str
    step_noise: float
    process_noise: float
    pinned_gain: float
    prediction_factor: float | None
    broken: frozenset[str] = frozenset()
    """Descriptions of arms that always fail."""
    largest_kernel_batch: int | None = None
    error_share: float = 0.0
    kill_share: float = 0.0
    host_memory_share: float = 0.0
    levers: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """By lever, the factors by which it changes the GPU's and the host's time; none is tried where there are none."""
    pair: tuple[str, str, float] | None = None
    """Two levers, and the factor by which they change the GPU's time only together."""
    failing_lever: str | None = None
    compile_seconds: float = 0.0
    shapes_vary: bool = False
    """Whether samples differ in length, so that nothing is compiled or captured without few lengths."""

    def lever_factors(self, arm: Arm) -> tuple[float, float]:
        """Return the factors by which an arm's levers change the GPU's and the host's time."""
        has = levers_of(arm, self.levers)
        together = self.pair[2] if self.pair is not None and {*self.pair[:2]} <= has else 1.0
        gpu, host = (math.prod(self.levers[name][at] for name in has) for at in (0, 1))
        return gpu * together, host

    # Memory

    def peak_bytes(self, candidate: Candidate) -> int:
        """Return the candidate's peak reserved bytes."""
        arm, batch = candidate.arm, candidate.per_device_train_batch_size
        a_sample = self.sample_bytes["16" if arm.precision in _16_BIT else "32"]
        a_sample *= self.checkpointed_share if arm.gradient_checkpointing else 1.0
        state = self.weights_bytes * (3 if candidate.accumulates else 2)
        a_sample *= 0.7 if arm.fused_loss else 1.0
        allocated = max(4 * self.weights_bytes, state + self.gradient_bytes + a_sample * batch)
        allocated *= 1.02 if arm.cuda_graphs else 1.0
        return int(allocated * (1 + self.fragmentation))

    def fits(self, candidate: Candidate) -> bool:
        """Return whether a trial of the candidate stays under the memory line and does not always fail."""
        return self.peak_bytes(candidate) <= self.ceiling.line_bytes and self.failure(candidate) is None

    @property
    def ceiling(self) -> Ceiling:
        """Return the memory ceiling."""
        return Ceiling(None, self.cap_bytes + _CONTEXT_BYTES, _CONTEXT_BYTES, Headroom(0.03))

    # Time

    def gpu_step_seconds(self, candidate: Candidate) -> float:
        """Return the seconds of a step in which the GPU computes."""
        arm, batch = candidate.arm, candidate.per_device_train_batch_size
        micro = self.gpu_seconds[arm.precision] * (batch + self.small_batch)
        micro *= self.recomputing if arm.gradient_checkpointing else 1.0
        micro *= self.lever_factors(arm)[0]
        return candidate.gradient_accumulation_steps * micro + self.optimizer_seconds

    def step_seconds(self, candidate: Candidate) -> float:
        """Return the true mean seconds of a step over all processes."""
        arm = candidate.arm
        floor = self.host_seconds[arm.precision] * (self.recomputing if arm.gradient_checkpointing else 1.0)
        floor *= self.lever_factors(arm)[1]
        accumulation = candidate.gradient_accumulation_steps
        micro = max(floor, (self.gpu_step_seconds(candidate) - self.optimizer_seconds) / accumulation)
        seconds = accumulation * micro + self.optimizer_seconds
        return seconds / (self.pinned_gain if arm.cpu_affinity else 1.0)

    def speed(self, candidate: Candidate) -> float:
        """Return the true mean samples a second."""
        return candidate.samples_per_step / self.step_seconds(candidate)

    def busy_share(self, candidate: Candidate) -> float:
        """Return the share of a step in which the GPU computes."""
        return min(1.0, self.gpu_step_seconds(candidate) / self.step_seconds(candidate))

    def process_deviation(self, candidate: Candidate) -> float:
        """Return the relative standard deviation between processes: small where the GPU limits the step."""
        waits = self.busy_share(candidate) < 0.9
        if not waits:
            return min(self.process_noise, 0.01)
        return self.process_noise * (0.4 if candidate.arm.cpu_affinity else 1.0)

    # Faults

    def failure(self, candidate: Candidate) -> Failed | OutOfMemory | None:
        """Return the outcome of a candidate that always fails, but for the device's memory; ``None`` for others."""
        if self.failing_lever in levers_of(candidate.arm, self.levers) or not self._has_shapes(candidate.arm):
            return Failed("error", "RuntimeError: this lever cannot be had")
        if candidate.arm.describe() in self.broken:
            return Failed("error", "RuntimeError: not implemented for this type")
        largest = self.largest_kernel_batch
        if largest is not None and candidate.per_device_train_batch_size > largest:
            return Failed("error", "RuntimeError: CUDA error: invalid configuration argument")
        luck = self._luck(candidate)
        if luck < self.error_share:
            return Failed("error", "RuntimeError: no such kernel")
        if luck < self.error_share + self.host_memory_share:
            return OutOfMemory("the kernel ended the process", where="host")
        return None

    def _luck(self, candidate: Candidate) -> float:
        """Return a number from 0 to 1 that decides the faults of a candidate, always the same."""
        arm = dataclasses.replace(candidate.arm, cpu_affinity=False)
        return random.Random(f"{self.seed} {arm} {candidate.per_device_train_batch_size}").random()

    # The search

    def prepared(self) -> Prepared:
        """Return the prepared search of this world."""
        memory_bytes = self.cap_bytes + _CONTEXT_BYTES
        device = Device("cuda", 0, "GPU-world", "World", memory_bytes, 0, 0, memory_bytes, "580", (9, 0))
        request = SearchRequest(
            workload=WORKLOAD,
            device=device,
            effective_batch=self.effective_batch,
            objective=self.objective,  # type: ignore[arg-type]
            precisions=self.precisions,  # type: ignore[arg-type]
            trials=self.trials,
            study="world",
        )
        model = ModelFacts("World", 1000, 1000, ("eager", "sdpa"), gradient_checkpointing=True)
        facts = Inspection(Software("", {}, ()), context_bytes=_CONTEXT_BYTES, model=model)
        ready = dataclasses.replace(prepare(request, facts), ceiling=self.ceiling)
        late = ready.space.late | frozenset(self.levers)
        space = dataclasses.replace(ready.space, late=late, shapes_vary=self.shapes_vary)
        return dataclasses.replace(ready, space=space)

    def _has_shapes(self, arm: Arm) -> bool:
        return not self.shapes_vary or arm.length_multiple is not None or not (arm.torch_compile or arm.cuda_graphs)

    def candidates(self, prepared: Prepared) -> Iterator[Candidate]:
        """Yield every fitting candidate of the first level of batch sizes on which one fits."""
        space = prepared.space
        for multiple in space.batches.levels():
            found = []
            for arm in space.arms:
                for batch in self._batches(prepared, multiple):
                    found += [c for a in self._arms(arm) if self.fits(c := space.candidate(a, batch))]
            if found:
                yield from found
                return

    def _arms(self, arm: Arm) -> list[Arm]:
        """Return an arm with every possible set of levers."""
        arms = {arm}
        for name in self.levers:
            given = [with_lever(each, name, self.levers) for each in arms]
            arms |= {dataclasses.replace(each, regional_compilation=each.torch_compile) for each in given}
        return [each for each in arms if excluding(each) is None and self._has_shapes(each)]

    def _batches(self, prepared: Prepared, multiple: int) -> list[int]:
        batches = prepared.space.batches
        if batches.effective_batch is not None:
            return list(batches.at_level(multiple))
        return list(range(multiple, 8 * 1024, multiple))


def draw(seed: int) -> World:
    """Return the world of a seed."""
    rng = random.Random(seed)
    is_free = rng.random() < 0.1
    effective = (
        None if is_free else rng.choice([rng.randint(1, 1024), 8 * rng.randint(1, 128), 2 ** rng.randint(0, 10)])
    )
    precisions = tuple(rng.choice([("bf16", "fp16", "tf32", "fp32"), ("fp16", "fp32"), ("bf16", "tf32"), ("fp32",)]))
    weights = int(math.exp(rng.uniform(math.log(0.02), math.log(4))) * GIB)
    bits16 = math.exp(rng.uniform(math.log(2), math.log(3000))) * MIB
    bf16 = math.exp(rng.uniform(math.log(1e-4), math.log(0.05)))
    tf32 = bf16 * rng.uniform(1.5, 2.4)
    host = bf16 * math.exp(rng.uniform(math.log(0.5), math.log(200)))
    # Autocast adds casts to what the host has to launch, so that fewer kernels may win where it limits.
    gpu = {"bf16": bf16, "fp16": bf16 * rng.uniform(1, 1.05), "tf32": tf32, "fp32": tf32 * rng.uniform(1, 4)}
    launches = {"bf16": rng.uniform(1, 1.4), "fp16": rng.uniform(1.4, 1.5), "tf32": 1.0, "fp32": 1.0}
    trouble = rng.random()
    names = [Arm(p, c).describe() for p in precisions for c in (False, True)]  # type: ignore[arg-type]
    noisy = _MOST_NOISE * rng.random() ** 3
    return World(
        seed=seed,
        effective_batch=effective,
        objective="max-batch" if rng.random() < 0.1 else "throughput",
        trials=rng.randint(3, 10) if rng.random() < 0.1 else None,
        precisions=precisions,
        cap_bytes=int(rng.choice([8, 12, 16, 24, 40, 80]) * GIB * rng.uniform(0.7, 1)),
        weights_bytes=weights,
        sample_bytes={"16": bits16, "32": bits16 * rng.uniform(1.2, 2)},
        checkpointed_share=rng.uniform(0.05, 0.6),
        gradient_bytes=int(weights * rng.random()),
        fragmentation=rng.uniform(0, 0.2),
        gpu_seconds=gpu,
        recomputing=rng.uniform(1.15, 1.4),
        small_batch=rng.uniform(0, 2),
        host_seconds={name: host * times for name, times in launches.items()},
        optimizer_seconds=bf16 * rng.uniform(0.1, 3),
        noise=rng.choice(_NOISES),
        step_noise=noisy * rng.random(),
        process_noise=noisy,
        pinned_gain=rng.choice([1.0, rng.uniform(0.95, 1.2)]),
        prediction_factor=rng.choice([None, 1.0, 1.0, 0.5, 2.0]),
        broken=frozenset(rng.sample(names, rng.randint(1, len(names) - 1))) if trouble < 0.15 else frozenset(),
        largest_kernel_batch=rng.choice([16, 64, 256]) if 0.15 < trouble < 0.25 else None,
        error_share=0.08 if 0.25 < trouble < 0.4 else 0.0,
        host_memory_share=0.05 if 0.35 < trouble < 0.45 else 0.0,
        kill_share=0.05 if 0.4 < trouble < 0.55 else 0.0,
    )


def draw_with_levers(seed: int) -> World:
    """Return a world of a seed in which a search goes on with levers.

    They do roughly what is expected of them; in a third of the worlds two of them do more together than alone, on a
    step that GPU and host limit alike, so that each alone gives next to nothing; in a third a lever fails.
    """
    rng, world = random.Random(f"levers {seed}"), draw(seed)
    levers = {
        "cuda_graphs": (rng.uniform(0.97, 1.03), rng.uniform(0.15, 0.6)),
        "torch_compile": (rng.uniform(0.6, 1.05), rng.uniform(0.4, 1.0)),
        "unpadded": (rng.uniform(0.94, 1.02), rng.uniform(0.98, 1.02)),
        "fused_loss": (rng.uniform(0.92, 1.08), 1.0),
        "cudnn_attention": (rng.uniform(0.9, 1.1), rng.uniform(0.7, 1.1)),
    }
    host, pair = world.host_seconds, None
    if seed % 3 == 1:
        levers |= {"cuda_graphs": (1.0, rng.uniform(0.15, 0.4)), "torch_compile": (rng.uniform(0.5, 0.8), 1.0)}
        times = rng.uniform(0.9, 1.1) * 64 * world.gpu_seconds["bf16"] / host["bf16"]
        host = {name: times * seconds for name, seconds in host.items()}
        pair = ("cuda_graphs", "torch_compile", rng.uniform(0.8, 1.0))
    return dataclasses.replace(
        world,
        effective_batch=64,
        objective="throughput",
        trials=None,
        broken=frozenset(),
        error_share=0.0,
        largest_kernel_batch=None,
        host_memory_share=0.0,
        host_seconds=host,
        levers=levers,
        pair=pair,
        failing_lever=rng.choice([*levers]) if seed % 3 == 2 else None,
        compile_seconds=rng.uniform(3, 40),
    )


def draw_texts(seed: int) -> World:
    """Return a world of texts that differ in length, of a masked or a causal language model.

    The factors are around those of the trainings in docs/explanation/faster.md, on steps that GPU and host limit alike.
    """
    rng, world = random.Random(f"texts {seed}"), draw_with_levers(3 * seed)
    levers = {
        "length_multiple": (rng.uniform(1.02, 1.12), rng.uniform(0.5, 0.9)),
        "torch_compile": (rng.uniform(0.6, 0.85), rng.uniform(0.7, 0.95)),
        "cuda_graphs": (1.0, rng.uniform(0.15, 0.4)),
    }
    if seed % 2:
        levers |= {"padding_free": (rng.uniform(0.4, 0.7), 1.0), "fused_loss": (rng.uniform(0.65, 0.95), 1.0)}
    else:
        levers["sparse_prediction"] = (rng.uniform(0.8, 0.97), 1.0)
    times = rng.uniform(0.5, 1.5) * 64 * world.gpu_seconds["bf16"] / world.host_seconds["bf16"]
    return dataclasses.replace(
        world,
        precisions=("bf16", "fp32"),
        host_seconds={name: times * seconds for name, seconds in world.host_seconds.items()},
        levers=levers,
        compile_seconds=rng.uniform(6, 20),
        shapes_vary=True,
    )


class Machine:
    """Runs the trials of a world: each a process with a speed of its own."""

    def __init__(self, world: World, seed: int = 0) -> None:
        self._world = world
        self._rng = random.Random(f"machine {world.seed} {seed}")
        self.seconds = 0.0
        self.trials = 0

    def clock(self) -> float:
        """Return the simulated time."""
        return self.seconds

    def process_factor(self, candidate: Candidate) -> float:
        """Draw the factor by which a new process is slower than the mean of all."""
        return math.exp(self._rng.gauss(0, self._world.process_deviation(candidate)))

    def run(self, candidate: Candidate, effort: Effort) -> Outcome:
        """Run one trial."""
        world = self._world
        self.trials += 1
        self.seconds += 4.0 if world.levers else 1.0
        self.seconds += world.compile_seconds if candidate.arm.torch_compile else 0.0
        if self._rng.random() < world.kill_share:
            return Failed("killed", "a signal ended the trial")
        peak = world.peak_bytes(candidate)
        if peak > world.ceiling.cap_bytes:
            return OutOfMemory("CUDA out of memory", peak_reserved_bytes=world.ceiling.cap_bytes)
        failure = world.failure(candidate)
        if failure is not None:
            return failure
        mean = world.step_seconds(candidate) * self.process_factor(candidate)
        steps = self._steps(mean, candidate, effort)
        estimate = mean_step(steps)
        return Completed(
            Measurement(
                step_seconds=estimate.mean,
                step_seconds_each=tuple(steps),
                relative_spread=estimate.relative_half_width() if len(steps) > 1 else 0.0,
                samples_per_second=candidate.samples_per_step / estimate.mean,
                peak_allocated_bytes=int(peak / (1 + world.fragmentation)),
                peak_reserved_bytes=peak,
                micro_steps_run=min(candidate.gradient_accumulation_steps, effort.max_micro_steps),
                compile_seconds=world.compile_seconds if candidate.arm.torch_compile else None,
                gpu_busy_share=world.busy_share(candidate) if effort.busy_steps else None,
            )
        )

    def _steps(self, mean: float, candidate: Candidate, effort: Effort) -> list[float]:
        """Draw the seconds of each step of a trial with this mean, until the effort is satisfied."""
        world, rng = self._world, self._rng
        share = min(1.0, max(3, effort.max_micro_steps) / candidate.gradient_accumulation_steps)
        steps: list[float] = []
        level, drift = rng.gauss(0, world.step_noise), rng.gauss(0, world.step_noise) / 12
        while True:
            white = rng.gauss(0, world.step_noise)
            if world.noise == "autocorrelated":
                level = 0.6 * level + 0.8 * white
                white = level
            elif world.noise == "drifting":
                white = white / 2 + drift * (len(steps) - 6)
            steps.append(mean * max(0.3, 1 + white))
            run = [each * share for each in steps]
            if effort.behind_step_seconds and len(steps) == 2 and min(steps) > effort.behind_step_seconds:
                break
            if is_enough(run, effort, mean_step(steps).relative_half_width() if len(steps) > 1 else math.inf):
                break
        self.seconds += (2 + len(steps)) * mean * share
        return steps


@dataclass(frozen=True)
class Result:
    """The result of a search in one world."""

    seed: int
    ended: bool
    possible: bool
    """Whether any candidate fits."""
    answered: bool
    regret: float
    noise: float
    """The larger of the two relative deviations, between steps and between processes."""
    trials: int
    covered: bool | None
    half_width: float | None
    processes: int
    is_budgeted: bool
    seconds: float
    kind: str
    detail: str = ""


_MOST_TRIALS = 400


def play(world: World, repeat: int = 0, slots: int = 1) -> Result:
    """Search in a world to the end, with at most ``slots`` trials at the same time."""
    prepared = world.prepared()
    machine = Machine(world, repeat)
    memory = PredictedWorld(world, world.prediction_factor) if world.prediction_factor is not None else None
    history = History(world.ceiling, memory=memory, tolerance=prepared.request.tolerance)
    policy, now = make_policy(prepared.request.sampler, prepared.request.objective, prepared.space), 0.0
    plan = Plan(prepared, history, policy, lambda: now)
    study = OptunaStudy(prepared, plan, seed=world.seed, is_parallel=slots > 1)
    running: list[tuple[float, int, TrialRecord, optuna.Trial]] = []
    while True:
        while len(running) < slots and plan.exhausted() is None and machine.trials < _MOST_TRIALS:
            asked = study.ask()
            if asked is None:
                break
            step, trial = asked
            effort = effort_of(prepared.request, step.candidate, step.stage, plan.best(), history)
            before = machine.seconds
            outcome = machine.run(step.candidate, effort)
            took = machine.seconds - before
            record = TrialRecord(
                "study", machine.trials, step.candidate, "w", "e", step.stage, outcome=outcome, seconds=took
            )
            plan.begin(record)
            heapq.heappush(running, (now + took, record.number, record, trial))
        if not running:
            return _result(world, prepared, plan, machine)
        now, _, ended, trial = heapq.heappop(running)
        assert ended.outcome is not None
        study.tell(trial, ended.candidate, ended.outcome)
        plan.take(ended)


def _result(world: World, prepared: Prepared, plan: Plan, machine: Machine) -> Result:
    """Compare the answer of a search that has ended with the best candidate of its world."""
    possible = list(world.candidates(prepared))
    best, covered, width, processes = plan.best(), None, None, 0
    regret = 0.0
    if possible and best is not None:
        if world.objective == "max-batch":
            largest = max(candidate.per_device_train_batch_size for candidate in possible)
            regret = 1 - best.candidate.per_device_train_batch_size / largest
        else:
            regret = 1 - world.speed(best.candidate) / max(map(world.speed, possible))
            speed = plan.history.speed(best.candidate)
            assert speed is not None
            low, high = speed.interval()
            later = random.Random(world.seed).gauss(0, speed.later_deviation)
            following = world.speed(best.candidate) / machine.process_factor(best.candidate) * math.exp(later)
            covered, width, processes = low <= following <= high, speed.relative_half_width, speed.processes
    return Result(
        seed=world.seed,
        ended=machine.trials < _MOST_TRIALS,
        possible=bool(possible),
        answered=best is not None,
        regret=max(0.0, regret),
        noise=max(world.step_noise, world.process_noise),
        trials=machine.trials,
        covered=covered,
        half_width=width,
        processes=processes,
        is_budgeted=world.trials is not None,
        seconds=machine.seconds,
        kind=world.noise,
        detail=best.candidate.describe() if best else "",
    )


class PredictedWorld(MemoryModel):
    """A memory model whose predictions are the world's, wrong by a factor."""

    def __init__(self, world: World, factor: float) -> None:
        super().__init__(world.ceiling)
        self._world, self._factor = world, factor

    def prediction(self, candidate: Candidate) -> MemoryPrediction | None:
        """See ``MemoryModel.prediction``."""
        world, line_bytes = self._world, self._world.ceiling.line_bytes
        twin = dataclasses.replace(candidate, arm=prediction_class(candidate.arm))
        reserved = int(world.peak_bytes(twin) * self._factor)
        return MemoryPrediction(
            candidate.per_device_train_batch_size,
            candidate.gradient_accumulation_steps,
            micro_batch_bytes=0,
            peak_allocated_bytes=int(reserved / (1 + world.fragmentation)),
            peak_reserved_bytes=reserved,
            runs_out=reserved > world.ceiling.cap_bytes,
            fits=reserved <= line_bytes,
            anatomy={},
        )

    def largest_batch(self, arm: Arm) -> int | None:
        """See ``MemoryModel.largest_batch``."""
        batch = 8
        while batch < 8192 and self.prediction(Candidate(arm, batch + 8)).fits:  # type: ignore[union-attr]
            batch += 8
        return batch


# Judged over many


def figures(results: list[Result]) -> dict[str, Any]:
    """Return the figures over many worlds that a search has to reach."""
    free = [r for r in results if not r.is_budgeted and r.possible]
    told = [r for r in free if r.answered]
    within = [r for r in told if r.regret <= 0.01]
    near = [r for r in told if r.regret <= 0.05 + r.noise]
    promised = [r for r in results if r.covered is not None]
    widths = [r.half_width for r in promised if r.half_width is not None]
    return {
        "worlds": len(results),
        "endless": sum(not r.ended for r in results),
        "possible": len(free),
        "unanswered": len(free) - len(told),
        "regret_within_1_percent": len(within) / max(1, len(told)),
        "regret_within_5_percent_and_noise": len(near) / max(1, len(told)),
        "regret_mean": statistics.fmean(r.regret for r in told) if told else 0.0,
        "trials_mean": statistics.fmean(r.trials for r in results),
        "trials_median": statistics.median(r.trials for r in results),
        "trials_most": max(r.trials for r in results),
        "coverage": _coverage(promised),
        **{f"coverage_{kind}": _coverage([r for r in promised if r.kind == kind]) for kind in _NOISES},
        "half_width_median": statistics.median(widths) if widths else None,
    }


def _coverage(results: list[Result]) -> float:
    return sum(bool(r.covered) for r in results) / max(1, len(results))


def play_many(first: int, count: int, draw: Callable[[int], World] = draw) -> list[Result]:
    """Search in the worlds of ``count`` seeds, on all cores."""
    size = max(1, min(250, count // (os.cpu_count() or 1)))
    with ProcessPoolExecutor() as pool:
        return list(pool.map(partial(_play_drawn, draw), range(first, first + count), chunksize=size))


def _play_drawn(draw: Callable[[int], World], seed: int) -> Result:
    return play(draw(seed))


def main() -> None:
    """Search in the worlds that the command line names, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--levers", action="store_true", help="worlds with levers, of which some pay only together")
    parser.add_argument("--texts", action="store_true", help="worlds of texts that differ in length")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also every world's result")
    options = parser.parse_args()
    drawn = draw_texts if options.texts else draw_with_levers if options.levers else draw
    results = play_many(options.first, options.worlds, drawn)
    for name, value in figures(results).items():
        print(f"{name:36} {value:.4f}" if isinstance(value, float) else f"{name:36} {value}")
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(r) for r in results], indent=1))


if __name__ == "__main__":
    main()
