"""Export the best trial in the formats that training scripts take: JSON, YAML, command-line flags, Python."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from autotune.core.candidate import Arm, Candidate
from autotune.core.code_interface import CodeInterface, Framework
from autotune.core.dataset_spec import DataSpec
from autotune.core.errors import InvalidRequestError, NoResultError
from autotune.core.placeholders import Template
from autotune.core.rehearsal import Rehearsal
from autotune.core.schema import decode
from autotune.core.training_source import TrainingSource
from autotune.core.units import in_one_line
from autotune.core.workload import Workload
from autotune.models import catalog
from autotune.models.resolve import repository_of
from autotune.models.tasks import AUTO_CLASS_OF_TASK, PEFT_TASKS
from autotune.results.forms import LAUNCH_FORMATS, Format, LaunchFormat
from autotune.results.own_arguments import OwnArguments, flags, hand_over, own_arguments
from autotune.results.report import Report, measurement
from autotune.results.wording import describe_data
from autotune.space.arms import applied_settings
from autotune.space.features import allocator_variable, major_minor, offloading_threads
from autotune.space.training_arguments import (
    EVALUATION_BATCH,
    TunedArguments,
    data_arguments,
    evaluation_arguments,
    fsdp_settings,
    launch_variables,
    linked_fields,
    parallelism,
    training_arguments,
)

_OF_EVALUATION = (EVALUATION_BATCH, "eval_accumulation_steps")
_IMPORT_APPLY = "from autotune.training import apply"


@dataclass(frozen=True)
class Export:
    """The winner's ``TrainingArguments`` fields, and settings that belong elsewhere."""

    arguments: TunedArguments | OwnArguments
    """Every tuned field, and the evaluation's batch size unless the user's own code is trained.

    ``TrainingArguments(**arguments)`` accepts it.
    """
    candidate: Candidate
    model_arguments: dict[str, str]
    """Arguments for ``from_pretrained``: attention implementation, weights' dtype. Empty for the user's own code."""
    model: str
    task: str
    measured: str
    """Device, versions and data of the measurement, in words."""
    lora: dict[str, Any] = field(default_factory=dict)
    """Arguments of peft's ``LoraConfig``; empty where the weights themselves were trained."""
    bits: dict[str, Any] = field(default_factory=dict)
    """Arguments of ``BitsAndBytesConfig``; empty where weights were not quantized."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables that the training process needs from its start."""
    source: TrainingSource | None = None
    """The user's own code; ``None`` for a model by name."""
    row_tokens: int | None = None
    """Length in tokens of the rows into which samples are packed; ``None`` without packing."""
    world_size: int = 1
    """Devices of the user's training, of which a trial may have used only some (``ranks``)."""
    on_cpu: bool = False
    """Whether it was measured on the CPU."""
    has_reentrant_off: bool = False
    """Whether ``use_reentrant=False`` is the default of checkpointing in the measured version of transformers."""
    cpu_core: int | None = None
    """The core that the training process was pinned to, without its data loader workers; ``None`` if it was not."""

    differs: tuple[str, ...] = ()
    """Sentences on how the winner's training differs from the requested one (the search compares them at its end)."""
    applied_settings: dict[str, Any] = field(default_factory=dict)
    """Arguments of ``autotune.training.apply``, for settings that transformers does not have."""
    collator_multiple: int | None = None
    """``pad_to_multiple_of`` to set on the collator; ``None`` without padding to multiples, or if ``apply`` pads."""
    divides_loss: bool = False
    """Whether the Trainer has to be told to divide the loss by the accumulation."""
    accelerate_divides: bool = False
    """Whether Accelerate would then divide a second time, and has to be told not to."""
    rehearsal: Rehearsal | None = None
    """What a trial found of the parts of a run after its first steps, such as its evaluation; ``None`` without one."""
    omp_threads: str | None = None
    """``OMP_NUM_THREADS`` of several ranks, and of an optimizer on the CPU; ``None`` otherwise."""

    @property
    def framework(self) -> Framework:
        """The framework of the training; ``trainer`` for a model by name."""
        return self.source.framework if self.source is not None else "trainer"

    @property
    def interface(self) -> CodeInterface:
        """The way in which the user's own code takes its settings."""
        return self.source.interface if self.source is not None else CodeInterface()

    @property
    def takes_options(self) -> bool:
        """Whether the training is a script that takes the arguments as command-line options."""
        is_function = self.source is not None and self.source.kind != "script"
        return not is_function and self.interface.made_from == "flags"

    @property
    def usual_form(self) -> Format | LaunchFormat:
        """The default export format for this kind of code."""
        is_script = self.source is not None and self.source.kind == "script"
        if self.candidate.arm.needs_launcher and (is_script or self.source is None):
            return "torchrun"
        by_place: dict[str, Format] = {"flags": "cli", "code": "python", "file": "json"}
        return by_place[self.interface.made_from] if is_script else "json"

    @property
    def template(self) -> Template | None:
        """The command line of a script with placeholders; ``None`` for other code."""
        return self.source.template if self.source is not None and self.framework == "placeholders" else None

    @property
    def command(self) -> tuple[str, ...]:
        """The words of the training's command, without a launcher, relative to the search's working folder."""
        if self.source is None:
            return ("train.py",)
        if self.source.module is not None:
            return ("-m", self.source.module, *self.source.argv)
        within = os.path.relpath(self.source.file, self.source.cwd)
        return (self.source.file if within.startswith(os.pardir) else within, *self.source.argv)

    @property
    def ranks(self) -> int:
        """Number of processes that train together in a trial."""
        return self.candidate.arm.ranks

    @property
    def processes(self) -> int:
        """Number of processes of the training: one for each rank, or for each device of ``--world-size``."""
        return max(self.ranks, self.world_size)

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of the measurement that a launcher does not set by itself."""
        # torchrun and accelerate set OMP_NUM_THREADS to 1 by themselves.
        threads = {} if self.omp_threads in (None, "1") else {"OMP_NUM_THREADS": self.omp_threads}
        filled = self.template.fill_variables(self.candidate) if self.template is not None else {}
        return {**self.environment, **threads, **filled}

    @property
    def applied(self) -> str:
        """Python code for settings without a field in ``TrainingArguments``; an empty string without such settings."""
        if self.applied_settings:
            # ``apply`` pads and divides the loss by itself.
            return apply_call(self.applied_settings)
        statements = []
        if self.collator_multiple is not None:
            statements.append(f"trainer.data_collator.pad_to_multiple_of = {self.collator_multiple}")
        if self.divides_loss:
            statements.append("trainer.model_accepts_loss_kwargs = False")
            if self.accelerate_divides:
                statements.append("trainer.accelerator.gradient_accumulation_steps = 1")
        return "; ".join(statements)

    @property
    def measured_arguments(self) -> dict[str, Any]:
        """The arguments that affected the measurement: all but those of the evaluation."""
        return {name: value for name, value in self.arguments.items() if name not in _OF_EVALUATION}


def apply_call(settings: Mapping[str, Any]) -> str:
    """Return Python code that applies these settings to a ``Trainer``: ``apply(trainer, length_multiple=64)``."""
    return f"apply(trainer, {', '.join(f'{name}={value!r}' for name, value in settings.items())})"


def make_export(report: Report) -> Export:
    """Return the export of a study's best trial. Raises ``NoResultError`` without a best trial."""
    best = report.best
    if best is None and report.study.state == "running":
        raise NoResultError(
            f"the search of the study {report.study.name!r} has not ended, so there is no answer to export",
            f"wait for its end; if it was killed, autotune resume {report.study.name} continues it",
        )
    if best is None or (measured := measurement(best)) is None:
        raise NoResultError(
            f"the study {report.study.name!r} has no feasible trial to export",
            f"autotune show {report.study.name} says what was tried",
        )
    environment, arm = report.environment, best.candidate.arm
    packages = environment["packages"]
    fields = environment["training_arguments_fields"]
    variables = launch_variables(arm)
    if arm.expandable_segments:
        variables[allocator_variable(packages["torch"])] = "expandable_segments:True"
    data = report.workload.get("data")
    is_own = report.workload["task"] == "own"
    world_size = int(report.study.request.get("world_size") or 1)
    arguments = data_arguments(decode(data, DataSpec)) if data else {}
    revision = environment.get("measurement_revision", 1)
    source, look = report.source, report.study.look
    exported: TunedArguments | OwnArguments
    rehearsal = look.rehearsal if look is not None else None
    # Levers that the measured transformers has settings for need no ``apply``: ``stock`` are these settings.
    applied, multiple, stock = applied_settings(arm), None, dict(measured.stock_settings)
    if source is None or source.framework == "trainer":
        arguments |= training_arguments(best.candidate, fields, environment["device_kind"], revision)
        if "every_n_layers" in stock:
            arguments["activation_checkpointing_kwargs"]["every_n_layers"] = stock["every_n_layers"]
            del applied["checkpointed_layers"]
        if "pad_to_multiple_of" in stock and [*applied] == ["length_multiple"]:
            # Only where it is all: a call of ``apply`` that is needed anyway takes it, and needs it to compile.
            multiple = applied.pop("length_multiple")
        if is_own and report.baseline is not None and report.baseline.candidate.arm.torch_compile:
            arguments |= linked_fields(arguments)  # type: ignore[typeddict-item]
        exported = arguments if is_own else arguments | evaluation_arguments(best.candidate)
        if rehearsal is not None and rehearsal.evaluation is not None:
            exported |= cast("TunedArguments", rehearsal.evaluation.settings)
    else:
        exported = own_arguments(source, best.candidate)
    order = arm.train_sampling_strategy
    order_notes = (
        [f"samples come in another order, as --any-order allows: train_sampling_strategy={order}"] if order else []
    )
    loading = {"attn_implementation": arm.attn_implementation, "dtype": report.workload["dtype"]}
    return Export(
        arguments=exported,
        candidate=best.candidate,
        model_arguments={} if is_own else loading,
        model=report.workload["model"],
        task=report.workload["task"],
        measured=f"{environment['device_name']}, torch {packages['torch']}, "
        f"transformers {packages['transformers']}; "
        + ("" if is_own else f"{report.workload['task']}, ")
        + describe_data(report.workload, padding_free=arm.padding_free),
        row_tokens=report.workload["seq_len"] if data and data.get("packing") else None,
        lora=_lora_arguments(report.workload),
        bits=_bits_arguments(report.workload),
        environment=variables,
        differs=(*order_notes, *(look.sentences if look is not None else ())),
        applied_settings=applied,
        collator_multiple=multiple,
        divides_loss=measured.divides_loss,
        accelerate_divides=arm.zero_stage is None and major_minor(packages["transformers"]) < _DIVIDES_ONCE,
        cpu_core=measured.cpu_core,
        omp_threads=_omp_threads(arm, environment, world_size),
        source=source,
        rehearsal=rehearsal,
        on_cpu=environment["device_kind"] == "cpu",
        world_size=world_size,
        has_reentrant_off=major_minor(packages["transformers"]) >= _REENTRANT_OFF,
    )


