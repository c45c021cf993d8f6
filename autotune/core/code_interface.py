"""Describe how the user's own training code takes its settings, and what protects the user's files from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from autotune.core.candidate import Precision
from autotune.core.lengths import SampleLengths

ProtectionKind = Literal["overlay", "read-only", "landlock", "none"]
"""``overlay``: what the code writes goes to a folder laid over the user's files (overlayfs), which is thrown away.
``read-only``: the files are mounted read-only for the trial. ``landlock``: the kernel refuses writing outside a trial's
own folders."""

PROTECTED: dict[ProtectionKind, str] = {
    "overlay": "what your code writes goes to a layer over your files that is thrown away (overlayfs)",
    "read-only": "your files are read-only for your code: no layer can be laid over them here (mount name space)",
    "landlock": "your files are read-only for your code: no layer can be laid over them here (Landlock)",
    "none": "your files are not protected: your code writes, renames and deletes in every trial as it would by itself",
}
"""The note that is printed before a search, by kind of protection."""


@dataclass(frozen=True, slots=True)
class Protection:
    """The protection of the user's files from a job that runs the user's own code."""

    kind: ProtectionKind = "none"
    layer: str | None = None
    """The folder with what the inspection of the code wrote, which trials see beneath what they write themselves."""


@dataclass(frozen=True, slots=True)
class FoundProtection:
    """The best protection of files that this machine offers, and why there is no better one."""

    kind: ProtectionKind
    why_not_better: str = ""


Framework = Literal["trainer", "loop", "accelerate", "fabric", "lightning", "placeholders"]
"""The framework that code trains with; ``placeholders``: any script whose command line tells it its settings."""
MadeFrom = Literal["flags", "file", "code"]
"""Where a script's ``TrainingArguments`` come from."""
SETTINGS = ("batch", "accumulation", "precision", "checkpointing")
"""The settings of a candidate that code without a ``Trainer`` may take."""


@dataclass(frozen=True, slots=True)
class Site:
    """Where a script's samples are counted: a dimension of a tensor that an outermost model takes or returns."""

    model: str
    """The model's class, and its number in the order of the models' first calls: ``GPT#0``."""
    path: str
    """The tensor's place among the model's inputs (``0``, ``1.input_ids``) or outputs (``out.logits``)."""
    dimension: int
    factor: int = 1
    """Size of the dimension for each sample: its tokens, where a model takes all tokens in one dimension."""
    calls: int = 1
    """Calls of the model in each micro-step."""

    def rows(self, model: str, shapes: dict[str, tuple[int, ...]]) -> int:
        """Return the size of this dimension in a call of ``model`` with these tensors; 0 without this tensor."""
        shape = shapes.get(self.path) if model == self.model else None
        return shape[self.dimension] if shape is not None and len(shape) > self.dimension else 0


@dataclass(frozen=True, slots=True)
class HowItSteps:
    """How a script makes the steps of its optimizers, by which a trial tells whole steps and micro-steps apart."""

    anchor: int = 0
    """The number of the optimizer whose step ends a whole step, in the order of the optimizers' first steps."""
    passes: int = 1
    """Backward passes of a micro-step."""
    passes_once: int = 0
    """Further backward passes of each whole step, such as that of a loss over the whole batch."""
    site: Site | None = None
    """Where samples are counted; ``None`` where that is not known."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """The numbers that a command line with placeholders fixes; ``None`` for one that a placeholder stands for."""

    batch: int | None = None
    accumulation: int | None = None
    effective_batch: int | None = None
    """The samples of an optimizer step, from which the script computes its accumulation."""


@dataclass(frozen=True, slots=True)
class CodeInterface:
    """How the user's code takes its settings. The defaults: a script whose Trainer takes all of them as flags."""

    kind: Framework = "trainer"
    searched: tuple[str, ...] = SETTINGS
    """Which of ``SETTINGS`` a trial can replace."""
    made_from: MadeFrom = "flags"
    """Where a script's ``TrainingArguments`` come from."""
    place: str | None = None
    """The name of the file, or the line of code, that ``TrainingArguments`` come from."""
    loader_key: str | None = None
    """The line that makes the training ``DataLoader``, and its number there: ``/home/me/train.py:12#0``."""
    loader: str | None = None
    """The line of ``loader_key`` in words, for messages."""
    loader_workers: int = 0
    loader_prefetch: int | None = None
    loader_batch: int | None = None
    """Samples of a loop's batches at the default of its ``LoopConfig``; ``None`` where its loader does not say."""
    tunes_loader: bool = True
    """Whether trials can set the number of data loader workers and their prefetching."""
    accumulates_by: Literal["accelerator", "option", "script"] | None = None
    """What decides the accumulation of a script with an ``Accelerator``: this object, an option, the script's code."""
    accelerator: str = ""
    """The file and line that makes the ``Accelerator``."""
    passed: tuple[str, ...] = ()
    """Settings that the script passes to its ``Accelerator``, so that ``accelerate launch`` does not decide them."""
    flags: dict[str, str] = field(default_factory=dict)
    """Options of the script's own parser, by the setting that each decides: one of ``SETTINGS``, or ``workers``."""
    samples: int | None = None
    """Samples of an epoch; ``None`` where their number is not known."""
    lengths: SampleLengths | None = None
    """Lengths of the training samples; ``None`` where they were not looked at, or the samples are no text."""
    fixed: Fixed = Fixed()
    precisions: tuple[Precision, ...] = ()
    """Precisions for which a placeholder gives the script's own names; empty where it gives no names."""
    casts_weights: bool = False
    """Whether the weights of a script with placeholders have another dtype with another precision."""
    sample_tokens: int | None = None
    """Tokens of a sample, where a placeholder stands for the tokens of a step."""
    steps: HowItSteps = HowItSteps()
    """How a script with placeholders makes its steps."""
    compiles: bool = False
    """Whether a script with placeholders calls ``torch.compile``: each of its trials then compiles."""
    has_own_settings: bool = True
    """Whether the code trains with settings of its own where it is given none."""
    batch_matters: str | None = None
    """Why n batches of one sample train otherwise than one batch of n samples; ``None`` without a sign of it."""
    memory_unknown: str | None = None
    """Why the memory of a ``Trainer`` is not predicted; ``None`` where it is, or was not asked for."""
    samples_a_prompt: int = 1
    """Completions of a prompt that a step is made of, as TRL's GRPO generates them: a step has a multiple of them."""
    engine_share: float | None = None
    """Part of the GPU's memory that vLLM takes in the process of the training, as with TRL's GRPO; ``None`` without."""
    packs: bool = False
    """Whether a sample is a row of several, as with TRL's ``packing``."""
    goes_on: bool = False
    """Whether a Trainer's run has parts that its first steps do not show: an evaluation, processes that load data, or
    samples whose lengths were not all read."""
    shapes_vary: bool | None = None
    """Whether batches of a Trainer's texts differ in length; ``None`` where it was not looked at, or has no texts."""
    obstacles: dict[str, str] = field(default_factory=dict)
    """Why a Trainer cannot have a lever, by the lever's name."""
    protection: ProtectionKind | None = None
    """What keeps trials from the user's files; ``None`` where nothing was run in a trial process."""
