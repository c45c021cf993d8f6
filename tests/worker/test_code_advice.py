"""A training loop that is not measured by itself is refused with what fits it, as words that can be pasted."""

import shlex
from pathlib import Path

import pytest
from server_client import ServerClient

from autotune.core.training_source import find_script
from autotune.core.workload import Workload

PLAIN = "LOOP\ntrain(4, 1)\n"
LOOP = """
import torch
def train(batch, accumulation):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(60):
        for _ in range(accumulation):
            model(torch.ones(batch, 2)).mean().backward()
        optimizer.step()
"""
ARGPARSE = """
import argparse
p = argparse.ArgumentParser()
p.add_argument("-b", "--batch-size", type=int, default=3)
p.add_argument("--grad-accum-steps", type=int, default=1)
p.add_argument("--amp-dtype", choices=["float32", "bfloat16"], default="float32")
p.add_argument("--grad-checkpointing", action="store_true")
p.add_argument("--name", default="a")
args = p.parse_args()
from torch.utils.checkpoint import checkpoint
LOOP
train(args.batch_size, args.grad_accum_steps)
"""
DOTTED = """
import argparse
p = argparse.ArgumentParser()
p.add_argument("--train.micro_batch_size", type=int, default=1)
p.add_argument("--train.global_batch_size", type=int, default=2)
p.add_argument("--precision", default="32-true")
args = vars(p.parse_args())
LOOP
micro = args["train.micro_batch_size"]
train(micro, args["train.global_batch_size"] // micro)
"""
AMP = """
import argparse
p = argparse.ArgumentParser()
p.add_argument("-b", "--batch-size", type=int, default=3)
p.add_argument("--amp", action="store_true")
p.add_argument("--amp-dtype", default="float16")
args = p.parse_args()
LOOP
train(args.batch_size, 1)
"""
CONFIGURATOR = """
import sys
batch_size, gradient_accumulation_steps, dtype = 3, 2, "float32"
for word in sys.argv[1:]:
    key, value = word[2:].split("=")
    globals()[key] = type(globals()[key])(value)
LOOP
train(batch_size, gradient_accumulation_steps)
"""
OTHER_NAMES = """
import argparse
p = argparse.ArgumentParser()
p.add_argument("epochs", type=int)
p.add_argument("--name", default="a")
p.add_argument("--width", type=int, default=5)
p.add_argument("--rows", type=int, default=3)
p.add_argument("--updates", type=int, default=1)
args = p.parse_args()
import torch
rows = torch.ones(args.rows, 2)
LOOP
train(args.rows, args.updates)
"""
CLICK = """
import click
@click.command()
@click.argument("batch_size", default=3)
@click.option("--size", "bs", default=3, help="Batch size.")
@click.option("--mixed-precision", default="fp32")
@click.option("--amp", is_flag=True)
def main(batch_size, bs, mixed_precision, amp):
    train(bs, 1)
LOOP
main()
"""
BUDGET = """
import argparse
p = argparse.ArgumentParser()
p.add_argument("--max-tokens", type=int, default=64)
p.add_argument("--update-freq", type=int, default=1)
args = p.parse_args()
LOOP
train(max(1, args.max_tokens // 16), args.update_freq)
"""
CLICK_BUDGET = """
import click
@click.command()
@click.option("--max-tokens", default=64)
def main(max_tokens):
    train(max_tokens // 16, 1)
LOOP
main()
"""
REST = """
import argparse
p = argparse.ArgumentParser()
p.add_argument("--config")
p.add_argument("opts", nargs=argparse.REMAINDER)
args = p.parse_args()
class Node(dict):
    def merge_from_list(self, words):
        self["SOLVER"]["IMS_PER_BATCH"] = int(words[words.index("SOLVER.IMS_PER_BATCH") + 1])
cfg = Node(TEST={"IMS_PER_BATCH": 8}, SOLVER={"IMS_PER_BATCH": 3}, SEED=1)
if "SOLVER.IMS_PER_BATCH" in args.opts:
    cfg.merge_from_list(args.opts)
LOOP
train(cfg["SOLVER"]["IMS_PER_BATCH"], 1)
"""
PAIRS = REST.replace("class Node(dict)", "class Node").replace("cfg = Node", "cfg = dict")
CONFIG = """
import sys
class Node:
    def __init__(self, **values):
        vars(self).update(values)
config = Node(seed=1, eval=Node(batch_size=8), trainer=Node(epochs=2, batch_size=3, betas=(0.9, 0.95), device=None))
given = dict(word.lstrip("-").split("=") for word in sys.argv[1:])
LOOP
train(int(given.get("trainer.batch_size", config.trainer.batch_size)), 1)
"""
ATTRIBUTES = """
import sys
class Node(dict):
    __getattr__ = dict.__getitem__
class Shop:
    def items(self, key):
        return key
config, shop = Node(batch_size=3), Shop()
given = dict(word.lstrip("-").split("=") for word in sys.argv[1:])
LOOP
train(int(given.get("batch_size", config.batch_size)), 1)
"""
HELP = """
import argparse
p = argparse.ArgumentParser()
p.add_argument("--n-val", type=int, default=3, help="validation batch size")
p.add_argument("--n-rand", type=int, default=3, help="batch size (random rays of a step)")
args = p.parse_args()
LOOP
train(args.n_rand, 1)
"""
TOTAL = """
import argparse
p = argparse.ArgumentParser()
p.add_argument("--eval.batch_size", type=int)
p.add_argument("--global-batch-size", type=int, default=3)
p.add_argument("--grad-accumulate-every", type=int, default=1)
args = p.parse_args()
LOOP
train(args.global_batch_size, args.grad_accumulate_every)
"""
WORDS = """
import sys
opts = dict(batch=3, epochs=2)
opts |= {name.lstrip("-"): int(value) for name, value in zip(sys.argv[1::2], sys.argv[2::2])}
LOOP
loader = torch.utils.data.DataLoader(range(8), batch_size=opts["batch"])
train(opts["batch"], 1)
"""
NUMBERS = """
import sys, torch
opts = dict(width=2, n=3, epochs=2)
opts |= {name: int(value) for name, value in (word.split("=") for word in sys.argv[1:])}
x = torch.ones(opts["n"], opts["width"])
LOOP
train(opts["n"], 1)
"""
VARIABLES = """
import os
LOOP
train(int(os.environ.get("DEVICE_BATCH", 3)), int(os.getenv("GRAD_ACCUM", 1)))
"""
CONSTANTS = """
text = '--batch_size=16'
BATCH_SIZE = 3  # of a step
VAL_BATCH_SIZE: int = 8
GRAD_ACCUM: int = 2
LOOP
train(BATCH_SIZE, GRAD_ACCUM)
"""
FILE = """
import sys
text = open(sys.argv[1]).read()
LOOP
train(3, 1)
"""
RANKED = """
import argparse, os
p = argparse.ArgumentParser()
p.add_argument("--batch-size", type=int, default=3)
args = p.parse_args()
rank = int(os.environ["RANK"])
LOOP
train(args.batch_size, 1)
"""
LOADER = "LOOP\nloader = torch.utils.data.DataLoader(range(8), batch_size=len('a b c'))\ntrain(5, 1)\n"
STEPS = """
import autotune, torch
def run(config):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in autotune.steps([torch.ones(config.per_device_batch_size, 2)]):
        model(batch).mean().backward()
        optimizer.step()
run(autotune.LoopConfig())
"""


