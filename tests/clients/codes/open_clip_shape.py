"""Train in the shape of open_clip: two towers, in-batch negatives; accumulation computes each batch twice."""

import argparse
import contextlib

import torch
import torch.nn.functional as functional
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16, help="Batch size per GPU.")
parser.add_argument("--accum-freq", type=int, default=1, help="Update the model every --acum-freq steps.")
parser.add_argument("--precision", choices=["amp", "amp_bf16", "bf16", "fp32"], default="fp32")
parser.add_argument("--grad-checkpointing", default=False, action="store_true")
parser.add_argument("--epochs", type=int, default=2)
args = parser.parse_args()


class CLIP(nn.Module):
    def __init__(self):
        super().__init__()
        self.visual = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 32))
        self.text = nn.EmbeddingBag(64, 32)
        self.logit_scale = nn.Parameter(torch.tensor(2.6))

    def encode_image(self, image):
        visual = self.visual
        if args.grad_checkpointing:
            return torch.utils.checkpoint.checkpoint(visual, image, use_reentrant=False)
        return visual(image)

    def forward(self, image, text):
        return {
            "image_features": functional.normalize(self.encode_image(image).float(), dim=-1),
            "text_features": functional.normalize(self.text(text).float(), dim=-1),
            "logit_scale": self.logit_scale.exp(),
        }


def clip_loss(image_features, text_features, logit_scale):
    logits = logit_scale * image_features @ text_features.T
    labels = torch.arange(logits.shape[0])
    return (functional.cross_entropy(logits, labels) + functional.cross_entropy(logits.T, labels)) / 2


cast = {"amp": torch.float16, "amp_bf16": torch.bfloat16}.get(args.precision)
autocast = (lambda: torch.autocast("cpu", cast)) if cast else contextlib.nullcontext
model = CLIP()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for epoch in range(args.epochs):
    images_kept, texts_kept, features = [], [], {}
    for i in range(3200 // args.batch_size):
        images, texts = torch.randn(args.batch_size, 3, 16, 16), torch.randint(0, 64, (args.batch_size, 8))
        if args.accum_freq == 1:
            optimizer.zero_grad()
            with autocast():
                total_loss = clip_loss(**model(images, texts))
            total_loss.backward()
        else:
            with torch.no_grad(), autocast():
                out = model(images, texts)
                scale = out.pop("logit_scale")
                for key, value in out.items():
                    features.setdefault(key, []).append(value)
            images_kept.append(images)
            texts_kept.append(texts)
            if (i + 1) % args.accum_freq > 0:
                continue
            optimizer.zero_grad()
            for j in range(args.accum_freq):
                with autocast():
                    out = model(images_kept[j], texts_kept[j])
                    scale = out.pop("logit_scale")
                    inputs = {k: torch.cat([*v[:j], out[k], *v[j + 1 :]]) for k, v in features.items()}
                    total_loss = clip_loss(**inputs, logit_scale=scale)
                total_loss.backward()
            images_kept, texts_kept, features = [], [], {}
        optimizer.step()
        with torch.no_grad():
            model.logit_scale.clamp_(0, 4.6)
        print(f"Train Epoch: {epoch} [{i}] Loss: {total_loss.item():.3f}")
