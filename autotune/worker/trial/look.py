"""Look at a training: run a ``Trainer`` up to its first optimizer step, and record the loss and gradients.

What differs between two looks is the training itself: both begin from the same weights, in float32 where these fit,
without dropout, and see micro-batches that are cut from one batch.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, set_seed

from autotune.core.look import PROJECTIONS, FirstStep, Gradient, LookAnswer, LookWork
from autotune.core.messages import Problem
from autotune.core.outcome import Effort, OutOfMemory
from autotune.core.workload import Workload
from autotune.space.arms import applied_settings
from autotune.training import apply
from autotune.training.batches import SettingUnavailableError
from autotune.training.graphs import EAGER_MICRO_STEPS
from autotune.worker.arrays import arrays_in, cut
from autotune.worker.dataset.prepared import PreparedDataset
from autotune.worker.private.transformers import remove_reporting_callbacks
from autotune.worker.trial.build import build_config, build_model
from autotune.worker.trial.meter import failure_of, open_meter
from autotune.worker.trial.run import trainer_arguments
from autotune.worker.trial.step_checks import on_each_micro_step
from autotune.worker.trial.synthetic import synthetic_ingredients

# A gradient is projected as a matrix with so many columns. A random direction is the product of a vector along the rows
# and one across them, so that few random numbers are drawn.
_COLUMNS = 4096
# Unit roundoff by precision: half the distance from 1 to the next number, with 24, 11, 11 and 8 significant bits.
UNIT_ROUNDOFF = {"fp32": 2.0**-24, "tf32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8}
_MODEST_SCALE = 2.0**7
# After so many times the micro-steps in which CUDA graphs are captured and replayed, their replay is not waited for any
# more. A choice.
_MOST_WARMUPS = 3
# The number of layers of a model that does not fit is divided by this. A choice.
_FEWER = 4


@functools.cache
def _directions(rows: int, columns: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the random directions' factors: signs (rows, projections) and normal numbers (columns, projections).

    They depend on the shape alone, so that gradients of several processes can be compared.
    """
    generator = torch.Generator().manual_seed(rows * 8191 + columns)
    signs = torch.randint(0, 2, (rows, PROJECTIONS), generator=generator).float() * 2 - 1
    return signs.to(device), torch.randn((columns, PROJECTIONS), generator=generator).to(device)


@torch.no_grad()
def gradient_of(tensor: torch.Tensor, loss_scale: float = 1.0) -> Gradient:
    """Return norm and random projections of a gradient, to compare it with another; ``loss_scale`` is divided out."""
    tensor = tensor.detach()
    flat = (tensor.to_dense() if tensor.layout is not torch.strided else tensor).float().reshape(-1) / loss_scale
    columns = min(_COLUMNS, max(1, flat.numel()))
    rows = -(-flat.numel() // columns)
    signs, normal = _directions(rows, columns, flat.device)
    grid = torch.nn.functional.pad(flat, (0, rows * columns - flat.numel())).view(rows, columns)
    sketch = ((grid @ normal) * signs).sum(0)
    return Gradient(float(flat.norm()), tuple(sketch.double().tolist()))


def turn_off_dropout(model: Any) -> None:
    """Set dropout rates to 0 in a model's modules, and in configs, which some models read in each forward pass.

    Rates are floats whose names contain ``drop``, and ``p`` of dropout modules.
    """
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in name or (name == "p" and "Drop" in type(module).__name__)):
                setattr(module, name, 0.0)
        _turn_off_config_dropout(getattr(module, "config", None))


def _turn_off_config_dropout(config: Any, depth: int = 0) -> None:
    """Set dropout rates to 0 in a config and in the configs within it (``text_config``), at most two levels down."""
    for name, value in list(getattr(config, "__dict__", {}).items()):
        if isinstance(value, float) and "drop" in name:
            setattr(config, name, 0.0)
        elif name.endswith("config") and depth < 2:
            _turn_off_config_dropout(value, depth + 1)