def _omp_threads(arm: Arm, environment: dict[str, Any], world_size: int) -> str | None:
    """Return ``OMP_NUM_THREADS`` of a rank: its share of the cores if the optimizer is on the CPU, else as measured."""
    cores = (environment.get("host") or {}).get("usable_cores")
    if arm.offloads_optimizer and cores:
        return str(offloading_threads(int(cores), max(arm.ranks, world_size)))
    return environment.get("variables", {}).get("OMP_NUM_THREADS", "1") if "ranks" in environment else None


# transformers 5.23.0, modeling_utils: checkpointing without kwargs has use_reentrant=False.
_REENTRANT_OFF = (5, 23)
# transformers 5.6.0, trainer.py: the Trainer's Accelerator does not accumulate. With DeepSpeed it never divided.
_DIVIDES_ONCE = (5, 6)


def beside_lines(export: Export, form: Format | LaunchFormat | None = None) -> list[str]:
    """Return notes on what the user has to do or know beside the exported text; ``None`` stands for any form."""
    notes = [*export.differs, *_passing_notes(export), *_starting_notes(export, form), *made_by_hand(export)]
    if export.framework == "trainer":
        notes += _trainer_notes(export)
    return [in_one_line(line) for line in (*notes, f"measured on {export.measured}")]


