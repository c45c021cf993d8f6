"""Searches whose trials answer from a formula (``tests/faults/stand_in.py``): their model, and what was begun."""

import json
from pathlib import Path

from processes import parent

STAND_IN = Path(__file__).parent / "faults" / "stand_in.py"
MARK = "FAULTS_FOLDER"
"""A variable of every process that is started for a search, directly or not."""
_MODEL = {
    "model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 1, "intermediate_size": 8, "vocab_size": 64, "max_position_embeddings": 32,
}  # fmt: skip


def write_model(folder: Path) -> Path:
    """Write the model that is searched for; return its folder."""
    (folder / "model").mkdir(parents=True, exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps(_MODEL))
    return folder / "model"


def begun(folder: Path) -> list[tuple[int, str]]:
    """Process id and candidate of each trial that was begun."""
    runs = folder / "runs"
    lines = runs.read_text().splitlines() if runs.exists() else []
    return [(int(pid), candidate) for pid, _, candidate in (line.partition(" ") for line in lines)]


def server_of(pid: int) -> int | None:
    """The server of a trial that runs; ``None`` where it has ended or lost its server."""
    server = parent(pid)
    return server if server is not None and server > 1 else None
