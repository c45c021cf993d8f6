"""Rows of tokens of different lengths, and the collator that pads them."""

import torch


def samples(count, tokens=16, longest=None):
    lengths = [tokens] * (count - 1) + [longest or tokens]
    return [{"input_ids": [n % 7 + 300] * many, "labels": [n % 7 + 300] * many} for n, many in enumerate(lengths)]


def pad(rows):
    most = max(len(row["input_ids"]) for row in rows)
    return {
        key: torch.tensor([[*row[key], *[fill] * (most - len(row[key]))] for row in rows])
        for key, fill in (("input_ids", 0), ("labels", -100))
    }