def step_of(
    parameters: Iterable[tuple[str, torch.Tensor]],
    loss: float,
    samples: int,
    micro_steps: int,
    *,
    loss_scale: float = 1.0,
    roundoff: float = UNIT_ROUNDOFF["fp32"],
    input_sum: float | None = None,
) -> FirstStep:
    """Return the record of a first step, from the named ``parameters`` with their gradients, before the update.

    ``loss_scale`` is the gradient scaler's. ``roundoff``, of the precision computed in, is raised to that of the
    weights' dtypes. ``input_sum``, of all numbers that the model was given, tells whether two steps had equal samples.
    """
    named = [(_plain_name(name), each) for name, each in parameters]
    trained = {name: each for name, each in named if each.requires_grad}
    dtypes = {each.dtype for _, each in named}
    # Quantized weights, which are integers, are multiplied in 16 bits.
    roundoffs = (torch.finfo(each).eps / 2 if each.is_floating_point else UNIT_ROUNDOFF["bf16"] for each in dtypes)
    return FirstStep(
        loss=loss,
        gradients={
            name: None if each.grad is None else gradient_of(each.grad, loss_scale) for name, each in trained.items()
        },
        samples=samples,
        micro_steps=micro_steps,
        weights=float(sum(each.detach().float().norm().double() for _, each in named)),
        roundoff=max([roundoff, *roundoffs]),
        batch=input_sum,
    )


class _EndedError(BaseException):
    """Ends a training whose first step was recorded; a ``BaseException``, which no ``except Exception`` catches."""


class FirstStepRecorder(TrainerCallback):  # type: ignore[misc]
    """Calls ``finish`` with the record of the first optimizer step, before the update; ``finish`` ends the training.

    With CUDA graphs (``graphs``, else ``None``), the recorded step is the first in which they are replayed.
    ``has_same_samples`` tells whether the step's samples were cut from one batch of ``samples``.
    """

    def __init__(
        self, trainer: Any, finish: Callable[[FirstStep], Any], samples: int, *, has_same_samples: bool, graphs: Any
    ) -> None:
        self._trainer, self._finish, self._samples = trainer, finish, samples
        self._has_same_samples = has_same_samples
        self._graphs = graphs
        self._replayed_before = 0
        self._losses: list[torch.Tensor] = []
        self._micro_steps = 0

    def take(self, _: Any, loss: torch.Tensor) -> None:
        """Record the loss of a micro-step."""
        self._losses.append(loss)
        self._micro_steps += 1

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Forget the losses of the step before."""
        self._losses.clear()
        self._replayed_before = self._graphs.replays if self._graphs is not None else 0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Call ``finish`` with the record of this step, unless CUDA graphs are still to be replayed in a later step."""
        micro_steps = len(self._losses)
        # Graphs that are never replayed, since a capture failed, are waited for no longer than this.
        may_wait = self._micro_steps < _MOST_WARMUPS * (EAGER_MICRO_STEPS + micro_steps)
        if self._graphs is not None and may_wait and self._graphs.replays - self._replayed_before < micro_steps:
            return
        scaler = self._trainer.accelerator.scaler
        loss_scale = scaler.get_scale() if scaler is not None and scaler.is_enabled() else 1.0
        precision = "tf32" if args.tf32 else self._trainer.accelerator.mixed_precision
        step = step_of(
            kwargs["model"].named_parameters(),
            float(torch.stack([loss.float().reshape(()) for loss in self._losses]).sum()),
            self._samples,
            micro_steps,
            loss_scale=loss_scale,
            roundoff=UNIT_ROUNDOFF.get(precision, UNIT_ROUNDOFF["fp32"]),
        )
        divides = getattr(self._trainer, "divides_by_accumulation", False)
        self._finish(dataclasses.replace(step, divides=divides, has_same_samples=self._has_same_samples))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Prevent logging, evaluation, saving and an early stop."""
        control.should_log = control.should_evaluate = control.should_save = control.should_training_stop = False


def _plain_name(name: str) -> str:
    """Return a parameter's name without the prefixes of compiled and wrapped modules."""
    return re.sub(r"(^|\.)(_orig_mod|module)\.", r"\1", name)


