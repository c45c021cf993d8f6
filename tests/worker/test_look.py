"""Test the look at the first optimizer step of two settings, each in a process of the trial server."""

from pathlib import Path
from typing import Any

import pytest
from server_client import ServerClient, of_command
from tiny import AMPLE_BYTES, tiny_workload

from autotune.core.candidate import OWN_OPTIM, Arm, Candidate
from autotune.core.look import LookAnswer, LookWork
from autotune.core.placement import RankDevices
from autotune.core.schema import decode
from autotune.core.units import MIB
from autotune.core.workload import Workload
from autotune.tuning.look import Looker, small_splits

# Each a Trainer whose training is another one with another setting; ``--case`` names which.
SCRIPT = """
import argparse, torch
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers import (
    BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
)
parser = argparse.ArgumentParser()
parser.add_argument("--case")
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--accumulation", type=int, default=1)
given = parser.parse_args()

class Tagger(torch.nn.Module):
    "Its loss is the mean over the tokens of a micro-batch."
    supports_gradient_checkpointing = True
    checkpoints = False
    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(40, 8).requires_grad_(False), torch.nn.Linear(8, 4)
        self.adapter = torch.nn.Linear(8, 8)
    def activation_checkpointing_enable(self, *_, **__):
        self.checkpoints = True
    gradient_checkpointing_enable = activation_checkpointing_enable
    def forward(self, input_ids, labels):
        hidden = self.embed(input_ids)
        hidden = checkpoint(self.adapter, hidden, use_reentrant=True) if self.checkpoints else self.adapter(hidden)
        return {"loss": cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())}

rows = [{"input_ids": row, "labels": row % 4} for row in torch.randint(1, 40, (64, 12))]
model, collate = Tagger(), None
if given.case == "token mean":
    for at, row in enumerate(rows):
        row["labels"] = torch.where(torch.arange(12) < 2 + at % 9, row["labels"], -100)
if given.case == "division":
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = BertConfig(vocab_size=40, **sizes)
    model, rows = BertForSequenceClassification(config), [{**row, "labels": row["labels"][0] % 2} for row in rows]
if given.case == "random":
    def collate(samples):
        noise = torch.rand(())
        return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
    whole = model.forward
    model.forward = lambda input_ids, labels: {"loss": whole(input_ids, labels)["loss"] * torch.rand(())}
arguments = TrainingArguments("out", per_device_train_batch_size=given.batch, use_cpu=True, max_steps=8,
                              gradient_accumulation_steps=given.accumulation, remove_unused_columns=False)
Trainer(model, arguments, train_dataset=rows, data_collator=collate).train()
"""
DEVICES = RankDevices("cpu", ("cpu",))


def looker(server: ServerClient, workload: Workload, asked: Candidate, **changes: Any) -> Looker:
    """What looks at winners by jobs of a server."""

    def ask(work: LookWork) -> LookAnswer | str:
        end = server.run(workload, work).end
        return decode(end.result, LookAnswer) if end.problem is None else end.problem.message

    is_own = workload.source is not None
    options: dict[str, Any] = {"cap_bytes": AMPLE_BYTES, "seed": 42, "is_unmodified": is_own, "is_own": is_own}
    return Looker(ask, asked, DEVICES, **(options | changes))


@pytest.fixture
def own(folder: Path) -> Any:
    """Returns the workload of a case of the script."""

    def workload(case: str, *words: str) -> Workload:
        (folder / "run.py").write_text(SCRIPT)
        return of_command("run.py", "--case", case, *words)

    return workload


PLAIN = Arm(attn_implementation="eager", optim="adamw_torch")