def _passing_notes(export: Export) -> Iterator[str]:
    """Yield notes on how the user's own code is given the settings; none for a model by name."""
    source, name, place = export.source, export.model, export.interface.place or "its file of settings"
    if export.task != "own":
        return
    if export.template is not None:
        how = "write the values of --format json there, or train with autotune run"
        yield from (f"{os.path.relpath(path)} has placeholders: {how}" for path in export.template.files)
        return
    if source is not None and export.framework != "trainer":
        yield from hand_over(source, export.arguments, export.candidate)
        for key, size in (export.rehearsal.loader_batches if export.rehearsal is not None else {}).items():
            # A key such as ``/home/me/train.py:12#0`` says which loader made on a line it is.
            at = os.path.basename(key.rpartition("#")[0])
            yield f"set by hand: batch_size of the validation DataLoader at {at} = {size}"
        return
    if source is not None and source.kind != "script":
        # The printed command line of a launcher does not have them.
        yield f"hand them to {name} as its overrides" + (" (--format json)" if export.ranks > 1 else "")
    elif export.interface.made_from == "file":
        yield f"merge them into {place} (--format json), from which {name} reads its TrainingArguments"
    elif export.interface.made_from == "code":
        yield f"set them at {place}, where {name} makes its TrainingArguments (--format python)"
    else:
        yield f"give them to {name} after its other options (--format cli), where the last one counts"
    launched = dict(source.variables if source is not None else ()).get("ACCELERATE_MIXED_PRECISION")
    if launched is not None and export.candidate.arm.precision in ("fp32", "tf32"):
        yield f"start it without --mixed_precision {launched}, which it was not measured with"


