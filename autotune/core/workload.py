"""Describe what is trained: the model's architecture, the task, the shape of the data, the dtype of the weights.

How it is trained is the candidate's part, and the effective batch is the request's, so that one measurement of a
workload serves many searches.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from autotune.core.code_interface import CodeInterface
from autotune.core.dataset_spec import DataFacts, DataSpec
from autotune.core.lengths import Order, SampleLengths
from autotune.core.schema import decode, digest
from autotune.core.training_source import TrainingSource, with_known_names

Task = Literal[
    "sequence-classification", "masked-lm", "causal-lm", "seq2seq-lm", "image-classification", "speech-seq2seq",
    "image-text-to-text", "own",
]  # fmt: skip
"""The training task; ``own`` where the user's own Trainer decides it."""
TASKS: tuple[Task, ...] = tuple(task for task in get_args(Task) if task != "own")
"""The tasks that a user may name."""

DTypeName = Literal["float32", "bfloat16", "float16"]
PeftName = Literal["lora"]
QuantizeName = Literal["4bit", "8bit"]
DTYPES: tuple[DTypeName, ...] = ("float32", "bfloat16", "float16")
BYTES_PER_ELEMENT: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
DEFAULT_LORA_RANK = 16
LORA_DEFAULTS: dict[str, Any] = {"target_modules": "all-linear"}
_NEW_HEADS: dict[str, tuple[str, ...]] = {
    "sequence-classification": ("classifier", "score"),
    "image-classification": ("classifier",),
}
# Fields that are no part of the fingerprint where they are ``None``.
_ADAPTING = frozenset({"peft", "lora_rank", "lora_options", "quantize"})
# Memory is the same with any share of padding, but not without padding.
_SOME_PADDING = 0.1


