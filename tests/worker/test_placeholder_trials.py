"""Trials of scripts that are told their settings by placeholders, whatever their loop is, on the CPU."""

import dataclasses
import functools
import shlex
from pathlib import Path
from typing import Any

import pytest
from server_client import ServerClient, of_command

from autotune.core.candidate import Arm, Candidate
from autotune.core.code_interface import Fixed
from autotune.core.inspection import ModelFacts
from autotune.core.training_source import find_script
from autotune.core.workload import Workload

# A loop in which nearly everything can be asked for.
LOOP = """
import argparse, json, os, torch
from torch.utils.checkpoint import checkpoint
p = argparse.ArgumentParser()
p.add_argument("-b", "--batch-size", type=int, default=int(os.environ.get("BATCH", 3)))
p.add_argument("--accum", type=int, default=1)
p.add_argument("--total", type=int, help="samples of a step, from which the accumulation follows")
p.add_argument("--total-tokens", type=int)
p.add_argument("--dtype", default="float32")
p.add_argument("--ckpt", action="store_true")
p.add_argument("--steps", type=int, default=60)
p.add_argument("--config")
shapes = "plain named flat rows each graphs gan wgan two parts teacher"
p.add_argument("--shape", default="plain", choices=shapes.split())
p.add_argument("--evaluate-every", type=int, default=0)
p.add_argument("--save-every", type=int, default=0)
p.add_argument("--compile", action="store_true")
p.add_argument("--double", action="store_true", help="take twice the batch that was asked for, with accumulation")
p.add_argument("--freeze", action="store_true")
p.add_argument("--casts", action="store_true", help="each layer casts by itself")
p.add_argument("--weights", action="store_true", help="weights have the dtype, without an autocast")
p.add_argument("--multiple", type=int, default=1)
args = p.parse_args()
assert args.batch_size % args.multiple == 0
if args.config:
    vars(args).update(json.load(open(args.config))["training"])
batch, accum = args.batch_size, args.accum
if args.total_tokens:
    assert args.total_tokens % (batch * 8) == 0, "total tokens must be a multiple of a micro-batch"
    args.total = args.total_tokens // 8
if args.total:
    accum = args.total // batch
if args.double and accum > 1:
    batch *= 2

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Embedding(16, 8), torch.nn.Linear(8, 16)
    def forward(self, ids, scale=1.0, owner=None):
        ids = torch.stack([row["ids"] for row in ids]) if isinstance(ids, list) else ids
        x = self.a(ids) * scale
        if args.casts:
            dtype = getattr(torch, args.dtype)
            return torch.nn.functional.linear(x.to(dtype), self.b.weight.to(dtype)).float()
        if owner is not None:
            return torch.zeros(int(owner.max()) + 1, 16).index_add(0, owner, self.b(x))
        return checkpoint(self.b, x, use_reentrant=False) if args.ckpt else self.b(x)

def loss_of(net, ids):
    if args.shape == "named":
        return net(ids=ids).float().logsumexp(-1).mean()
    if args.shape == "rows":
        return net([{"ids": row} for row in ids]).float().logsumexp(-1).mean()
    if args.shape == "each":
        return sum(net(row[None]).logsumexp(-1).mean() for row in ids) / len(ids)
    if args.shape == "graphs":
        sizes = torch.randint(3, 9, (len(ids),))
        owner = torch.arange(len(ids)).repeat_interleave(sizes)
        return net(torch.cat([row[:size] for row, size in zip(ids, sizes)]), owner=owner).logsumexp(-1).mean()
    return net(ids.reshape(-1) if args.shape == "flat" else ids).float().logsumexp(-1).mean()

# With float32 as well: on a GPU such an autocast stays on. On a CPU, torch turns one off that is made with it.
cast = torch.autocast("cpu", enabled=not args.casts and not args.weights)
cast.fast_dtype = getattr(torch, args.dtype)
net, other = Net(), Net()
if args.weights:
    net.to(getattr(torch, args.dtype))
if args.freeze:
    net.requires_grad_(False)
    other.b.requires_grad_(False)
first = torch.optim.SGD((other if args.freeze else net).parameters(), 0.01)
second = torch.optim.AdamW(other.parameters(), 0.01)
if args.compile:
    net = torch.compile(net, backend="eager")
new = lambda: torch.randint(16, (batch, 8))
if args.shape == "teacher":
    with torch.no_grad():
        (net if batch in (2, 4) else other)(new())  # which is first is chance
for step in range(args.steps):
    if args.evaluate_every and step % args.evaluate_every == 0:
        net.eval()
        with torch.no_grad():
            [net(torch.randint(16, (5, 8))) for _ in range(3)]
        net.train()
    for _ in range(accum):
        with cast:
            if args.shape == "teacher":
                with torch.no_grad():
                    other(new())
            loss = loss_of(net, new()) if not args.freeze else torch.ones(1, requires_grad=True).sum()
            if args.shape == "parts":
                loss = loss + other(new()).float().mean()
        (loss / accum).backward()
    if args.shape in ("gan", "wgan"):
        first.step(), first.zero_grad()
        if args.shape == "gan" or step % 3 == 2:
            for _ in range(accum):
                (loss_of(other, new()) / accum).backward()
            second.step(), second.zero_grad()
            if step == 0:
                net(torch.zeros(batch, 8).long())  # to look at
    else:
        first.step(), first.zero_grad()
        if args.shape == "two":
            second.step(), second.zero_grad()
    if args.save_every and step % args.save_every == 0:
        torch.save(net.state_dict(), "saved.pt")
    print(f"step {step} of {batch} x {accum}", flush=True)
"""
OPTIONS = "-b {batch} --accum {accumulation}"
WIDER = functools.partial(pytest.param, marks=pytest.mark.whole)
"""For what ``make test`` has a sample of."""
ALL = OPTIONS + " --dtype '{precision:fp32=float32,bf16=bfloat16}' '{checkpointing:on=--ckpt}'"


