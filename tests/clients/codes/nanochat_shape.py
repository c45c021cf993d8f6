"""Train tokens in the shape of nanochat's base_train: Muon beside AdamW, accumulation from a total of tokens."""

import argparse

import torch
import torch.nn.functional as functional
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--depth", type=int, default=2)
parser.add_argument("--max-seq-len", type=int, default=16)
parser.add_argument("--device-batch-size", type=int, default=4, help="per-device batch size")
parser.add_argument("--total-batch-size", type=int, default=128, help="total batch size in tokens")
parser.add_argument("--num-iterations", type=int, default=200)
parser.add_argument("--eval-every", type=int, default=50)
parser.add_argument("--no-compile", action="store_true")
args = parser.parse_args()


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                g = p.grad / (p.grad.norm() + 1e-7)
                for _ in range(5):
                    g = 1.5 * g - 0.5 * g @ g.T @ g
                p.add_(g, alpha=-group["lr"])


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(64, 32)
        self.h = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(args.depth))
        self.lm_head = nn.Linear(32, 64, bias=False)

    def forward(self, idx, targets=None):
        x = self.wte(idx)
        for block in self.h:
            x = x + functional.relu(block(functional.rms_norm(x, (32,)))).square()
        logits = self.lm_head(x).float()
        return functional.cross_entropy(logits.view(-1, 64), targets.reshape(-1))

    def setup_optimizers(self):
        adamw = torch.optim.AdamW([*self.wte.parameters(), *self.lm_head.parameters()], lr=1e-3)
        return [adamw, Muon(self.h.parameters())]


def loader():
    while True:
        tokens = torch.randint(0, 64, (args.device_batch_size, args.max_seq_len + 1))
        yield tokens[:, :-1], tokens[:, 1:]


tokens_per_fwdbwd = args.device_batch_size * args.max_seq_len
assert args.total_batch_size % tokens_per_fwdbwd == 0
grad_accum_steps = args.total_batch_size // tokens_per_fwdbwd
print(f"Total batch size {args.total_batch_size} => gradient accumulation steps: {grad_accum_steps}")
orig_model = GPT()
model = orig_model if args.no_compile else torch.compile(orig_model, dynamic=False, backend="eager")
optimizers = orig_model.setup_optimizers()
train_loader = loader()
x, y = next(train_loader)
for step in range(args.num_iterations + 1):
    if step % args.eval_every == 0:
        model.eval()
        with torch.no_grad():
            val_loss = sum(model(*next(train_loader)).item() for _ in range(2)) / 2
        print(f"Step {step:05d} | Validation loss: {val_loss:.4f}")
        model.train()
    for _ in range(grad_accum_steps):
        with torch.amp.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x, y)
        (loss / grad_accum_steps).backward()
        x, y = next(train_loader)
    for opt in optimizers:
        opt.step()
    model.zero_grad(set_to_none=True)
    print(f"step {step:05d} | loss: {loss.item():.6f}")