def test_both_splits_are_small_and_have_as_many_samples() -> None:
    def splits(asked: tuple[int, int], winner: tuple[int, int]) -> Any:
        return small_splits(Candidate(Arm(), *asked), Candidate(Arm(), *winner))

    assert splits((64, 8), (8, 64)) == ((4, 2), (2, 4))
    assert splits((8, 4), (32, 1)) == ((2, 2), (4, 1))
    assert splits((1, 4), (4, 1)) == ((1, 2), (2, 1))
    assert splits((8, 4), (8, 4)) == ((2, 2), (2, 2))
    # Of another effective batch: 8 × 8 for 64 × 1.
    assert splits((8, 1), (64, 1)) == ((2, 2), (4, 1))


def test_a_model_by_name_trains_the_same_with_another_split_and_checkpointing(trial_server: ServerClient) -> None:
    workload = tiny_workload("gpt2-tiny", seq_len=8)
    look = looker(trial_server, workload, Candidate(Arm(), 16, 1))
    verdict = look.differences(Candidate(Arm("bf16", gradient_checkpointing=True, fused_loss=True), 4, 4))
    assert verdict.levers == ()
    assert (verdict.look.differs, verdict.look.unknown) == ((), None)


def test_a_model_that_does_not_fit_is_looked_at_with_a_quarter_of_its_layers(trial_server: ServerClient) -> None:
    """As one that only its shards fit on several GPUs."""
    workload = tiny_workload("gpt2-tiny", seq_len=8, config={"n_layer": 16, "n_embd": 512})
    look = looker(trial_server, workload, Candidate(Arm(), 16, 1), cap_bytes=320 * MIB)
    verdict = look.differences(Candidate(Arm(checkpointed_layers=12, gradient_checkpointing=True), 4, 4))
    assert (verdict.look.differs, verdict.look.unknown) == ((), None)
    assert look._work.layers == 4


@pytest.mark.parametrize(("case", "words"), [("token mean", "other gradients"), ("none", None), ("division", None)])
def test_what_another_split_changes_is_told(trial_server: ServerClient, own: Any, case: str, words: str | None) -> None:
    look = looker(trial_server, own(case), Candidate(PLAIN, 8, 1)).differences(Candidate(PLAIN, 2, 4)).look
    assert look.unknown is None
    assert words is None or words in look.differs[0]
    assert bool(look.differs) is (words is not None)


def test_own_settings_that_do_not_divide_are_told(trial_server: ServerClient, own: Any) -> None:
    """Their own accumulation has gradients that grow with it; the winner's are divided."""
    asked = Candidate(PLAIN, 4, 2)
    look = looker(trial_server, own("division", "--batch", "4", "--accumulation", "2"), asked)
    (line,) = look.differences(Candidate(PLAIN, 8, 1)).look.differs
    assert "8 × 1 is another training than 4 × 2: the loss of the latter is not divided" in line


def test_a_setting_that_trains_less_is_ruled_out(trial_server: ServerClient, own: Any) -> None:
    checkpointing = Arm(attn_implementation="eager", optim="adamw_torch", gradient_checkpointing=True)
    verdict = looker(trial_server, own("none"), Candidate(PLAIN, 8, 1)).differences(Candidate(checkpointing, 8, 1))
    assert verdict.levers == ("gradient_checkpointing",)
    assert "trains 2 of 4 tensors, not 4" in verdict.look.ruled_out[0]


def test_a_random_loss_is_not_judged(trial_server: ServerClient, own: Any) -> None:
    look = looker(trial_server, own("random"), Candidate(PLAIN, 8, 1)).differences(Candidate(PLAIN, 2, 4)).look
    assert look.unknown is not None
    assert "other gradients each time" in look.unknown


LOOP = """
import sys, torch
from torch.nn.functional import cross_entropy
from accelerate import Accelerator
class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.drop = torch.nn.Linear(16, 8), torch.nn.Dropout(0.5)
    def forward(self, points):
        return self.drop(self.layer(points))
accelerator = Accelerator()
torch.manual_seed(1)
model, points = Encoder(), torch.randn(256, 2, 16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(points, batch_size=8, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _ in range(9):
    for batch in loader:
        with accelerator.accumulate(model):
            one, other = model(batch).unbind(1)
            if "negatives" in sys.argv:
                loss = cross_entropy(one @ other.T, torch.arange(len(one)))
            else:
                loss = (one - other).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
"""