@pytest.fixture(autouse=True)
def folder(folder: Path) -> Path:
    """A working folder with the loop in it."""
    (folder / "loop.py").write_text(LOOP)
    return folder


def workload(options: str) -> Workload:
    words = shlex.split(options)
    at = words.index("loop.py") if "loop.py" in words else 0
    before, after = (words[:at], words[at + 1 :]) if "loop.py" in words else ([], words)
    return of_command(*before, "python", "loop.py", *after)


def inspected(trial_server: ServerClient, options: str) -> tuple[Workload, ModelFacts]:
    """The workload of some options with the interface that its inspection found."""
    return trial_server.prepared(workload(options))


def own_batch(model: ModelFacts) -> tuple[Any, ...]:
    own = model.own
    return () if own is None else (own.per_device_train_batch_size, own.gradient_accumulation_steps, own.arm.precision)


def test_a_loop_does_what_it_is_told(trial_server: ServerClient, folder: Path) -> None:
    told, model = inspected(trial_server, ALL)
    assert model.interface.searched == ("batch", "accumulation", "precision", "checkpointing")
    assert (model.class_name, model.parameters, model.always_checkpoints) == ("Net", 16 * 8 + 8 * 16 + 16, False)
    assert own_batch(model) == (3, 1, "fp32")
    answer = trial_server.trial(told, Candidate(Arm("bf16", gradient_checkpointing=True), 6, 4))
    measured = answer.completed.measurement
    assert "step 1 of 6 x 4" in answer.log
    assert measured.micro_steps_run == 4
    assert measured.samples_per_second == pytest.approx(24 / measured.step_seconds)
    unmodified = trial_server.trial(told, Candidate(Arm(), 3, 1), unmodified=True)
    assert unmodified.completed.measurement.micro_steps_run == 1
    assert "step 1 of 3 x 1" in unmodified.log
    assert [path.name for path in folder.iterdir()] == ["loop.py"]


