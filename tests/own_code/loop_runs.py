"""Loops with a validation, on accelerate: some die after their first steps."""

import sys

import torch
from accelerate import Accelerator
from rows_of_tokens import pad, samples
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForMaskedLM

# Other loops import this file for its model and loaders.
word = sys.argv[1] if len(sys.argv) > 1 else "healthy-epochs"
name, dies = word.removeprefix("healthy-"), not word.startswith("healthy-")


def made(batch_size=8):
    """The model and both loaders."""
    config = AutoConfig.for_model("bert", hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                                  intermediate_size=32, vocab_size=1000, max_position_embeddings=4096)  # fmt: skip
    longest = (3000 if dies else 40) if name == "longest" else None
    train = DataLoader(samples(200 if name == "batch" else 3000, 16, longest), batch_size, collate_fn=pad)
    count = 4000 if name == "logits" else 512
    batch = (512 if dies else 16) if name == "batch" else 8
    data = train.dataset if name == "same" else samples(count, 64)
    return AutoModelForMaskedLM.from_config(config), train, DataLoader(data, batch, collate_fn=pad)


def kept(logits):
    """What the validation keeps of a batch."""
    if name == "raises":
        raise ZeroDivisionError("division by zero")
    return logits if name == "logits" and dies else logits.argmax(-1)


def main():
    """Train and validate twice."""
    accelerator = Accelerator(cpu=True)
    model, train, evaluated = made()
    model, optimizer, train, evaluated = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters()), train, evaluated
    )
    for _ in range(2):
        for batch in train:
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            outputs = [kept(accelerator.gather_for_metrics(model(**batch).logits)) for batch in evaluated]
        torch.cat(outputs).float().mean()
    print("most samples of a validation batch:", max(map(len, outputs)))


if __name__ == "__main__":
    main()