def prepare_look(
    trainer: Any,
    samples: int,
    settings: Mapping[str, Any] | None,
    finish: Callable[[FirstStep], Any],
    *,
    seed: int = 0,
    step_seed: int = 0,
    most_float32_bytes: int | None = None,
) -> None:
    """Make a ``Trainer`` call ``finish`` with the record of its first step on ``samples`` samples, before its update.

    ``settings`` are arguments of ``autotune.training.apply``; with ``None`` it is not called. Weights become float32
    where they and their gradients then take no more than ``most_float32_bytes`` (``None``: any size), unless quantized.
    ``seed`` is for the samples, ``step_seed`` for what is random in the step itself.
    """
    model, args = trainer.model, trainer.args
    model = trainer.accelerator.unwrap_model(model)
    turn_off_dropout(model)
    weights = list(model.parameters())
    is_small = most_float32_bytes is None or 8 * sum(each.numel() for each in weights) <= most_float32_bytes
    # Quantized weights are no floating-point numbers.
    if is_small and all(each.is_floating_point() for each in weights) and not getattr(model, "is_quantized", False):
        model.float()
    trainer.neftune_noise_alpha = args.neftune_noise_alpha = None
    args.max_grad_norm, args.learning_rate, args.weight_decay, args.warmup_steps = 0.0, 0.0, 0.0, 0
    # More steps than any warm-up of CUDA graphs takes.
    args.max_steps, args.dataloader_num_workers, args.logging_nan_inf_filter = 1_000_000, 0, False
    remove_reporting_callbacks(trainer)
    scaler = trainer.accelerator.scaler
    if scaler is not None and scaler.is_enabled():
        # From its usual 65,536 on, the first updates are skipped.
        scaler.load_state_dict({**scaler.state_dict(), "scale": _MODEST_SCALE})
    has_same_samples = _cut_from_one_batch(trainer, samples, seed)
    if settings is not None:
        apply(trainer, **settings)
    graphs = trainer.training_step if settings and settings.get("cuda_graphs") else None
    recorder = FirstStepRecorder(trainer, finish, samples, has_same_samples=has_same_samples, graphs=graphs)
    on_each_micro_step(trainer, recorder.take)
    trainer.add_callback(recorder)
    # At the end, since the loader and the settings may have drawn numbers.
    set_seed(step_seed)


def first_step(trainer: Any, samples: int, settings: Mapping[str, Any] | None = None, **options: Any) -> FirstStep:
    """Train a ``Trainer`` up to its first optimizer step on ``samples`` samples; return the record of that step.

    ``options`` are further arguments of ``prepare_look``. Raises ``ValueError`` where the training ends before it.
    """
    steps: list[FirstStep] = []

    def finish(step: FirstStep) -> None:
        steps.append(step)
        raise _EndedError

    prepare_look(trainer, samples, settings, finish, **options)
    try:
        trainer.train()
    except _EndedError:
        return steps[0]
    raise ValueError("the training ended before its first optimizer step")