@pytest.mark.parametrize(
    ("options", "searched", "fixed", "own"),
    [
        # By name, and all tokens in one dimension.
        (OPTIONS + " --shape named", ["batch", "accumulation"], {}, (3, 1, "fp32")),
        WIDER(OPTIONS + " --shape flat", ["batch", "accumulation"], {}, (3, 1, "fp32")),
        # Two optimizers in one step, in turn, and one that steps more seldom; a teacher; a model in two parts.
        WIDER(OPTIONS + " --shape two", ["batch", "accumulation"], {}, (3, 1, "fp32")),
        (OPTIONS + " --shape gan", ["batch", "accumulation"], {}, (3, 1, "fp32")),
        WIDER(OPTIONS + " --shape wgan", ["batch", "accumulation"], {}, (3, 1, "fp32")),
        WIDER(OPTIONS + " --shape rows", ["batch", "accumulation"], {}, (3, 1, "fp32")),
        # A call for each sample; samples of many sizes in one tensor, that come out one by one.
        (OPTIONS + " --shape each", ["batch", "accumulation"], {}, (3, 1, "fp32")),
        WIDER(OPTIONS + " --shape graphs", ["batch", "accumulation"], {}, (3, 1, "fp32")),
        (OPTIONS + " --shape teacher", ["batch", "accumulation"], {}, (3, 1, "fp32")),
        (OPTIONS + " --shape parts --compile", ["batch", "accumulation"], {}, (3, 1, "fp32")),
        # Accumulation from a total: one that it is told, one in tokens, and one of its own.
        ("-b {batch} --total {effective_batch}", ["batch", "accumulation"], {}, (3, 1, "fp32")),
        ("-b {batch} --total-tokens {effective_tokens}", ["batch", "accumulation"], {}, (3, 1, "fp32")),
        WIDER("-b {batch} --total 24", ["batch", "accumulation"], {"effective_batch": 24}, (3, 8, "fp32")),
        # One of the two alone.
        ("-b {batch} --accum 5", ["batch"], {"accumulation": 5}, (3, 5, "fp32")),
        ("-b 6 --accum {accumulation}", ["accumulation"], {"batch": 6}, (6, 1, "fp32")),
        ("'{checkpointing:on=--ckpt}' -b 6 --dtype bfloat16", ["checkpointing"], {"accumulation": 1, "batch": 6},
         (6, 1, "bf16")),
        # By casts of the layers' own.
        ("-b {batch} --casts --dtype '{precision:bf16=bfloat16,fp32=float32}'", ["batch", "precision"],
         {"accumulation": 1}, (3, 1, "fp32")),
        ("-b {batch} --weights --dtype '{precision:fp32=float32,bf16=bfloat16}'", ["batch", "precision"],
         {"accumulation": 1}, (3, 1, "fp32")),
        ("-b {batch} --casts --dtype bfloat16", ["batch"], {"accumulation": 1}, (3, 1, "bf16")),
        # In the environment.
        ("BATCH={batch} loop.py", ["batch"], {"accumulation": 1}, (3, 1, "fp32")),
    ],
)  # fmt: skip
def test_what_is_obeyed_is_seen_in_any_loop(
    trial_server: ServerClient, options: str, searched: list[str], fixed: dict[str, int], own: tuple[Any, ...]
) -> None:
    told, model = inspected(trial_server, options)
    assert (model.interface.searched, model.interface.fixed) == (tuple(searched), Fixed(**fixed))
    assert model.interface.compiles == ("--compile" in options)
    assert model.interface.casts_weights == ("--weights" in options)
    assert own_batch(model) == own
    batch = 8 if "batch" in searched else fixed["batch"]
    accumulation = fixed.get("accumulation") or fixed.get("effective_batch", 2 * batch) // batch
    answer = trial_server.trial(told, Candidate(Arm(own[2]), batch, accumulation))
    measured = answer.completed.measurement
    assert f"step 1 of {batch} x {accumulation}\n" in answer.log
    assert measured.samples_per_second == pytest.approx(batch * accumulation / measured.step_seconds)


def test_what_takes_multiples_alone_is_asked_for_larger_batches(trial_server: ServerClient) -> None:
    assert inspected(trial_server, "-b {batch} --multiple 8")[1].interface.searched == ("batch",)


