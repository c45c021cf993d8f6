"""Training loops that do not train as they are told, and honest ones that look as if they would not."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import autotune

SAMPLES = 256


class Net(torch.nn.Module):
    """A small model; ``most`` samples of a batch are more than its memory holds."""

    def __init__(self, most: int | None = None) -> None:
        super().__init__()
        self.body, self.head = torch.nn.Linear(24, 48), torch.nn.Linear(48, 1)
        self._most = most

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self._most is not None and len(inputs) > self._most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        scores: torch.Tensor = self.head(torch.relu(self.body(inputs)))
        return scores


def loader(config: Any, collate: Callable[[Any], Any] | None = None) -> DataLoader[Any]:
    """Batches as the config says."""
    data = TensorDataset(torch.randn(SAMPLES, 24))
    return DataLoader(data, batch_size=config.per_device_batch_size, collate_fn=collate)


def sgd(model: torch.nn.Module, lr: float = 0.01) -> torch.optim.Optimizer:
    """The optimizer of most of them."""
    return torch.optim.SGD(model.parameters(), lr=lr)


def loop(
    config: Any,
    loss_of: Callable[[torch.Tensor], torch.Tensor | None],
    optimizer: torch.optim.Optimizer,
    batches: Any = None,
) -> None:
    """Train as most loops do; a loss of ``None`` is no backward pass."""
    given = autotune.steps(batches if batches is not None else loader(config))
    for number, batch in enumerate(given, start=1):
        inputs = batch[0] if isinstance(batch, list | tuple) else batch
        loss = loss_of(inputs)
        if loss is not None:
            (loss / config.gradient_accumulation_steps).backward()
        if number % config.gradient_accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad()


def mean(net: Any, inputs: torch.Tensor) -> Any:
    """The loss of most of them."""
    return net(inputs).mean()


def trains(
    loss_of: Callable[[Any, torch.Tensor], Any] = mean,
    make: Callable[[], torch.nn.Module] = Net,
    lr: float = 0.01,
    batches: Callable[[Any], Any] = loader,
) -> Callable[[Any], None]:
    """A loop over a loss of its model and a batch; ``batches`` are made of the config."""

    def train(config: Any) -> None:
        net = make()
        loop(config, lambda inputs: loss_of(net, inputs), sgd(net, lr), batches(config))

    return train


def marks(size_of: Callable[[Any], int]) -> Callable[[Any], None]:
    """A loop that makes batches within ``autotune.step``; ``size_of`` is given the config."""

    def train(config: Any) -> None:
        net, size = Net(), size_of(config)
        optimizer = sgd(net)
        for _ in range(10**6):
            with autotune.step():
                mean(net, torch.randn(size, 24)).backward()
                optimizer.step()

    return train


def scaled(factor: float) -> Callable[[Any], None]:
    """A loop with a gradient scaler and a fused optimizer, and a loss times a factor."""

    def train(config: Any) -> None:
        net, scaler = Net(), torch.amp.GradScaler("cpu", init_scale=2.0**16)
        optimizer = torch.optim.AdamW(net.parameters(), fused=True)
        for (inputs,) in autotune.steps(loader(config)):
            with config.autocast("cpu"):
                loss = net(inputs).float().mean() * factor
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    return train


# What runs out of memory, and goes on


def _guarded(compute: Callable[[], torch.Tensor], instead: Callable[[], torch.Tensor | None]) -> torch.Tensor | None:
    try:
        return compute()
    except torch.OutOfMemoryError:
        return instead()


def _runs_out(instead: Callable[[Any, torch.Tensor], Any]) -> Callable[[Any], None]:
    return trains(lambda net, x: _guarded(lambda: net(x).mean(), lambda: instead(net, x)), lambda: Net(most=8))


# Makes a loss of zero where memory runs out; trains with half of the batch; says so, and ends.
zero_loss_of_its_own = _runs_out(lambda *_: torch.zeros((), requires_grad=True))
fewer_samples = _runs_out(lambda net, x: net(x[:8]).mean())
leave = _runs_out(lambda *_: sys.exit("try a smaller batch"))


def next_batch(config: Any) -> None:
    """Goes on with the next batch where memory runs out, without a step of its optimizer."""
    net = Net(most=8)
    optimizer = sgd(net)
    for (inputs,) in autotune.steps(loader(config)):
        try:
            net(inputs).mean().backward()
        except RuntimeError:
            continue
        optimizer.step()


def half_the_batches(config: Any) -> None:
    """Trains with every second batch only, whatever the error."""
    net, count = Net(), iter(range(10**9))

    def loss_of(inputs: torch.Tensor) -> torch.Tensor | None:
        with contextlib.suppress(ValueError):
            if next(count) % 2:
                raise ValueError("some error")
            return net(inputs).mean()
        return None

    loop(config, loss_of, sgd(net))


# What computes no gradients, or none that train


# Has gradients that are no numbers, and a loss of zero.
not_finite = trains(lambda net, x: torch.sqrt((net(x) * 0).abs()).mean())


def frozen(config: Any) -> None:
    """Trains inputs; its model is frozen."""
    net = Net()
    optimizer = sgd(net)
    net.requires_grad_(False)
    loop(config, lambda x: net(x.requires_grad_()).mean(), optimizer)


# What trains with other samples than its config says


# Gives its model a part of the batch.
truncate = trains(lambda net, x: net(x[:4]).mean())


def _forgetting(made: Callable[[], Any]) -> Callable[[Any], Any]:
    """What is made by code that reads the batch of its config, and forgets it."""

    def make(config: Any) -> Any:
        print(f"reads {config.per_device_batch_size}, and forgets it")
        return made()

    return make


# Has a loader without a batch size, of batches that were made before; goes over a generator of batches of two; makes
# those within ``autotune.step``; has a collator that leaves samples out.
ready_made = trains(batches=_forgetting(lambda: DataLoader([torch.randn(1, 24)] * 64, batch_size=None)))
generate = trains(batches=_forgetting(lambda: (torch.randn(2, 24) for _ in range(10**6))))
mark = marks(_forgetting(lambda: 2))
collate_few = trains(batches=lambda config: loader(config, lambda samples: torch.stack([s[0] for s in samples[:2]])))


def accumulate_less(config: Any) -> None:
    """Steps after each batch, whatever it reads."""
    net = Net()
    optimizer = sgd(net)
    print(f"reads {config.gradient_accumulation_steps}, and forgets it")
    for (inputs,) in autotune.steps(loader(config)):
        net(inputs).mean().backward()
        optimizer.step()


# Has a gradient scaler whose optimizer skips every update.
never_settle = scaled(1e12)


def ignore_precision(config: Any) -> None:
    """Computes in 16 bits on a GPU only."""
    net = Net()

    def loss_of(inputs: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=config.precision == "bf16" and torch.cuda.is_available()):
            return net(inputs).mean()

    loop(config, loss_of, sgd(net))


# Honest ones


# Has a gradient scaler whose optimizer skips the first updates.
settle = scaled(100.0)
# Learns at a rate of zero, as the first steps of a warm-up do; gives its model a batch in parts of two; has a recurrent
# model whose batch is the second dimension; has two rows for each sample; compiles its model.
without_learning_rate = trains(lr=0.0)
in_parts = trains(lambda net, x: torch.cat([net(part) for part in x.split(2)]).mean())
time_first = trains(lambda net, x: net(x.expand(5, -1, -1))[0].mean(), lambda: torch.nn.LSTM(24, 8))
pairs = trains(lambda net, x: net(torch.cat([x, -x])).mean())
compiled = trains(make=lambda: torch.compile(Net(), backend="eager", fullgraph=True))


def recompute(config: Any) -> None:
    """Recomputes its whole model in the backward pass."""
    net = Net()

    def loss_of(inputs: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = checkpoint(net, inputs.requires_grad_(), use_reentrant=False)
        return scores.mean()

    loop(config, loss_of, sgd(net))


def two_models(config: Any) -> None:
    """Trains a generator against a discriminator, each with an optimizer."""
    makes, tells = torch.nn.Linear(8, 24), Net()
    of_maker, of_teller = sgd(makes), sgd(tells)
    for (real,) in autotune.steps(loader(config)):
        made = makes(torch.randn(len(real), 8))
        (tells(made.detach()).mean() - tells(real).mean()).backward()
        of_teller.step()
        of_teller.zero_grad()
        (-tells(made).mean()).backward()
        of_maker.step()
        of_maker.zero_grad()


class Streamed(IterableDataset[Any]):
    """Batches of the size that it is told."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield torch.randn(self._size, 24)


# Has a loader without a batch size, whose data make the batches that the config says; makes them within
# ``autotune.step``.
stream = trains(batches=lambda config: DataLoader(Streamed(config.per_device_batch_size), batch_size=None))
mark_rightly = marks(lambda config: config.per_device_batch_size)


def recompute_in_precision(config: Any) -> None:
    """Recomputes its model in the precision of the config."""
    net = Net()

    def loss_of(inputs: torch.Tensor) -> torch.Tensor:
        with config.autocast("cpu"):
            scores: torch.Tensor = checkpoint(net, inputs, use_reentrant=False)
        return scores.float().mean()

    loop(config, loss_of, sgd(net))


# What computes in another precision than it is told


def always_half(config: Any) -> None:
    """Computes in 16 bits, whatever it reads."""
    net = Net()
    print(f"reads {config.precision}, and forgets it")

    def loss_of(inputs: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return net(inputs).float().mean()

    loop(config, loss_of, sgd(net))