def _starting_notes(export: Export, form: Format | LaunchFormat | None) -> Iterator[str]:
    """Yield notes on how to start the processes, where the form does not: their number, environment, core, launcher."""
    count, arm, core = export.processes, export.candidate.arm, export.cpu_core
    if form == "accelerate" and export.on_cpu and count > 1:
        yield f"on a CPU accelerate launch starts one process, without mpirun: use torchrun --nproc_per_node {count}"
    elif count > 1 and form not in LAUNCH_FORMATS:
        how = "as --format torchrun does" if export.ranks > 1 else "torchrun --nproc_per_node …"
        yield f"start {count} processes: this is the batch of each ({how})"
    if form != "torchrun" and not (form == "cli" and export.template is not None):
        # accelerate launch sets these from its file.
        from_file = launch_variables(arm) if form == "accelerate" else {}
        for name, value in export.variables.items():
            if name not in from_file:
                yield f"start the training with {name}={value} in its environment"
    if core is not None and arm.dataloader_num_workers:
        yield (
            f"pin the training to core {core} with the first lines of --format python, which leave the processes free "
            "that load data; taskset would pin these as well"
        )
    elif core is not None:
        yield f"put taskset -c {core} before the training's command: all its threads ran on that one core"
    if arm.zero_stage is not None and export.task != "own":
        if count == 1 and form not in LAUNCH_FORMATS:
            yield "start it by torchrun --nproc_per_node 1, as --format torchrun does"
        yield "it needs DeepSpeed: pip install deepspeed"
        yield "make the TrainingArguments before the model"


def _trainer_notes(export: Export) -> Iterator[str]:
    """Yield notes on what is set at the ``Trainer``; for the user's own, also on its evaluation."""
    if export.applied_settings:
        yield f"before it trains: {_IMPORT_APPLY}; {export.applied}"
    elif export.applied:
        why = ", since else nobody divides the loss by the accumulation" if export.divides_loss else ""
        yield f"before it trains: {export.applied}{why}"
    if export.task != "own":
        return
    for name, value in export.arguments.items():
        if value is None:
            yield f"leave {name} at its default, as it was measured"
    if export.rehearsal is not None:
        yield from (*export.rehearsal.alarms, *export.rehearsal.sentences)
        return
    yield (
        f"no evaluation was run: with {EVALUATION_BATCH} up to {export.candidate.per_device_train_batch_size} a batch "
        "of it needs less than training; what compute_metrics is given (the outputs for all samples, in the host's "
        "memory) comes on top"
    )


def made_by_hand(export: Export) -> list[str]:
    """Return notes on settings of the model and its data, which no form has; empty for the user's own code."""
    if export.task == "own":
        return []
    options = ", ".join(f"{name}={value!r}" for name, value in export.model_arguments.items())
    if export.bits:
        options += f", quantization_config={_call('BitsAndBytesConfig', export.bits)}"
    lines = [f"load the model with from_pretrained(…, {options})"]
    if export.lora:
        lines.append(f"put peft's adapters around it: get_peft_model(model, {_call('LoraConfig', export.lora)})")
    if export.row_tokens:
        lines.append(
            f"pack the samples: from autotune.training import pack; rows = pack(dataset, {export.row_tokens}); "
            "Trainer(train_dataset=rows, data_collator=rows.collate, …)"
        )
    return lines


def _pinning_lines(export: Export) -> str:
    """Return Python code that pins the process to the measured core, but not its data loader workers; maybe empty."""
    if export.cpu_core is None:
        return ""
    return (
        "cores = os.sched_getaffinity(0)\n"
        f"os.sched_setaffinity(0, {{{export.cpu_core}}})\n"
        "os.register_at_fork(after_in_child=lambda: os.sched_setaffinity(0, cores))\n"
    )