def test_a_configuration_file_is_filled(trial_server: ServerClient, folder: Path) -> None:
    text = '{"training": {"batch_size": {batch}, "accum": {accumulation}, "ckpt": {checkpointing}}}'
    (folder / "settings.json").write_text(text)
    told, model = inspected(trial_server, "--config settings.json")
    assert model.interface.searched == ("batch", "accumulation", "checkpointing")
    assert model.own is None
    assert "step 1 of 8 x 2\n" in trial_server.trial(told, Candidate(Arm(), 8, 2)).log
    assert (folder / "settings.json").read_text() == text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--save-every 9{batch}", "ignores {batch}: with 4 and 2 its model was given 3 × 8 and 3 × 8"),
        ("-b {batch} --steps {accumulation}0", "ignores {accumulation}: it made 1 and 1 backward passes"),
        ("-b {batch} --save-every '{precision:fp32=80,bf16=90}'", "ignores {precision}: told bf16"),
        ("-b {batch} '{checkpointing:on=--save-every 90}'", "ignores {checkpointing}: told on, it recomputed nothing"),
        ("--bs {batch}", "left with exit code 2: loop.py: error: unrecognized arguments: --bs 4"),
        ("-b {batch} --shape '{precision:fp32=plain,bf16=round}'", "argument --shape: invalid choice: 'round'"),
        ("-b {batch}x", "left with exit code 2: loop.py: error: argument -b/--batch-size: invalid int value: '4x'"),
        ("-b {batch} --multiple 100", "raised AssertionError: assert args.batch_size % args.multiple == 0"),
        ("-b {batch} --total-tokens 100", "raised AssertionError: total tokens must be a multiple of a micro-batch"),
        ("-b {batch} --steps 1", "ended before the second step of its optimizer"),
        ("-b {batch} --freeze", "steps an optimizer whose parameters get no gradients"),
    ],
)
def test_what_is_not_obeyed_is_refused_with_what_was_seen(
    trial_server: ServerClient, options: str, message: str
) -> None:
    problem = trial_server.inspection(workload(options)).problem
    assert message in problem.message
    assert problem.hint


NEXT_STEPS = """
import argparse, torch
from torch.utils.data import DataLoader
p = argparse.ArgumentParser()
p.add_argument("-b", "--batch-size", type=int, default=3)
p.add_argument("--epochs", type=int, default=3)
p.add_argument("--ends", type=int)
args = p.parse_args()
if args.ends:
    raise SystemExit
net = torch.nn.Linear(8, 1)
opt = torch.optim.SGD(net.parameters(), 0.01)
for x in DataLoader(torch.randn(64, 8), batch_size=args.batch_size):
    net(x).square().mean().backward()
    opt.step()
"""


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ("--epochs {batch}", "put {batch} where the script takes the samples of one forward pass"),
        ("-b {batch} --ends 1", "name the script that trains with torch"),
        ("-b {batch} --epochs none", "it was started with: -b 4 --epochs none"),
    ],
)
def test_a_refusal_says_what_to_change(trial_server: ServerClient, folder: Path, options: str, hint: str) -> None:
    (folder / "loop.py").write_text(NEXT_STEPS)
    assert hint in trial_server.inspection(workload(options)).problem.hint


def test_what_decides_the_backward_passes_is_no_batch(trial_server: ServerClient) -> None:
    hint = "it makes as many backward passes as {batch} says: put {accumulation} there"
    assert trial_server.inspection(workload("--accum {batch}")).problem.hint == hint


def test_no_batch_is_larger_than_the_data(trial_server: ServerClient, folder: Path) -> None:
    (folder / "loop.py").write_text(NEXT_STEPS)
    assert inspected(trial_server, "-b {batch}")[1].samples == 64
    batches = "DataLoader(torch.randn(64, 8), batch_sampler=torch.arange(64).view(-1, args.batch_size).tolist())"
    (folder / "loop.py").write_text(NEXT_STEPS.replace("DataLoader(torch", f"{batches} or DataLoader(torch"))
    assert inspected(trial_server, "-b {batch} --epochs 4")[1].samples is None


def test_a_batch_of_most_of_the_data_is_measured_with_the_evaluation_of_each_epoch(
    trial_server: ServerClient, folder: Path
) -> None:
    """An epoch of it is a whole step and a short one."""
    (folder / "loop.py").write_text("""
import sys, torch
net = torch.nn.Linear(8, 1)
opt = torch.optim.SGD(net.parameters(), 0.01)
data = torch.randn(64, 8)
for epoch in range(99):
    for part in data.split(int(sys.argv[1])):
        net(part).square().mean().backward()
        opt.step(), opt.zero_grad()
    with torch.no_grad():
        net(data)
""")
    told, _ = inspected(trial_server, "loop.py {batch}")
    assert trial_server.trial(told, Candidate(Arm(), 40, 1)).completed.measurement.step_seconds > 0


