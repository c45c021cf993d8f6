"""What the batch finders have in common: the model, its data, the memory limit, and how the answer is told.

Each finder is a program: ``python by_….py SETTINGS.json RESULT.json`` (``studies/peers.py`` writes the one and
reads the other). A finder trains a sequence classifier with random weights on random tokens under bf16 autocast
with fused AdamW, as a trial of a search does.
"""

from __future__ import annotations

import json
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, default_collate
from transformers import AutoConfig, AutoModelForSequenceClassification

Sample = dict[str, torch.Tensor]

SAMPLES = 8192
"""More than any finder tries at once: Lightning's stops at the size of the data."""
_POOL = 64
LEARNING_RATE = 5e-5
CLIP_NORM = 1.0
"""TrainingArguments' defaults."""


@dataclass(frozen=True)
class Settings:
    """What a finder is to do."""

    config: dict[str, Any]
    seq_len: int
    device: str
    """``cuda`` or ``cpu``."""
    bf16: bool
    """Autocast. On a CPU it would bring oneDNN in, see ``Task``."""
    cap_bytes: int | None
    start: int
    """The batch to start with, for those that go down."""
    steps: int
    """Optimizer steps in each try, for those that leave it to the user."""


class Tokens(Dataset[Sample]):
    """Random tokens, full length."""

    def __init__(self, vocabulary: int, seq_len: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._tokens = torch.randint(10, vocabulary, (_POOL, seq_len), generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Sample:
        return {"input_ids": self._tokens[index % _POOL], "labels": torch.tensor(index % 2)}


class Task:
    """A finder's settings, and which batches it has tried."""

    def __init__(self) -> None:
        self.settings = Settings(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
        self.tried: list[int] = []
        self.dataset = Tokens(self.settings.config["vocab_size"], self.settings.seq_len)
        self._limit_memory()

    def _limit_memory(self) -> None:
        """Cap CUDA's allocator; on a CPU the data of the process beyond what its imports took."""
        cap_bytes = self.settings.cap_bytes
        if cap_bytes is None:
            return
        if self.settings.device == "cuda":
            total_bytes = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, cap_bytes / total_bytes), 0)
            return
        # oneDNN does not say that memory was wanting in words that the finders know.
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        data_kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData:"))
        limit = data_kib * 1024 + cap_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))

    def model(self) -> torch.nn.Module:
        """The classifier on its device, in float32."""
        facts = dict(self.settings.config)
        config = AutoConfig.for_model(facts.pop("model_type"), **facts)
        with torch.device(self.settings.device):
            model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
        trained: torch.nn.Module = model.train()
        return trained

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """Fused AdamW."""
        return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def collate(self, samples: list[Sample]) -> Sample:
        """A batch, and a note of its size."""
        if self.tried[-1:] != [len(samples)]:
            self.tried.append(len(samples))
        batch: Sample = default_collate(samples)
        return batch

    def answer(self, batch: int) -> None:
        """Tell the batch that was found."""
        result = {"per_device_train_batch_size": batch, "tried": self.tried}
        Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")