def render(export: Export, form: Format | LaunchFormat) -> str:
    """Return the export as text in a form, ending in a newline.

    Raises ``InvalidRequestError`` for the form of a launcher where one process was measured.
    """
    match form:
        case "json":
            return json.dumps(export.arguments, indent=2) + "\n"
        case "yaml":
            return yaml_text(beside_lines(export, form), export.arguments)
        case "cli":
            return " ".join(_flags(export)) + "\n"
        case "python":
            return _python(export)
        case "env":
            return "".join(f"{name}={shlex.quote(value)}\n" for name, value in export.variables.items())
    # Code with an Accelerator gets its precision from accelerate's file, also in one process.
    is_accelerate = export.framework == "accelerate" and form == "accelerate"
    if not export.candidate.arm.needs_launcher and not is_accelerate:
        raise InvalidRequestError(
            f"--format {form} starts several processes, and this study measured one",
            "use --format cli, or search with --gpus 2",
        )
    if form == "accelerate":
        return _accelerate_config(export)
    variables = {**export.environment, "OMP_NUM_THREADS": export.omp_threads or "1"}
    words = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    words += ["torchrun", "--standalone", "--nproc_per_node", str(export.processes), shlex.join(export.command)]
    return " ".join([*words, *(_flags(export) if export.takes_options else [])]) + "\n"


def yaml_text(comments: Iterable[str], settings: Mapping[str, Any]) -> str:
    """Return settings as YAML below some comments; JSON values are valid YAML, so nothing needs quoting."""
    lines = [*(f"# {line}" for line in comments), *(f"{name}: {json.dumps(value)}" for name, value in settings.items())]
    return "".join(f"{line}\n" for line in lines)


def _accelerate_config(export: Export) -> str:
    """Return a file for ``accelerate launch``, which starts the processes. The arguments are given to the script."""
    arm, processes = export.candidate.arm, export.processes
    if arm.zero_stage is not None:
        distributed = "DEEPSPEED"
    elif arm.is_sharded:
        distributed = "FSDP"
    elif processes > 1:
        distributed = "MULTI_CPU" if export.on_cpu else "MULTI_GPU"
    else:
        distributed = "NO"
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": distributed,
        "num_machines": 1,
        "machine_rank": 0,
        "num_processes": processes,
        "mixed_precision": arm.precision if arm.precision in ("bf16", "fp16") else "no",
        "use_cpu": export.on_cpu,
        "main_training_function": "main",
        "rdzv_backend": "static",
        "same_network": True,
        "debug": False,
    }
    if arm.is_sharded:
        settings = {**fsdp_settings(arm), "transformer_layer_cls_to_wrap": arm.transformer_layer_cls_to_wrap}
        config["fsdp_config"] = {f"fsdp_{name}": value for name, value in settings.items()}
    if sizes := parallelism(arm):
        config["parallelism_config"] = {f"parallelism_config_{name}": size for name, size in sizes.items()}
    if arm.zero_stage is not None:
        # ``TrainingArguments.deepspeed`` has all other settings, the precision too, which accelerate refuses twice.
        config["deepspeed_config"] = {"zero3_init_flag": arm.zero_stage == 3}
        del config["mixed_precision"]
    return yaml_text(beside_lines(export, "accelerate"), config)


