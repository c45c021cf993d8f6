"""Prepare a search: combine the request with the inspected machine and model, and build the search space.

The multiples that batches are padded to, and rows are filled to, follow from the lengths of the samples alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autotune.core.candidate import Arm, Candidate, Document
from autotune.core.ceiling import Ceiling
from autotune.core.device import Calibration, Chip
from autotune.core.errors import InvalidRequestError
from autotune.core.inspection import Inspection, ModelFacts
from autotune.core.lengths import Batching, SampleLengths, choose_multiple, shapes_of
from autotune.core.workload import BYTES_PER_ELEMENT
from autotune.devices.gpus import chip_of_device
from autotune.estimate.step_time import peak_flops
from autotune.space.arms import levers_of
from autotune.space.features import FLASH_ATTENTION, is_compatible
from autotune.space.levers import LENGTH_MULTIPLE, LEVERS, ROW_MULTIPLE, Training
from autotune.space.space import Batches, Space, choose_arms, usable_cores
from autotune.tuning.allowed import check_inspected, check_machine
from autotune.tuning.environment import describe_environment
from autotune.tuning.own_code import batches_of, check_engine_fits, checkpointing_of, fit_to_own_code
from autotune.tuning.request import SearchRequest
from autotune.tuning.strategies import arms_with_strategies, check_training_state_fits, shared

# A weight, its gradient and AdamW's two moments, in float32.
_BYTES_A_PARAMETER = 16


@dataclass(frozen=True)
class Prepared:
    """A search that is ready to start: its request, and what the inspection of machine and model adds to it."""

    request: SearchRequest
    space: Space
    baseline: Candidate
    ceiling: Ceiling
    environment: Document
    """Device, driver and library versions, on which a measurement depends."""
    model: ModelFacts
    chip: Chip | None = None
    """The GPU's properties that determine memory; ``None`` on a CPU, for which nothing is predicted."""
    calibration: Calibration | None = None
    """Measured speeds of this machine, for predictions; ``None`` on a CPU, and where measuring failed."""

    @property
    def is_large(self) -> bool:
        """Whether the model is so large for this memory that the defaults may not fit."""
        return self.model.parameters * _BYTES_A_PARAMETER > self.ceiling.line_bytes / 2

    @property
    def unquantized_bytes(self) -> int:
        """Bytes of a mixture's experts, which ``--quantize`` leaves unquantized."""
        return self.model.unquantized_experts * BYTES_PER_ELEMENT[self.request.workload.dtype]

    @property
    def usable_cores(self) -> int:
        """The number of cores that a trial may use, on its machine."""
        cores: int | None = self.environment.get("host", {}).get("usable_cores")
        return cores or usable_cores()


def _measurement_revision(request: SearchRequest) -> int:
    """Return a number that grows with every change of the worker that changes a candidate's speed or peak.

    2: on a GPU, steps of padded lengths that were new to it are no longer timed.
    3: on a GPU, ``tf32`` is left at its default but for the precision of that name.
    4: a step's time is the mean over the measured steps rather than their median. On a CPU this is 2.
    5: on a GPU, where layers are compiled, nothing else is, and checkpoints around them hold.
    6: on a GPU, what compiles is measured for 1.5 s, in which one at its power limit slows down; some of T5's layers
    may recompute, as was asked for.
    7: the speed is that of the run, new shapes included; steps of own code are spread over its epoch. On a CPU this is
    3.
    """
    return 7 if request.device.kind == "cuda" else 3