@dataclass(frozen=True)
class Workload:
    """What one training job trains, independent of batch size and machine."""

    model: str
    """The name or folder that the user gave."""
    config: dict[str, Any]
    """The architecture, as in a ``config.json``; has ``model_type`` unless ``source`` builds the model."""
    task: Task
    seq_len: int
    """Tokens a sample. For images and speech the number of target tokens, or 1; 0 where ``source`` makes the
    samples."""
    padding: float = 0.0
    """Mean fraction of each text sample that is padding; 0 means full length and no attention mask."""
    dtype: DTypeName = "float32"
    """Dtype of the stored weights."""
    weights: str | None = None
    """Folder or hub repository to load weights from; ``None`` for random weights, which are as fast and as large."""
    data: DataSpec | None = None
    """The user's own dataset; ``None`` for synthetic samples."""
    peft: PeftName | None = None
    """Train adapters on top of frozen weights instead of the weights themselves."""
    lora_rank: int | None = None
    lora_options: dict[str, Any] | None = None
    """Further arguments of peft's ``LoraConfig`` that differ from ``LORA_DEFAULTS``; ``None`` where none does."""
    quantize: QuantizeName | None = None
    """Quantization of the frozen weights in storage; they are computed in ``dtype``."""
    images: int = 0
    """Number of images in each sample, for a task with images and text."""
    image_side: int | None = None
    """Pixels of each side of these images; ``None`` without images."""
    source: TrainingSource | None = None
    """The user's own code that makes the model, data and Trainer; ``config`` and ``dtype`` then describe what it
    made."""

    @property
    def model_type(self) -> str:
        """The architecture's family, such as ``bert``."""
        return str(self.config["model_type"])

    @property
    def is_text(self) -> bool:
        """Whether a sample is a sequence of ``seq_len`` tokens."""
        return self.task not in ("image-classification", "speech-seq2seq", "own")

    @property
    def trained_dtype(self) -> DTypeName:
        """Dtype of the trained weights: float32 for peft's adapters; ``dtype`` where a new head is trained as well."""
        return "float32" if self.peft is not None and self.task not in _NEW_HEADS else self.dtype

    def data_folder(self, logs: Path) -> Path:
        """Return the folder of the prepared dataset, in the folder of logs. Workloads with the same data share it."""
        assert self.data is not None
        # Models of images and text have it in the config of their text model.
        vocabulary = self.config.get("vocab_size") or (self.config.get("text_config") or {}).get("vocab_size")
        # 2 is the version of the folder's layout.
        parts = [2, self.data.identity(), self.seq_len, self.task, vocabulary]
        # Beside folders of studies, none of whose names begins with a dot.
        return logs / ".data" / digest(parts)

    def describe_weights(self) -> str:
        """Return ``float32 weights`` or ``bfloat16 weights in 4 bits, LoRA of rank 16``."""
        words = f"{self.dtype} weights"
        words += f" in {self.quantize[0]} bits" if self.quantize else ""
        words += f", LoRA of rank {self.lora_rank}" if self.peft else ""
        options = {name.removeprefix("lora_"): value for name, value in (self.lora_options or {}).items()}
        return words + (f" ({', '.join(f'{name}={value}' for name, value in options.items())})" if options else "")

    def describe_numerics(self) -> str:
        """Return ``describe_weights``, and what an arm's ``fp32`` means where weights are in 16 bits.

        There it means no autocast, so that products are in 16 bits. Code with a loop of its own may give its weights
        the dtype of the precision that it is told: nothing is added.
        """
        keeps_dtype = self.source is None or self.source.framework == "trainer"
        is_half = self.dtype != "float32" and keeps_dtype
        return self.describe_weights() + (f"; fp32 below is without autocast, in {self.dtype}" if is_half else "")

    def lora_arguments(self) -> dict[str, Any]:
        """Return the arguments of peft's ``LoraConfig`` that neither task nor model decides."""
        rank = self.lora_rank
        assert rank is not None, "an adapter has a rank"
        return {"r": rank, "lora_alpha": 2 * rank, **LORA_DEFAULTS, **(self.lora_options or {})}

    def bits_arguments(self) -> dict[str, Any]:
        """Return the arguments of transformers' ``BitsAndBytesConfig`` for ``quantize``, with dtypes as names."""
        if self.quantize == "8bit":
            arguments: dict[str, Any] = {"load_in_8bit": True}
        else:
            arguments = {
                "load_in_4bit": True,
                "bnb_4bit_quant_type": "nf4",
                "bnb_4bit_use_double_quant": True,
                "bnb_4bit_compute_dtype": self.dtype,
            }
        # New heads are trained in full beside the adapters, so they are not quantized.
        heads = {} if self.task not in _NEW_HEADS else {"llm_int8_skip_modules": list(_NEW_HEADS[self.task])}
        return arguments | heads

    def document(self) -> dict[str, Any]:
        """Return the workload as JSON-ready data, for the trial process."""
        return dataclasses.asdict(self)

    def recorded_document(self) -> dict[str, Any]:
        """Return the workload as JSON-ready data for the record, with secrets of a script masked."""
        source = self.source.masked() if self.source is not None else None
        document = dataclasses.replace(self, source=source).document()
        if not self.images:
            del document["images"], document["image_side"]
        if source is not None:
            # Left out where they say nothing, as in workloads from before there were such fields.
            for name in ("variables", "is_ranked"):
                if not document["source"][name]:
                    document["source"].pop(name)
            if source.interface == CodeInterface():
                document["source"].pop("interface")
        return document

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> Workload:
        """Return the workload of a document from ``document``. Raises ``ValueError`` for a malformed document."""
        if isinstance(source := document.get("source"), dict):
            document = {**document, "source": with_known_names(source)}
        workload = decode(document, cls)
        is_own = workload.source is not None
        if (workload.task == "own") != is_own:
            raise ValueError(f"task is {workload.task!r}")
        if not is_own and not isinstance(workload.config.get("model_type"), str):
            raise ValueError("its workload has no model_type")
        if workload.seq_len < (0 if is_own else 1) or not workload.padding >= 0:
            raise ValueError(f"seq_len is {workload.seq_len}, padding {workload.padding}")
        return workload

    def at_its_worst(self) -> Workload:
        """Return the workload in which every sample is as long as the dataset's longest, for which memory must suffice.

        Workloads without known lengths are returned as they are.
        """
        lengths = self.data.facts.lengths if self.data and self.data.facts else None
        if self.data is None or lengths is None:
            return self
        seq_len = self.data.padded(lengths.in_batches[1], self.seq_len)
        # Any padding needs an attention mask; how much padding there is does not change memory.
        is_padded = lengths.shortest < seq_len
        return dataclasses.replace(self, seq_len=seq_len, padding=_SOME_PADDING if is_padded else 0.0)

    @property
    def sample_lengths(self) -> SampleLengths | None:
        """The lengths of the samples; ``None`` where they are unknown or the data is synthetic."""
        if self.source is not None:
            return self.source.interface.lengths
        facts = self.data.facts if self.data is not None else None
        if self.data is None or facts is None or facts.lengths is None or not facts.lengths.counts:
            return None
        order: Order = "group_by_length" if self.data.group_by_length else "random"
        multiple = self.data.pad_to_multiple_of or 1
        return SampleLengths(facts.lengths.counts, facts.samples, order, self.data.padding, multiple)

    def with_facts(self, facts: DataFacts) -> Workload:
        """Return the workload with what reading its dataset showed. The model gets the dataset's number of labels."""
        assert self.data is not None
        config = self.config
        if facts.num_labels is not None:
            names = {"id2label", "label2id", "num_labels"}
            config = {key: value for key, value in config.items() if key not in names}
            config["num_labels"] = facts.num_labels
        return dataclasses.replace(self, config=config, data=dataclasses.replace(self.data, facts=facts))

    @classmethod
    def of_source(cls, source: TrainingSource) -> Workload:
        """Return the workload of the user's own code before its inspection."""
        return cls(source.name, {}, "own", 0, source=source)

    def fingerprint(self) -> str:
        """Return a hash that is equal for two workloads exactly when measurements of one are valid for the other.

        The model's name is left out: the config says what the model is.
        """
        facts = self.recorded_document()
        facts.pop("model")
        facts.pop("weights")
        if self.quantize is not None:
            # Earlier versions quantized other layers and no scales: their measurements are not valid for this one.
            facts["quantized_as"] = self.bits_arguments()
        # Fields that are left out: workloads recorded before these existed keep their fingerprint.
        facts = {name: fact for name, fact in facts.items() if name not in _ADAPTING or fact is not None}
        facts.pop("data")
        if self.data is not None:
            facts["data"] = self.data.identity()
        if facts["source"] is None:
            facts.pop("source")
        else:
            for name in ("interface", "is_ranked"):
                facts["source"].pop(name, None)
        text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]