def refused(trial_server: ServerClient, words: list[str]) -> str:
    """What to do next."""
    problem = trial_server.inspection(Workload.of_source(find_script(words))).problem
    assert problem.message.startswith("run.py trains in a loop of its own at run.py:")
    return problem.hint


@pytest.mark.parametrize(
    ("text", "given", "pasted"),
    [
        (
            ARGPARSE,
            "--name b --batch-size 7",
            "python run.py --name b --batch-size {batch} --grad-accum-steps {accumulation} "
            "'{checkpointing:on=--grad-checkpointing}' --amp-dtype '{precision:fp32=float32,bf16=bfloat16}'",
        ),
        (
            DOTTED,
            "--precision=32-true",
            "python run.py --precision '{precision:fp32=32-true,bf16=bf16-mixed}' --train.micro_batch_size {batch} "
            "--train.global_batch_size {effective_batch}",
        ),
        (AMP, "", "python run.py --batch-size {batch} '{precision:bf16=--amp --amp-dtype bfloat16}'"),
        (
            CONFIGURATOR,
            "",
            "python run.py --batch_size={batch} --gradient_accumulation_steps={accumulation} "
            "--dtype={precision:fp32=float32,bf16=bfloat16}",
        ),
        (OTHER_NAMES, "5 --rows 2 --name b", "python run.py 5 --rows {batch} --name b"),
        (CLICK, "--size 2", "python run.py --size {batch} --mixed-precision '{precision:fp32=fp32,bf16=bf16}'"),
        (REST, "", "python run.py SOLVER.IMS_PER_BATCH {batch}"),
        (REST, "SOLVER.IMS_PER_BATCH 2 SEED 2", "python run.py SOLVER.IMS_PER_BATCH {batch} SEED 2"),
        (PAIRS, "data.batch_size 2", "python run.py data.batch_size {batch}"),
        (HELP, "", "python run.py --n-rand {batch}"),
        (ATTRIBUTES, "", "python run.py --batch_size={batch}"),
        (CONFIG, "", "python run.py --trainer.batch_size={batch}"),
        (CONFIG, "seed=2", "python run.py seed=2 trainer.batch_size={batch}"),
        # As the parser of Hydra, which takes any words.
        (REST.replace("argparse.REMAINDER", "'*'"), "", "python run.py SOLVER.IMS_PER_BATCH {batch}"),
        (TOTAL, "", "python run.py --grad-accumulate-every {accumulation} --global-batch-size {batch}"),
        (WORDS, "-epochs 3", "python run.py -epochs 3 -batch {batch}"),
        (NUMBERS, "epochs=3", "python run.py epochs=3 n={batch}"),
        # As bindings of gin.
        (
            PLAIN,
            "--set=train.batch_size=8 --accum 2",
            "python run.py --set=train.batch_size={batch} --accum {accumulation}",
        ),
        (VARIABLES, "", "DEVICE_BATCH={batch} GRAD_ACCUM={accumulation} python run.py"),
        (CONSTANTS, "", "BATCH={batch} ACCUMULATION={accumulation} python run.py"),
    ],
)
def test_the_placeholders_that_fit_are_offered(
    trial_server: ServerClient, folder: Path, text: str, given: str, pasted: str
) -> None:
    (folder / "run.py").write_text(text.replace("LOOP", LOOP))
    hint = refused(trial_server, ["python", "run.py", *given.split()])
    command = hint.partition("-- ")[2].partition(" (see docs/how-to/own-script.md)")[0]
    assert shlex.split(command) == shlex.split(pasted)


