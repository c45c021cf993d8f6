"""Find out what the user's ``Trainer`` trains with, before the first trial."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from autotune.core.candidate import Arm, Document, Precision
from autotune.core.code_interface import CodeInterface
from autotune.core.inspection import Inspection, ModelFacts, OwnSettings
from autotune.core.messages import InspectionWork, Problem
from autotune.core.placement import RankDevices
from autotune.training.possible import SETTINGS as LOOKED_FOR
from autotune.training.possible import obstacles
from autotune.worker.checkpointing import is_checkpointing
from autotune.worker.facts import inspect_environment, layer_classes
from autotune.worker.private.accelerate import why_no_fsdp2
from autotune.worker.private.transformers import attention_of
from autotune.worker.process import ForkedRun
from autotune.worker.rendezvous import Ranks
from autotune.worker.user.code import LAUNCHED_PRECISION, UserCodeError, enter
from autotune.worker.user.guard import Guard
from autotune.worker.user.inspection import Code, Finish, LoopInspection, facts_of, length, problem_of
from autotune.worker.user.protection import keep_run
from autotune.worker.user.samples import lengths_of_trainer
from autotune.worker.user.trainer_code import (
    TrialFields,
    build_trainer,
    intercept,
    own_batch,
    probe,
    run_source,
)
from autotune.worker.user.trainer_fields import BATCH, generates, json_value
from autotune.worker.user.trainer_memory import Memory, leave_large_weights_unset, traced, with_memory

# The steps are traced beside the first run. Where that takes longer, this is waited for in any case, as long as for
# predictions (autotune.tuning.forecast): each size that does not fit costs a trial of some seconds.
_LEAST_WAIT_SECONDS = 20.0

_PROBING_FAILED = "probing failed"
"""What a rank announces whose code raised an error with another batch than the user's."""


def inspect(code: Code, finish: Finish, ranks: Ranks) -> NoReturn:
    """Find out what the ``Trainer`` trains with that reaches ``Trainer.train`` in the user's code, and report it.

    Memory is traced in another process, without a GPU, at the same time; not for several ranks.
    """
    # Without arms (configurations without their batches) to trace.
    untraced = dataclasses.replace(code, work=dataclasses.replace(code.work, arms=None))
    began_at = time.monotonic()
    tracing = _begin_tracing(code) if ranks.count == 1 else None
    result = _run(untraced, ranks)
    if result.may_have_collided and tracing is not None:
        # Both processes run the user's code, which may allow only one at a time: run one after the other.
        tracing.end()
        tracing = None
        result = _run(untraced, ranks)
        if result.problem is None:
            tracing = _begin_tracing(code)
    if result.failed_probing:
        # The probing batch may have caused the error. Run again with the user's own batch.
        result = _run(untraced, ranks, is_probing=False)
    inspection = result.inspection
    if inspection is None:
        finish(result.answer)
    model = inspection.model
    if tracing is not None and model is not None and model.interface.kind == "trainer":
        memory = _memory_of(tracing, model, code.work, time.monotonic() - began_at)
        inspection = dataclasses.replace(inspection, model=with_memory(model, memory))
    if code.source.kind == "script":
        finish(inspection)
    # A function that builds a ``Trainer`` is called once more, to check whether it uses its arguments.
    _Inspection(untraced, lambda result: finish(result.answer), is_probing=False).try_overrides(inspection)


def _run(code: Code, ranks: Ranks, *, is_probing: bool = True) -> _RunResult:
    """Inspect the code in a fork, so that a further run has the whole device; return the result.

    ``is_probing``: with another batch than the user's. Code on several ranks may read its rank, or wait for the others.
    So all ranks run it equally often: probing has failed where it failed on any rank. Another problem of a rank is its
    answer, after which the trial server ends the other ranks.
    """
    process = ForkedRun(_RunResult, lambda send: _Inspection(code, send, is_probing=is_probing).describe(), stays=True)
    # A rank stops waiting once another has failed: its own run may wait for that rank forever.
    result = process.result_before(lambda: is_probing and ranks.was_announced(_PROBING_FAILED))
    result = result or _RunResult(failed_probing=True)
    if result.failed_probing:
        ranks.announce(_PROBING_FAILED)
    elif result.problem is not None and ranks.count > 1:
        # Its process stays until this one ends: an error of another rank about a closed connection would come first.
        return result
    # No process ends before the others are done: they may still be connecting to it.
    has_failed = any(ranks.gather(result.failed_probing))
    process.end()
    if ranks.count > 1:
        ranks.open_store_anew()
    return dataclasses.replace(result, failed_probing=has_failed)