# The loss of the whole batch is differentiated to the outputs, and each part of the model's computed again.
CACHED = """
import sys, torch
batch, part = int(sys.argv[1]), int(sys.argv[2])
net = torch.nn.Linear(8, 4)
opt = torch.optim.SGD(net.parameters(), 0.01)
for step in range(60):
    x = torch.randn(batch, 8)
    with torch.no_grad():
        kept = torch.cat([net(each) for each in x.split(part)])
    kept.requires_grad_()
    (kept @ kept.T).logsumexp(-1).mean().backward()
    for each, gradient in zip(x.split(part), kept.grad.split(part)):
        net(each).backward(gradient)
    opt.step(), opt.zero_grad()
"""


@pytest.mark.parametrize(
    ("options", "searched", "tried"),
    [
        ("{batch} 4", ("batch",), Candidate(Arm(), 16, 1)),
        ("{effective_batch} {batch}", ("batch", "accumulation"), Candidate(Arm(), 4, 4)),
        ("16 {batch}", ("batch", "accumulation"), Candidate(Arm(), 8, 2)),
    ],
)
def test_gradients_of_outputs_may_be_kept_and_passed_on(
    trial_server: ServerClient, folder: Path, options: str, searched: tuple[str, ...], tried: Candidate
) -> None:
    (folder / "loop.py").write_text(CACHED)
    told, model = inspected(trial_server, f"loop.py {options}")
    assert model.interface.searched == searched
    measured = trial_server.trial(told, tried).completed.measurement
    assert measured.samples_per_second == pytest.approx(16 / measured.step_seconds)


UPDATES = """
import sys, torch
batch, kind = int(sys.argv[1]), sys.argv[2]
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
weights = list(net.parameters())
opt = torch.optim.LBFGS(weights, max_iter=4) if kind == "lbfgs" else torch.optim.SGD(weights, 0.01)
owned = {weight: torch.optim.SGD([weight], 0.01) for weight in weights if kind == "within"}
def update(weight):
    owned[weight].step()
    owned[weight].zero_grad()
for weight in owned:
    weight.register_post_accumulate_grad_hook(update)
for step in range(60):
    x = torch.randn(batch, 8)
    def closure():
        opt.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        return loss
    if kind in ("lbfgs", "closure"):
        opt.step(closure)
    elif kind == "within":
        net(x).square().mean().backward()
    elif kind in ("by hand", "cleared"):
        net.zero_grad() if kind == "cleared" else None
        closure() if kind == "by hand" else net(x).square().mean().backward()
        with torch.no_grad():
            [weight.sub_(0.01 * weight.grad) for weight in weights]
    else:
        for weight, gradient in zip(weights, torch.autograd.grad(net(x).square().mean(), weights)):
            weight.grad = gradient
        opt.step()
"""


@pytest.mark.parametrize("kind", ["closure", "within", "cleared"])
def test_updates_are_made_around_and_within_the_backward_pass_and_by_hand(
    trial_server: ServerClient, folder: Path, kind: str
) -> None:
    (folder / "loop.py").write_text(UPDATES)
    told, _ = inspected(trial_server, f"loop.py {{batch}} {kind}")
    assert trial_server.trial(told, Candidate(Arm(), 8, 1)).completed.measurement.step_seconds > 0


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("lbfgs", "LBFGS of loop.py makes 4 backward passes in each of its steps"),
        ("'by hand'", "made 60 backward passes, and no optimizer of torch stepped"),
        ("grad", "computes its gradients without a backward pass, as torch.autograd.grad does"),
    ],
)
def test_updates_whose_samples_cannot_be_told_are_refused(
    trial_server: ServerClient, folder: Path, kind: str, message: str
) -> None:
    (folder / "loop.py").write_text(UPDATES)
    problem = trial_server.inspection(workload(f"loop.py {{batch}} {kind}")).problem
    assert message in problem.message
    assert problem.hint