@pytest.mark.parametrize(
    ("name", "text", "hint"),
    [
        # What follows a # is a comment in most formats.
        (
            "conf.json",
            '{"epochs": "# batch_size: 8",\n "val": {\n  "loader": {\n   "batch_size": 8}},\n'
            ' "train": {\n  "batch_size": 3}}',
            'conf.json:6 says "batch_size": 3: write "batch_size": {batch} there',
        ),
        (
            "conf.py",
            "val_loader = dict(workers=2, batch_size=8)\nloader = dict(workers=dict(test=2), batch_size=3)\n",
            "conf.py:2 says batch_size=3: write batch_size={batch} there",
        ),
        ("conf.ini", "[eval]\nbatch_size = 8\n[train]\nbatch_size = 3\n", "conf.ini:4 says batch_size = 3: write "),
        ("conf.gin", "eval.batch_size = 8\ntrain.batch_size = 3\n", "conf.gin:2 says train.batch_size = 3: write "),
        (
            "conf.yaml",
            "train_batch_size: 6\ntrain_micro_batch_size_per_gpu: 3\naccum_grad: 2\n",
            "conf.yaml:2 says train_micro_batch_size_per_gpu: 3 and conf.yaml:3 says accum_grad: 2 and conf.yaml:1 "
            "says train_batch_size: 6: write train_micro_batch_size_per_gpu: {batch} and accum_grad: {accumulation} "
            "and train_batch_size: {effective_batch} there",
        ),
    ],
)
def test_the_lines_of_a_configuration_file_are_named(
    trial_server: ServerClient, folder: Path, name: str, text: str, hint: str
) -> None:
    (folder / "run.py").write_text(FILE.replace("LOOP", LOOP))
    (folder / name).write_text(text)
    assert refused(trial_server, ["python", "run.py", name]).startswith(hint)