def _lora_arguments(workload: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of peft's ``LoraConfig`` for a recorded workload; empty if that trains without adapters."""
    if not workload.get("peft"):
        return {}
    task = {"task_type": PEFT_TASKS[workload["task"]]} if workload["task"] in PEFT_TASKS else {}
    # The classifier of an image model is new, so it is trained whole.
    head = {"modules_to_save": ["classifier"]} if workload["task"] == "image-classification" else {}
    return {**Workload.from_document(dict(workload)).lora_arguments(), **task, **head}


def _bits_arguments(workload: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``BitsAndBytesConfig`` for a recorded workload, dtypes by name; empty without any."""
    if not workload.get("quantize"):
        return {}
    arguments = Workload.from_document(dict(workload)).bits_arguments()
    if "lora_options" not in workload:
        # Recorded by an earlier version, which did not quantize the scales.
        arguments.pop("bnb_4bit_use_double_quant", None)
    return arguments


def _call(name: str, arguments: Mapping[str, Any]) -> str:
    """Return a call as Python code, with dtypes as attributes of ``torch``."""
    said = (f"{key}={f'torch.{value}' if key.endswith('_dtype') else repr(value)}" for key, value in arguments.items())
    return f"{name}({', '.join(said)})"


def _flags(export: Export) -> list[str]:
    """Return the arguments as command-line options, those for which the script has an option.

    For a script with placeholders, return its whole command line instead.
    """
    if export.template is not None:
        # ``env`` sets the variables: from $(…) a shell would take an assignment for the name of a command.
        variables = [f"{name}={value}" for name, value in export.variables.items()]
        words = [
            *(["env", *variables] if variables else []),
            "python",
            *export.template.fill_words(export.command, export.candidate),
        ]
        return [shlex.join(words)]
    if export.source is None or export.framework == "trainer":
        words = []
        for name, value in export.arguments.items():
            # An option cannot be None, and the braces of a dictionary do not survive $(…): left out where the default.
            is_default = value is None or (value == {"use_reentrant": False} and export.has_reentrant_off)
            if name == "fsdp" and value is True:
                # An older ``fsdp`` took words such as full_shard, as which a value would be read.
                words.append("--fsdp")
            elif not is_default:
                text = json.dumps(value) if isinstance(value, dict | bool) else str(value)
                words.append(f"--{name} {shlex.quote(text)}")
        return words
    own: list[str] = []
    arguments: Mapping[str, Any] = export.arguments
    for name, flag in flags(export.source, arguments).items():
        value = arguments[name]
        if not isinstance(value, bool):
            own.append(f"{flag} {shlex.quote(str(value))}")
        elif value:
            # Flags for a boolean take no value, and only ever turn it on.
            own.append(flag)
    return own


def _python(export: Export) -> str:
    """Return the export as Python code: a dictionary for the user's own code, else a model and its arguments."""
    fields = "".join(f"    {name}={value!r},\n" for name, value in export.arguments.items())
    if export.task == "own":
        pinning = _pinning_lines(export)
        first = f"import os\n\n{pinning}\n" if pinning else ""
        name = "overrides" if export.framework == "trainer" else "settings"
        first += f"{_IMPORT_APPLY}\n\n" if export.applied_settings else ""
        return f"# measured on {in_one_line(export.measured)}\n{first}{name} = dict(\n{fields})\n{_call_apply(export)}"
    auto_class = AUTO_CLASS_OF_TASK[export.task]
    attention, dtype = export.model_arguments["attn_implementation"], export.model_arguments["dtype"]
    preparing = "".join(f"os.environ[{name!r}] = {value!r}\n" for name, value in export.variables.items())
    preparing += _pinning_lines(export)
    names = ", ".join(sorted([auto_class, "TrainingArguments", *(["BitsAndBytesConfig"] if export.bits else [])]))
    bits = f",\n    quantization_config={_call('BitsAndBytesConfig', export.bits)},\n)" if export.bits else "\n)"
    arguments = f"arguments = TrainingArguments(\n{fields})\n"
    # ZeRO-3 shards a model while it is loaded, which needs the arguments before.
    has_arguments_first = export.candidate.arm.zero_stage is not None
    applying = "apply, pack" if export.row_tokens else "apply"
    rows = f"rows = pack(dataset, {export.row_tokens})\n" if export.row_tokens else ""
    return (
        f"# measured on {in_one_line(export.measured)}\n"
        + (f"import os\n\n{preparing}\n" if preparing else "")
        + "import torch\n"
        + ("from peft import LoraConfig, get_peft_model\n" if export.lora else "")
        + f"from transformers import {names}\n\n"
        + (f"from autotune.training import {applying}\n\n" if export.applied_settings else "")
        + (f"{arguments}\n" if has_arguments_first else "")
        + f"model = {auto_class}.from_pretrained(\n"
        f"    {hub_name(export)!r}, attn_implementation={attention!r}, dtype=torch.{dtype}{bits}\n"
        + (f"model = get_peft_model(model, {_call('LoraConfig', export.lora)})\n" if export.lora else "")
        + ("" if has_arguments_first else arguments)
        + (
            f"# of tokenized samples, for Trainer(train_dataset=rows, data_collator=rows.collate):\n{rows}"
            if rows
            else ""
        )
        + _call_apply(export)
    )


def hub_name(export: Export) -> str:
    """Return the hub repository of the exported model if its name is of the catalog, else the name unchanged."""
    entry = None if "/" in export.model else catalog.find(export.model)
    repository = repository_of(entry, export.model) if entry is not None else None
    return repository or export.model


def _call_apply(export: Export) -> str:
    """Return Python code that applies settings without a field in ``TrainingArguments``."""
    return f"# once there is a Trainer:\n{export.applied}\n" if export.applied else ""
