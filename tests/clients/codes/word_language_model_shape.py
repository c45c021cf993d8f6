"""Train words in the shape of PyTorch's examples/word_language_model: no optimizer, the batch is second."""

import argparse
import time

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--emsize", type=int, default=16)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch_size", type=int, default=20, metavar="N")
parser.add_argument("--bptt", type=int, default=8)
parser.add_argument("--log-interval", type=int, default=20)
parser.add_argument("--save", type=str, default="model.pt")
args = parser.parse_args()
torch.manual_seed(1111)


class RNNModel(nn.Module):
    def __init__(self, ntoken, size):
        super().__init__()
        self.encoder = nn.Embedding(ntoken, size)
        self.rnn = nn.LSTM(size, size, 1)
        self.decoder = nn.Linear(size, ntoken)

    def forward(self, input, hidden):
        output, hidden = self.rnn(self.encoder(input), hidden)
        return torch.log_softmax(self.decoder(output).view(-1, 64), dim=1), hidden

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        return weight.new_zeros(1, bsz, args.emsize), weight.new_zeros(1, bsz, args.emsize)


def batchify(data, bsz):
    nbatch = data.size(0) // bsz
    return data.narrow(0, 0, nbatch * bsz).view(bsz, -1).t().contiguous()


def get_batch(source, i):
    seq_len = min(args.bptt, len(source) - 1 - i)
    return source[i : i + seq_len], source[i + 1 : i + 1 + seq_len].view(-1)


words = torch.randint(0, 64, (16000,))
train_data, val_data = batchify(words, args.batch_size), batchify(words[:2000], 10)
model, criterion = RNNModel(64, args.emsize), nn.NLLLoss()
for epoch in range(1, args.epochs + 1):
    model.train()
    hidden, start_time = model.init_hidden(args.batch_size), time.time()
    for batch, i in enumerate(range(0, train_data.size(0) - 1, args.bptt)):
        data, targets = get_batch(train_data, i)
        model.zero_grad()
        hidden = tuple(h.detach() for h in hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-1.0)
        if batch % args.log_interval == 0:
            print(f"| epoch {epoch} | {batch} batches | {time.time() - start_time:.2f} s | loss {loss.item():5.2f}")
    model.eval()
    with torch.no_grad():
        hidden = model.init_hidden(10)
        for i in range(0, val_data.size(0) - 1, args.bptt):
            data, targets = get_batch(val_data, i)
            output, hidden = model(data, hidden)
    with open(args.save, "wb") as f:
        torch.save(model, f)