def _cut_from_one_batch(trainer: Any, samples: int, seed: int) -> bool:
    """Give a ``Trainer`` micro-batches cut from one batch, the first ``samples`` samples of its own loader.

    So every split in micro-batches has the same samples, masks and padding. Returns ``False`` where the batch cannot be
    cut, since its tensors do not have one row per sample: then the Trainer keeps its own micro-batches.
    """
    args, own_loader = trainer.args, trainer.get_train_dataloader
    size = args.per_device_train_batch_size
    set_seed(seed)
    args.per_device_train_batch_size = trainer._train_batch_size = samples
    try:
        batch = next(iter(own_loader()))
    finally:
        args.per_device_train_batch_size = trainer._train_batch_size = size
        # Forgets the loader that was prepared for this batch alone.
        trainer.accelerator.free_memory()
    arrays = [array for array in arrays_in(batch) if isinstance(array, torch.Tensor) and array.dim()]
    if not isinstance(batch, Mapping) or not arrays or any(len(array) != samples for array in arrays):
        return False
    batch = send_to_device(batch, "cpu")
    # The new loader's samples are numbers of rows, which its collator cuts from the batch.
    trainer.data_collator = lambda rows: cut(batch, samples, rows[0], rows[-1] + 1)
    row_numbers: Any = range(samples)
    # The collator is looked up at call time: settings put their own collators around this one.
    trainer.get_train_dataloader = lambda: DataLoader(row_numbers, batch_size=size, collate_fn=trainer.data_collator)
    return True


def _with_layers(workload: Workload, layers: int | None) -> Workload:
    """Return the workload with only the first ``layers`` layers of its model, or all of them for ``None``."""
    if layers is None:
        return workload
    config = build_config(workload)
    name = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    facts = {**workload.config, name: layers}
    if "layer_types" in facts:
        facts["layer_types"] = facts["layer_types"][:layers]
    return dataclasses.replace(workload, config=facts)


def look(workload: Workload, work: LookWork, output_dir: str) -> LookAnswer | Problem:
    """Return the records of each candidate's first step, or the problem that prevents one.

    Each candidate gets a new model with the same weights. With ``work.as_measured``, precision and dtypes are the
    candidate's, otherwise float32 where that fits. After out of memory, the answer says how many layers may fit.
    """
    meter = open_meter(work.devices.kind, work.devices.uuids[0])
    meter.limit(work.cap_bytes)
    workload = _with_layers(workload, work.layers)
    if not work.as_measured:
        in_full_float32()
    try:
        steps = []
        for candidate in work.candidates:
            set_seed(work.seed)  # The same random weights for all candidates.
            model = build_model(workload, candidate.arm.attn_implementation, meter.device)
            effort = Effort(max_micro_steps=candidate.gradient_accumulation_steps)
            samples = candidate.samples_per_step
            if work.data_folder is not None:
                prepared = PreparedDataset(workload, work.data_folder)
                fields, ingredients = prepared.arguments, prepared.ingredients(model)
            else:
                fields, ingredients = {}, synthetic_ingredients(workload, model, samples, work.seed)
            arguments = trainer_arguments(candidate, work.devices.kind, effort, output_dir, work.seed, **fields)
            trainer = Trainer(model, arguments, **ingredients)
            settings = dict(applied_settings(candidate.arm))
            most_bytes = 0 if work.as_measured else work.cap_bytes // 2
            seeds = {"seed": work.seed, "step_seed": work.seed + work.noise}
            if work.layers is not None and "checkpointed_layers" in settings:
                settings["checkpointed_layers"] = min(settings["checkpointed_layers"], work.layers)
            steps.append(first_step(trainer, samples, settings, most_float32_bytes=most_bytes, **seeds))
            # The next model needs this one's memory.
            del model, trainer
            gc.collect()
            meter.reset_peaks()
        return LookAnswer(tuple(steps))
    except SettingUnavailableError as error:
        return Problem(str(error))
    except Exception as error:
        outcome = failure_of(error, meter, "look", None, on_cpu=work.devices.kind == "cpu")
        # Pretrained weights have a fixed number of layers.
        may_shrink = isinstance(outcome, OutOfMemory) and not workload.weights
        layers = (getattr(build_config(workload), "num_hidden_layers", None) or 0) if may_shrink else 0
        fewer = layers // _FEWER
        return LookAnswer(fewer_layers=fewer) if fewer else Problem(outcome.message)


def in_full_float32() -> None:
    """Turn off TF32 for the rest of this process: by default convolutions on a GPU use it."""
    torch.backends.fp32_precision = "ieee"  # type: ignore[attr-defined]