def _begin_tracing(code: Code) -> ForkedRun[_RunResult] | None:
    """Start a process that traces the steps of the user's code without a GPU; return the process.

    A process that has used a GPU cannot be forked for a backward pass, so the process that inspects the code on the GPU
    cannot trace. ``None`` where nothing is to be traced.
    """
    if code.work.arms is None or code.work.arms.chip is None:
        return None
    output_dir = os.path.join(code.scratch.path, "traced")
    os.makedirs(output_dir, exist_ok=True)

    def trace(send: Callable[[_RunResult], NoReturn]) -> NoReturn:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        # Two runs at a time may be more than the host's memory holds. Then the kernel is to kill this one.
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
        leave_large_weights_unset()
        work = dataclasses.replace(code.work, devices=RankDevices("cpu", code.work.devices.uuids))
        on_cpu = dataclasses.replace(code, work=work)
        # No traced arm uses Liger's kernels, and TRL asks for the field when it decides how a loss is computed.
        fields = {"use_liger_kernel": False}
        _Inspection(on_cpu, send, is_probing=False, output_dir=output_dir, tuned=fields).describe()

    return ForkedRun(_RunResult, trace)


def _memory_of(tracing: ForkedRun[_RunResult], model: ModelFacts, work: InspectionWork, seconds: float) -> Memory:
    """Return the steps traced by ``tracing``. How long it waits depends on the ``seconds`` of the inspection."""
    assert work.arms is not None
    if model.interface.engine_share is not None:
        tracing.end()
        return Memory(unknown="vLLM generates in its process")
    result = tracing.result(min(work.arms.within_seconds - seconds, max(_LEAST_WAIT_SECONDS, 2 * seconds)))
    if result is None:
        return Memory(unknown="its process ended, or took too long")
    if result.inspection is None or result.inspection.model is None:
        problem = result.problem
        return Memory(unknown=problem.message if problem is not None else "it did not train without a GPU")
    traced_model = result.inspection.model
    return Memory(traced_model.memory, traced_model.interface.memory_unknown)


@dataclass(frozen=True, slots=True)
class _RunResult:
    """The result of one run of the user's code: the facts, or why there are none."""

    inspection: Inspection | None = None
    problem: Problem | None = None
    failed_probing: bool = False
    """Whether the code raised an error of its own with another batch than the user's, or set the batch again."""
    may_have_collided: bool = False
    """Whether it raised an error that two runs at a time may cause: by a port that the other one has, or by a file."""

    @property
    def answer(self) -> Inspection | Problem:
        """The facts, or why there are none."""
        answer = self.inspection or self.problem
        assert answer is not None
        return answer


class _Inspection:
    """One run of the user's code up to its training; the process ends with ``finish``."""

    def __init__(
        self,
        code: Code,
        finish: Callable[[_RunResult], NoReturn],
        *,
        is_probing: bool = True,
        output_dir: str | None = None,
        tuned: Document | None = None,
    ) -> None:
        self._code, self._source, self._work = code, code.source, code.work
        self._output_dir = output_dir or code.scratch.output_dir
        self._finish = finish
        self._environment = inspect_environment()
        self._fields = TrialFields(
            self._output_dir,
            tuned=tuned or {},
            on_cpu=code.work.devices.kind == "cpu",
            refuse=self._fail,
            is_probing=is_probing and code.source.kind == "script",
        )

    def describe(self) -> NoReturn:
        """Run the user's code until it trains and report the facts; for a script, with probing overrides."""

        def on_train(trainer: Any, _: Callable[[], Any]) -> NoReturn:
            try:
                model = self._facts_of(trainer)
            except BaseException as error:
                self._fail(error)
            self._finish_with_model(model)

        try:
            self._enter()
            intercept(on_train)
            run_source(self._source, {}, self._output_dir)
        except BaseException as error:
            self._fail(error)

    def _facts_of(self, trainer: Any) -> ModelFacts:
        """Return the facts of a ``Trainer`` that is about to train. Raises ``UserCodeError`` if it ignores fields."""
        fields, args = self._fields, trainer.args
        fields.begin(trainer)
        # GRPO of TRL may generate with vLLM in this process. It makes ``num_generations`` completions of each prompt.
        # Where it generates once a step, the samples of a step must be a multiple of that.
        has_engine = getattr(args, "use_vllm", False) and getattr(args, "vllm_mode", None) == "colocate"
        step_samples = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        generates_once = getattr(args, "generation_batch_size", None) == step_samples
        interface = CodeInterface(
            "trainer",
            made_from="code" if fields.set_since.intersection(BATCH) else fields.made_from,
            place=fields.place,
            engine_share=float(args.vllm_gpu_memory_utilization) if has_engine else None,
            samples_a_prompt=int(getattr(args, "num_generations", None) or 1) if generates_once else 1,
            batch_matters=fields.why_batch_matters,
            packs=bool(getattr(args, "packing", False)),
        )
        model = _model_facts(trainer, interface, fields)
        fields.check(self._source, args, fields.tuned)
        if self._work.arms is None:
            # Nothing is to be traced. Last of all: looking for obstacles to levers changes the Trainer.
            return dataclasses.replace(model, interface=_with_levers(trainer, interface))
        if interface.engine_share is None:
            # Memory of vLLM's engine cannot be traced.
            return with_memory(model, traced(self._work, model, trainer))
        return model

    def try_overrides(self, found: Inspection) -> NoReturn:
        """Have the user's function build a ``Trainer`` with another batch; report ``found`` where it has this batch."""
        own = found.model.own if found.model is not None else None
        assert own is not None
        assert own.per_device_train_batch_size is not None
        wanted = probe(own.per_device_train_batch_size, own.gradient_accumulation_steps)
        try:
            self._enter()
            self._fields.check(self._source, build_trainer(self._source, wanted).args, wanted)
        except BaseException as error:
            self._fail(error)
        self._finish(_RunResult(found))

    def _enter(self) -> None:
        """Prepare the process for the user's code: guard, loop inspection, fields of the Trainer."""
        enter(self._source)
        loop = LoopInspection(self._code, self._output_dir, self._finish_with_model)
        Guard(self._source, self._fail, is_known=loop.is_at_work).install(self._code.scratch.stop_file)
        if self._source.kind == "script":
            loop.install()
        self._fields.install()

    def _finish_with_model(self, model: ModelFacts) -> NoReturn:
        """End the inspection with the facts of the model."""
        if self._output_dir == self._code.scratch.output_dir:
            # The run that traces memory keeps no files.
            keep_run()
        found = dataclasses.replace(self._environment, model=model)
        # Values that the code sets after its arguments are made may be derived from the probing batch.
        sets_batch_anew = self._fields.is_probing and bool(self._fields.set_since.intersection(BATCH))
        self._finish(_RunResult(found, failed_probing=sets_batch_anew))

    def _fail(self, error: BaseException) -> NoReturn:
        """End the inspection with an error as its problem."""
        # An error that the code itself raised may come from the probing batch, or from the second run beside this one.
        is_of_code = not isinstance(error, UserCodeError)
        failed_probing = is_of_code and self._fields.is_probing and bool(self._fields.tuned)
        may_have_collided = is_of_code and isinstance(error, OSError | torch.distributed.DistError)
        self._finish(_RunResult(None, problem_of(error, self._source), failed_probing, may_have_collided))