def test_what_asks_torchrun_for_its_rank_is_told_it_with_placeholders(trial_server: ServerClient, folder: Path) -> None:
    (folder / "run.py").write_text(RANKED.replace("LOOP", LOOP))
    problem = trial_server.inspection(Workload.of_source(find_script(["torchrun", "run.py"]))).problem
    assert problem.message.startswith("run.py asks what torchrun tells a process")
    assert "-- torchrun run.py --batch-size '{batch}'" in problem.hint
    pasted = find_script(["torchrun", "run.py", "--batch-size", "{batch}"])
    assert trial_server.model(Workload.of_source(pasted)).interface.searched == ("batch",)


@pytest.mark.parametrize(
    ("text", "where"),
    [(PLAIN, "its batch, from"), (LOADER, "its batch at run.py:11, where it is 5")],
)
def test_no_option_is_made_up(trial_server: ServerClient, folder: Path, text: str, where: str) -> None:
    (folder / "run.py").write_text(text.replace("LOOP", LOOP))
    hint = refused(trial_server, ["python", "run.py", "--lr", "1"])
    assert hint.startswith(f"have it take {where}")
    assert "--batch" not in hint
    assert "--loop run.py:train" in hint


def test_what_is_offered_for_constants_works(trial_server: ServerClient, folder: Path) -> None:
    text = CONSTANTS.replace("LOOP", LOOP)
    (folder / "run.py").write_text(text)
    hint = refused(trial_server, ["run.py"])
    said, written = hint.partition(" there, ")[0].split(": write ")
    assert said == "run.py:3 says BATCH_SIZE = 3 and run.py:5 says GRAD_ACCUM: int = 2"
    for line, changed in zip(("BATCH_SIZE = 3", "GRAD_ACCUM: int = 2"), written.split(" and "), strict=True):
        text = text.replace(line, changed)
    (folder / "run.py").write_text(f"import os\n{text}")
    model = trial_server.model(Workload.of_source(find_script(shlex.split(hint.split("-- ")[1].split(" (see")[0]))))
    assert model.interface.searched == ("batch", "accumulation")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BUDGET, []),
        (CLICK_BUDGET, []),
        (BUDGET, ["--max-tokens={batch}"]),
        (BUDGET, ["--max-tokens", "{effective_tokens:8}"]),
    ],
)
def test_a_budget_of_tokens_makes_no_steps_of_equally_many_samples(
    trial_server: ServerClient, folder: Path, text: str, words: list[str]
) -> None:
    (folder / "run.py").write_text(text.replace("LOOP", LOOP))
    problem = trial_server.inspection(Workload.of_source(find_script(["python", "run.py", *words]))).problem
    assert problem.hint.startswith("--max-tokens seems to limit the tokens of a batch, whose samples then vary,")
    assert "give the script an option for the samples of a batch, put {batch} there" in problem.hint


def test_what_is_offered_is_obeyed_where_it_can_be(trial_server: ServerClient, folder: Path) -> None:
    """The words are those that are refused, or searched, in turn; the loop knows its batch and accumulation."""
    (folder / "run.py").write_text(CONFIGURATOR.replace("LOOP", LOOP))
    command = refused(trial_server, ["run.py"]).partition("-- ")[2].partition(" (see")[0]
    words = [word for word in shlex.split(command) if "precision" not in word]
    model = trial_server.model(Workload.of_source(find_script(words)))
    assert model.interface.searched == ("batch", "accumulation")


def test_a_function_with_autotune_steps_is_named(trial_server: ServerClient, folder: Path) -> None:
    (folder / "run.py").write_text(STEPS)
    assert "--loop run.py:run (see docs/how-to/own-loop.md)" in refused(trial_server, ["run.py"])