def test_a_process_group_of_one_is_there_for_what_torchrun_starts(trial_server: ServerClient, folder: Path) -> None:
    group = "import torch.distributed\ntorch.distributed.init_process_group('gloo')\n"
    text = LOOP.replace(
        "net, other = Net(), Net()", "net, other = torch.nn.parallel.DistributedDataParallel(Net()), Net()"
    )
    (folder / "loop.py").write_text(group + text)
    source = find_script(["torchrun", "--standalone", "loop.py", *shlex.split(OPTIONS)])
    model = trial_server.model(Workload.of_source(source))
    assert (model.class_name, model.interface.searched) == ("Net", ("batch", "accumulation"))


def test_a_candidate_that_is_trained_otherwise_is_refused(trial_server: ServerClient) -> None:
    """It takes other batches than it was told where it accumulates; the two sets of values showed nothing of that."""
    told, _ = inspected(trial_server, OPTIONS)
    source = told.source
    other = dataclasses.replace(source, argv=(*source.argv, "--double"))
    outcome = trial_server.trial(Workload.of_source(other), Candidate(Arm(), 8, 2)).failed
    assert outcome.message == "loop.py puts 32 samples into Net for a step of its optimizer, and 8 × 2 makes 16"
    fixed = dataclasses.replace(source, argv=("-b", "{batch}"))
    outcome = trial_server.trial(Workload.of_source(fixed), Candidate(Arm(), 8, 2)).failed
    assert "makes 1 backward passes for a step of its optimizer, and 8 × 2 makes 2" in outcome.message


def test_steps_with_an_evaluation_are_not_counted(trial_server: ServerClient) -> None:
    """Every second step evaluates, every third saves; as many are measured, and the data may end then."""
    told, _ = inspected(trial_server, OPTIONS + " --evaluate-every 2 --save-every 3 --steps 30")
    answer = trial_server.trial(told, Candidate(Arm(), 4, 2))
    measured = answer.completed.measurement
    assert answer.log.count("step ") + 1 >= 2 * len(measured.step_seconds_each)
    assert measured.saving_seconds is None
    assert measured.evaluation_seconds is not None


def test_what_each_step_does_is_no_interruption(trial_server: ServerClient, folder: Path) -> None:
    """Each step saves, and evaluates on more than the one before."""
    (folder / "loop.py").write_text(LOOP.replace("for _ in range(3)]", "for _ in range(step)]"))
    told, _ = inspected(trial_server, OPTIONS + " --evaluate-every 1 --save-every 1")
    answer = trial_server.trial(told, Candidate(Arm(), 4, 2))
    measured = answer.completed.measurement
    assert answer.log.count("step ") < 20
    assert measured.saving_seconds
    assert not (folder / "saved.pt").exists()


def test_a_loop_whose_optimizer_never_steps_is_refused(trial_server: ServerClient, folder: Path) -> None:
    (folder / "loop.py").write_text(LOOP.replace("        first.step(),", "        accum < 8 and first.step(),"))
    told, _ = inspected(trial_server, OPTIONS)
    outcome = trial_server.trial(told, Candidate(Arm(), 4, 8)).failed
    assert outcome.message == "loop.py made 321 backward passes without a step of its optimizer"


def test_a_loop_that_catches_out_of_memory_and_goes_on_is_refused(trial_server: ServerClient, folder: Path) -> None:
    """Backward passes and optimizer steps are made as ever, and nothing comes back to the model."""
    text = LOOP.replace(
        "            loss = loss_of(net, new()) if",
        "            if batch > 6:\n"
        "                try:\n"
        "                    raise torch.OutOfMemoryError('CUDA out of memory')\n"
        "                except torch.OutOfMemoryError:\n"
        "                    net(new())\n"
        "                    loss = torch.zeros(1, requires_grad=True).sum()\n"
        "            else:\n"
        "              loss = loss_of(net, new()) if",
    )
    (folder / "loop.py").write_text(text)
    told, _ = inspected(trial_server, OPTIONS)
    assert trial_server.trial(told, Candidate(Arm(), 6, 2)).completed.measurement.step_seconds > 0
    outcome = trial_server.trial(told, Candidate(Arm(), 8, 2)).failed
    assert "loop.py steps an optimizer whose parameters get no gradients" in outcome.message