def prepare(request: SearchRequest, facts: Inspection) -> Prepared:
    """Combine the request with an inspection of this machine, and build the search space.

    Raises ``UnknownModelError`` where the model cannot be built, ``NothingFitsError`` where the memory limit is below
    the size of weights, gradients and optimizer state, and other errors for what machine or model rule out.
    """
    model = check_machine(request, facts)
    if request.workload.source is not None:
        request = fit_to_own_code(request, model)
    check_inspected(request, facts, model)
    check_engine_fits(request, model, facts.context_bytes)
    if request.workload.source is None:
        # The user's own Trainer may have another optimizer, and quantized weights.
        check_training_state_fits(request, model, facts.context_bytes)
    ceiling = Ceiling(request.memory_limit_bytes, request.least_free_bytes, facts.context_bytes, request.headroom)
    late, is_cpu = request.late_settings(model.checkpointing_layers), request.device.kind == "cpu"
    settings = {**request.settings(), "cpu_affinity": request.pins == "on"}
    if model.own is not None and model.own.arm.torch_compile and request.torch_compile == "auto":
        # What the user's code compiles stays compiled, unless something else was asked for.
        late -= {"torch_compile"}
        settings |= {"torch_compile": True, "torch_compile_mode": model.own.arm.torch_compile_mode}
    default_attention = "sdpa" if "sdpa" in model.attn_implementations else "eager"
    attentions = request.attn_implementations or (default_attention,)
    if request.workload.source is not None:
        attentions = model.attn_implementations
    arms = choose_arms(
        request.chosen_precisions,
        checkpointing_of(request, model),
        attentions,
        request.optims,
        model_checkpoints=model.gradient_checkpointing,
        expandable_segments="off" if is_cpu or "expandable_segments" in late else request.expandable_segments,
        liger=request.liger,
        experts=request.experts_implementations or (None,),
        settings=settings,
    )
    arms = tuple(arm for arm in arms if is_compatible(arm, request.workload.dtype))
    if not arms:
        raise InvalidRequestError(
            f"--attn {FLASH_ATTENTION} computes in 16 bits only", "allow --precision bf16 or fp16, or --attn sdpa"
        )
    for row in LEVERS:
        if row.is_idle and row.name in request.settings() and not any(levers_of(arm, [row.name]) for arm in arms):
            raise InvalidRequestError(
                f"--lever {row.name}=on: nothing that is searched has it: it is for checkpointing in bf16 or fp16",
                "allow one of these precisions with checkpointing, or leave it out",
            )
    arms = arms_with_strategies(arms, request, model)
    batches, plain = batches_of(request, model), Arm(attn_implementation=default_attention)
    if request.workload.source is not None:
        # The baseline has the optimizer of a loop, and a precision that the code can have: not every script has fp32.
        known = next((arm for arm in arms if arm.precision == "fp32"), arms[0])
        plain = replace(plain, precision=known.precision, optim=known.optim)
    baseline = model.own_candidate or Candidate(plain, *batches.baseline())
    if request.ranks > 1:
        # The default strategy is DDP, with which ranks cannot share samples.
        arm = (
            shared(baseline.arm, "fsdp", request, model)
            if request.context_parallel > 1
            else replace(baseline.arm, strategy="ddp", ranks=request.ranks)
        )
        baseline = replace(baseline, arm=arm)
    training = Training.of(request.workload, request.device.kind, request.ranks)
    space = Space(arms, batches, baseline, late=late, shapes_vary=training.shapes_vary,
                  multiples=length_multiples(request, model, batches))  # fmt: skip
    revision = _measurement_revision(request)
    environment = describe_environment(request.placement, request.workload, arms, facts.software, revision)
    return Prepared(request, space, baseline, ceiling, environment, model, facts.chip, facts.calibration)


# Share of a GPU's rated arithmetic in bf16 at which padding is computed. bert-base took 3.6 us a token and Qwen2.5-0.5B
# 20 us, six operations for each weight: 0.18 and 0.15 (H100, texts of different lengths, 25 November 2026).
_USED_SHARE = 0.17
# The fastest levers capture a CUDA graph for each shape. A choice. Without graphs a shape takes 0.2 s: bert-base
# (batches of 32) took 0.16 s, Qwen2.5-0.5B (of 8) 0.17 to 0.25 s longer at the first visit of a length than at the
# second (H100, torch 2.11.0, transformers 5.17.0, 25 November 2026).
_CAPTURE_SECONDS = 1.0
# Each shape takes memory of the driver's, and the seconds above in each trial. A choice.
_MOST_SHAPES = 16
# Per-device batch where the user's code has none. A choice.
_USUAL_BATCH = 16


def length_multiples(request: SearchRequest, model: ModelFacts, batches: Batches) -> tuple[int, int]:
    """Return the multiples to pad lengths of samples, and rows of joined samples, to: those of the cheapest epoch.

    A small multiple pads less; a large one makes fewer shapes, for each of which a CUDA graph is captured. Returns
    defaults where lengths do not vary, or lengths or the GPU's speed are unknown.
    """
    lengths, chip = request.workload.sample_lengths, chip_of_device(request.device.name)
    if lengths is None or not lengths.vary or chip is None or chip.rates is None:
        return LENGTH_MULTIPLE, ROW_MULTIPLE
    own = model.own_candidate
    usual = own.per_device_train_batch_size if own is not None else _USUAL_BATCH
    # Few lengths save memory, so that the lever is tried at large batches.
    batch = max(usual, min(batches.effective_batch or usual, 32))
    token_seconds = 6 * model.parameters / (_USED_SHARE * peak_flops(chip.rates, "bf16"))
    padded = lengths.batching(batch)
    rows = replace(padded, padding="rows", multiple=1)
    chosen = [choose_multiple(lengths, how, token_seconds, shape_seconds=_CAPTURE_SECONDS) for how in (padded, rows)]
    return _smallest_with_few_shapes(lengths, padded, chosen[0] or LENGTH_MULTIPLE), _smallest_with_few_shapes(
        lengths, rows, chosen[1] or ROW_MULTIPLE
    )


def _smallest_with_few_shapes(lengths: SampleLengths, batching: Batching, multiple: int) -> int:
    """Return the multiple, doubled until it leaves few enough shapes for CUDA graphs."""
    while len(shapes_of(lengths, replace(batching, multiple=multiple)).seen) > _MOST_SHAPES:
        multiple *= 2
    return multiple