OWN = Candidate(Arm(optim=OWN_OPTIM), 8, 1)
BY_TWO = Candidate(OWN.arm, 2, 4)


def split_differs(
    server: ServerClient, workload: Workload, own: Candidate = OWN, other: Candidate = BY_TWO, **options: bool
) -> bool:
    """Whether a look finds that another split of a step's samples is another training."""
    found = looker(server, workload, own, is_unmodified=False, **options).differences(other).look
    assert found.unknown is None
    return bool(found.differs)


@pytest.mark.parametrize("case", ["negatives", "distances"])
def test_a_loop_on_accelerate_is_looked_at(trial_server: ServerClient, folder: Path, case: str) -> None:
    (folder / "loop.py").write_text(LOOP)
    workload, _ = trial_server.prepared(of_command("loop.py", case))
    assert split_differs(trial_server, workload) is (case == "negatives")


PLACEHOLDERS = """
import sys, torch, torch.nn.functional as F
batch, accum, kind = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
norm = {"norm": torch.nn.BatchNorm1d(16)}.get(kind, torch.nn.LayerNorm(16))
ends = [torch.nn.Linear(16, 1), torch.nn.Flatten(0)] if kind == "flat" else [torch.nn.Linear(16, 4)]
net = torch.nn.Sequential(torch.nn.Linear(8, 16), norm, *ends)
optimizer = torch.optim.Adam(net.parameters())
for step in range(60):
    for _ in range(accum):
        x = torch.randn(batch, 8)
        out = net(x)
        if kind == "contrast":
            other = F.normalize(net(x + 0.1))
            loss = F.cross_entropy(F.normalize(out) @ other.T * 10, torch.arange(batch))
        elif kind == "flat":
            loss = F.mse_loss(out, x.mean(-1))
        elif kind.endswith("sum"):
            loss = F.cross_entropy(out, x.argmax(-1) % 4, reduction="sum")
        elif kind == "masked":
            loss = F.cross_entropy(out, x.argmax(-1) % 4, reduction="none").sum() / torch.tensor(batch)
        else:
            loss = F.cross_entropy(out, x.argmax(-1) % 4)
        (loss if kind == "undivided sum" else loss / accum).backward()
    optimizer.step(), optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("kind", "differs"),
    [
        ("norm", True),
        ("contrast", True),
        ("sum", True),
        pytest.param("undivided sum", False, marks=pytest.mark.whole),
        ("masked", False),
        pytest.param("flat", False, marks=pytest.mark.whole),
    ],
)
def test_a_script_with_placeholders_is_looked_at(
    trial_server: ServerClient, folder: Path, kind: str, *, differs: bool
) -> None:
    (folder / "loop.py").write_text(PLACEHOLDERS)
    workload, _ = trial_server.prepared(of_command("python", "loop.py", "{batch}", "{accumulation}", kind))
    assert split_differs(trial_server, workload) is differs


@pytest.mark.parametrize(("kind", "differs"), [("plain", False), ("sum", True)])
def test_a_script_that_makes_its_accumulation_of_a_total_is_looked_at_with_it(
    trial_server: ServerClient, folder: Path, kind: str, *, differs: bool
) -> None:
    """It computes in bf16, whose rounding is no difference."""
    text = PLACEHOLDERS.replace("int(sys.argv[2])", "int(sys.argv[2]) // int(sys.argv[1])")
    (folder / "loop.py").write_text(text.replace("out = net(x)", "with torch.autocast('cpu'): out = net(x)"))
    workload, model = trial_server.prepared(of_command("python", "loop.py", "{batch}", "16", kind))
    assert model.interface.fixed.effective_batch == 16
    own = Arm("bf16", optim=OWN_OPTIM)
    splits = Candidate(own, 16, 1), Candidate(own, 8, 2)
    assert split_differs(trial_server, workload, *splits, has_fixed_split=True) is differs