def _model_facts(trainer: Any, interface: CodeInterface, fields: TrialFields) -> ModelFacts:
    """Return the facts of a ``Trainer``'s model, and the settings that the user's code gives the training itself."""
    model, args = trainer.model, trainer.args
    config = getattr(model, "config", None)
    batch, accumulation = own_batch(args)
    checkpointing, recomputes = fields.own_checkpointing, is_checkpointing(model)
    arm = Arm(
        _precision(args),
        checkpointing or recomputes,
        attention_of(config),
        json_value(args.optim),
        torch_compile=args.torch_compile,
        torch_compile_mode=args.torch_compile_mode if args.torch_compile else None,
        use_liger_kernel=bool(args.use_liger_kernel),
    )
    without_fsdp2 = why_no_fsdp2()
    return dataclasses.replace(
        facts_of(model, None),
        attn_implementations=(attention_of(config),),
        gradient_checkpointing=bool(getattr(model, "supports_gradient_checkpointing", False)),
        layer_classes=tuple(layer_classes(model)) if without_fsdp2 is None else (),
        sharding_error=without_fsdp2,
        own=OwnSettings(arm, batch, accumulation),
        interface=interface,
        samples=length(getattr(trainer, "train_dataset", None)),
        # Probing turns the arguments' checkpointing off: then the code itself makes the model recompute.
        always_checkpoints=recomputes and (fields.is_probing or not checkpointing),
        dataloader_num_workers=args.dataloader_num_workers,
    )


# Batches to look at, and for how long: enough to see whether they differ in length. Choices.
_MOST_BATCHES, _MOST_SECONDS = 8, 5.0


def _with_levers(trainer: Any, interface: CodeInterface) -> CodeInterface:
    """Return an interface with obstacles to levers (settings to search), and the samples' lengths."""
    if generates(trainer.args):
        why = "its Trainer generates the samples that it trains on"
        return dataclasses.replace(interface, obstacles=dict.fromkeys(LOOKED_FOR, why))
    batches: list[Any] = []
    began = time.monotonic()
    for batch in trainer.get_train_dataloader():
        batches.append(batch)
        if len(batches) == _MOST_BATCHES or time.monotonic() - began > _MOST_SECONDS:
            break
    shapes = [getattr(batch.get("input_ids"), "shape", None) for batch in batches if isinstance(batch, Mapping)]
    vary = len({shape[1:] for shape in shapes if shape}) > 1 if any(shapes) else None
    lengths = lengths_of_trainer(trainer, batches)
    is_partly_read = lengths is not None and lengths.vary and sum(n for _, n in lengths.counts) < (lengths.samples or 0)
    # A long run may need more memory than its first steps show.
    goes_on = trainer.eval_dataset is not None or trainer.args.dataloader_num_workers > 0 or is_partly_read
    return dataclasses.replace(
        interface, shapes_vary=vary, lengths=lengths, goes_on=goes_on, obstacles=obstacles(trainer, batches)
    )


def _precision(args: Any) -> Precision:
    """Return the precision of the arguments, or of ``accelerate launch`` where they set none."""
    launched = os.environ.get(LAUNCHED_PRECISION)
    if args.bf16 or (launched == "bf16" and not args.fp16):
        return "bf16"
    if args.fp16 or launched == "fp16":
        return "fp16"
    return "tf32" if args.tf32 else "fp32"
