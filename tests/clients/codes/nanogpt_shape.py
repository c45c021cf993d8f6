"""Train a tiny GPT in the shape of nanoGPT's train.py: settings are globals, which a file and --key=value replace."""

import contextlib
import math
import sys
import time

import torch
import torch.nn.functional as functional
from torch import nn

out_dir = "out-tiny"
eval_interval = 40
eval_iters = 4
gradient_accumulation_steps = 5
batch_size = 3
block_size = 16
n_embd = 32
learning_rate = 1e-3
max_iters = 400
dtype = "float32"
compile = False
for word in sys.argv[1:]:
    if word.startswith("--"):
        key, value = word[2:].split("=")
        assert key in globals(), f"Unknown config key: {key}"
        kind = type(globals()[key])
        globals()[key] = value == "True" if kind is bool else kind(value)
    else:
        exec(open(word).read())  # noqa: SIM115
torch.manual_seed(1337)
data = torch.randint(0, 64, (4096,))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(64, n_embd)
        self.wpe = nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList(nn.TransformerEncoderLayer(n_embd, 2, 64, 0.0, batch_first=True) for _ in range(2))
        self.lm_head = nn.Linear(n_embd, 64, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(x)
        return logits, functional.cross_entropy(logits.view(-1, 64), targets.view(-1))


def get_batch():
    at = torch.randint(len(data) - block_size - 1, (batch_size,))
    x, y = (torch.stack([data[i + by : i + by + block_size] for i in at]) for by in (0, 1))
    return x, y


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = [model(*get_batch())[1].item() for _ in range(eval_iters)]
    model.train()
    return sum(losses) / len(losses)


ptdtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
ctx = contextlib.nullcontext() if dtype == "float32" else torch.amp.autocast("cpu", dtype=ptdtype)
scaler = torch.amp.GradScaler("cpu", enabled=dtype == "float16")
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
if compile:
    model = torch.compile(model)
X, Y = get_batch()
t0 = time.time()
for iter_num in range(max_iters + 1):
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * 0.5 * (1 + math.cos(math.pi * iter_num / max_iters))
    if iter_num % eval_interval == 0:
        print(f"step {iter_num}: val loss {estimate_loss():.4f}")
    for _ in range(gradient_accumulation_steps):
        with ctx:
            logits, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        X, Y = get_batch()
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    print(f"iter {iter_num}: loss {loss.item() * gradient_accumulation_steps:.4f}, time {time.time() - t0:.2f}")
