"""Training loops that would fool a clock, and honest ones that look as if they would."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import autotune

SAMPLES = 256
FEW = torch.randn(4, 24)


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


class TruncatingNet(Net):
    """Leaves most of its batch out."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs[:4])


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


def trains(
    loss_of: Callable[[Any, torch.Tensor], Any], make: Callable[[], torch.nn.Module] = Net, lr: float = 0.01
) -> Callable[[Any], None]:
    """A loop over a loss of its model and a batch."""

    def train(config: Any) -> None:
        net = make()
        loop(config, lambda inputs: loss_of(net, inputs), sgd(net, lr))

    return train


# What runs out of memory, and goes on


def _guarded(compute: Callable[[], torch.Tensor], instead: Callable[[], torch.Tensor | None]) -> torch.Tensor | None:
    try:
        return compute()
    except torch.OutOfMemoryError:
        return instead()


def _zeros_of(net: torch.nn.Module) -> torch.Tensor:
    return sum((each.sum() * 0 for each in net.parameters()), torch.zeros(()))


def _runs_out(instead: Callable[[Any, torch.Tensor], Any]) -> Callable[[Any], None]:
    return trains(lambda net, x: _guarded(lambda: net(x).mean(), lambda: instead(net, x)), lambda: Net(most=8))


# Makes a loss of zero where memory runs out; one with gradients that are zero; leaves the backward pass out; trains
# with half of the batch; says so, and ends.
zero_loss_of_its_own = _runs_out(lambda *_: torch.zeros((), requires_grad=True))
zero_loss_of_the_weights = _runs_out(lambda net, _: _zeros_of(net))
no_loss = _runs_out(lambda *_: None)
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


# Lets no gradient go through its model; calls it without gradients, and adds zeros that have some; multiplies its loss
# with zero; has gradients that are no numbers, and a loss of zero.
detached = trains(lambda net, x: net(x).detach().mean().requires_grad_())
without_gradients = trains(lambda net, x: torch.no_grad()(net)(x).mean() + _zeros_of(net))
times_zero = trains(lambda net, x: net(x).mean() * 0)
not_finite = trains(lambda net, x: torch.sqrt((net(x) * 0).abs()).mean())


def no_gradients_later(config: Any) -> None:
    """Lets gradients go through its model in the first step alone."""
    net, count = Net(), iter(range(10**9))
    loop(config, lambda x: net(x).mean() if next(count) < 2 else net(x).detach().mean().requires_grad_(), sgd(net))


def first_gradients_only(config: Any) -> None:
    """Steps with the gradients of its first batch."""
    net = Net()
    optimizer = sgd(net)
    for number, (inputs,) in enumerate(autotune.steps(loader(config))):
        if number == 0:
            net(inputs).mean().backward()
        optimizer.step()


def frozen(config: Any) -> None:
    """Trains inputs; its model is frozen."""
    net = Net()
    optimizer = sgd(net)
    net.requires_grad_(False)
    loop(config, lambda x: net(x.requires_grad_()).mean(), optimizer)


class Idle(torch.optim.Optimizer):
    """Leaves all weights as they are."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Does nothing."""


def idle_optimizer(config: Any) -> None:
    """Never changes a weight."""
    net = Net()
    loop(config, lambda x: net(x).mean(), Idle(net.parameters()))


# What trains with other samples than its config says


# Gives its model a part of the batch; has a model that leaves out most of it; trains with one small batch for ever.
truncate = trains(lambda net, x: net(x[:4]).mean())
truncate_within = trains(lambda net, x: net(x).mean(), TruncatingNet)
cache = trains(lambda net, _: net(FEW).mean())


def _ready_made(size: int) -> DataLoader[Any]:
    return DataLoader([torch.randn(size, 24) for _ in range(64)], batch_size=None)  # type: ignore[arg-type]


def ready_made(config: Any) -> None:
    """Has a loader without a batch size, of batches that were made before."""
    net = Net()
    print(f"reads {config.per_device_batch_size}, and forgets it")
    loop(config, lambda x: net(x).mean(), sgd(net), _ready_made(1))


def ready_made_larger(config: Any) -> None:
    """Has batches of 32, whatever the config says."""
    net = Net()
    print(f"reads {config.per_device_batch_size}, and forgets it")
    loop(config, lambda x: net(x).mean(), sgd(net), _ready_made(32))


def generate(config: Any) -> None:
    """Goes over a generator of batches of two."""
    net = Net()
    print(f"reads {config.per_device_batch_size}, and forgets it")
    loop(config, lambda x: net(x).mean(), sgd(net), (torch.randn(2, 24) for _ in range(10**6)))


def mark(config: Any) -> None:
    """Makes its batches within ``autotune.step``, of two samples."""
    net = Net()
    optimizer = sgd(net)
    print(f"reads {config.per_device_batch_size}, and forgets it")
    for _ in range(10**6):
        with autotune.step():
            net(torch.randn(2, 24)).mean().backward()
            optimizer.step()


def collate_few(config: Any) -> None:
    """Has a collator that leaves samples out."""
    net = Net()
    few = lambda samples: torch.stack([sample[0] for sample in samples[:2]])  # noqa: E731
    loop(config, lambda x: net(x).mean(), sgd(net), loader(config, few))


# What runs otherwise later, or elsewhere


def smaller_later(config: Any) -> None:
    """Trains a second, smaller model after the first steps."""
    net, small, count = Net(), torch.nn.Linear(24, 1), iter(range(10**9))
    optimizer = sgd(torch.nn.ModuleList([net, small]))
    later = int(os.environ.get("LATER", "2"))
    loop(config, lambda x: (net if next(count) < later else small)(x).mean(), optimizer)


def in_a_thread(config: Any) -> None:
    """Trains in another thread, and waits for nothing but its last step."""
    net = Net()
    optimizer = sgd(net)

    def train(inputs: torch.Tensor) -> None:
        net(inputs).mean().backward()
        optimizer.step()

    for (inputs,) in autotune.steps(loader(config)):
        thread = threading.Thread(target=train, args=(inputs,))
        thread.start()
        thread.join()


def accumulate_less(config: Any) -> None:
    """Steps after each batch, whatever it reads."""
    net = Net()
    optimizer = sgd(net)
    print(f"reads {config.gradient_accumulation_steps}, and forgets it")
    for (inputs,) in autotune.steps(loader(config)):
        net(inputs).mean().backward()
        optimizer.step()


def one_backward_pass(config: Any) -> None:
    """Computes the gradients of the last batch of a step alone."""
    net = Net()
    optimizer = sgd(net)
    for number, (inputs,) in enumerate(autotune.steps(loader(config)), start=1):
        loss = net(inputs).mean()
        if number % config.gradient_accumulation_steps == 0:
            loss.backward()
            optimizer.step()


def never_settle(config: Any) -> None:
    """Has a gradient scaler whose optimizer is fused and skips every update."""
    net = Net()
    _scaled(config, net, 1e12)


def ignore_precision(config: Any) -> None:
    """Computes in 16 bits on a GPU only."""
    net = Net()

    def loss_of(inputs: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=config.precision == "bf16" and torch.cuda.is_available()):
            return net(inputs).mean()

    loop(config, loss_of, sgd(net))


# Honest ones


def _scaled(config: Any, net: Net, factor: float) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    for (inputs,) in autotune.steps(loader(config)):
        with config.autocast("cpu"):
            loss = net(inputs).float().mean() * factor
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def settle(config: Any) -> None:
    """Has a gradient scaler whose optimizer is fused and skips the first updates."""
    net = Net()
    _scaled(config, net, 100.0)


# Learns at a rate of zero, as the first steps of a warm-up do; gives its model a batch in parts of two; has a recurrent
# model whose batch is the second dimension; has two rows for each sample; compiles its model.
without_learning_rate = trains(lambda net, x: net(x).mean(), lr=0.0)
in_parts = trains(lambda net, x: torch.cat([net(part) for part in x.split(2)]).mean())
time_first = trains(lambda net, x: net(x.expand(5, -1, -1))[0].mean(), lambda: torch.nn.LSTM(24, 8))
pairs = trains(lambda net, x: net(torch.cat([x, -x])).mean())
compiled = trains(lambda net, x: net(x).mean(), lambda: torch.compile(Net(), backend="eager", fullgraph=True))


def low_rank(config: Any) -> None:
    """Trains two factors of a change to frozen weights, one of which begins at zero."""
    frozen, into, out = torch.nn.Linear(24, 24), torch.nn.Linear(24, 4, bias=False), torch.nn.Linear(4, 24, bias=False)
    frozen.requires_grad_(False)
    torch.nn.init.zeros_(out.weight)
    net = torch.nn.ModuleDict({"frozen": frozen, "into": into, "out": out})
    optimizer = sgd(torch.nn.ModuleList([into, out]))
    loop(config, lambda x: (net["frozen"](x) + net["out"](net["into"](x))).square().mean(), optimizer)


def recompute(config: Any) -> None:
    """Recomputes its whole model in the backward pass."""
    net = Net()
    is_reentrant = "REENTRANT" in os.environ

    def loss_of(inputs: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = checkpoint(net, inputs.requires_grad_(), use_reentrant=is_reentrant)
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


def compiled_in_place(config: Any) -> None:
    """Compiles its model in place, and a loss that calls it."""
    net = Net()
    net.compile(backend="eager", fullgraph=True)
    loop(config, lambda x: net(x).mean(), sgd(net))


class Streamed(IterableDataset[Any]):
    """Batches of the size that it is told."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield torch.randn(self._size, 24)


def stream(config: Any) -> None:
    """Has a loader without a batch size, whose data makes the batches that the config says."""
    net = Net()
    batches = DataLoader(Streamed(config.per_device_batch_size), batch_size=None)
    loop(config, lambda x: net(x).mean(), sgd(net), batches)


def mark_rightly(config: Any) -> None:
    """Makes the batches of the config within ``autotune.step``."""
    net = Net()
    optimizer = sgd(net)
    for _ in range(10**6):
        with autotune.step():
            net(torch.randn(config.per_device_batch_size, 24)).mean().backward()
            optimizer.step()


def sharpness_aware(config: Any) -> None:
    """Computes each gradient a second time, at weights that it changes itself."""
    net = Net()
    optimizer = sgd(net)
    for (inputs,) in autotune.steps(loader(config)):
        net(inputs).mean().backward()
        with torch.no_grad():
            moves = [each.grad * 0.05 for each in net.parameters() if each.grad is not None]
            torch._foreach_add_(list(net.parameters()), moves)
        optimizer.zero_grad()
        net(inputs).mean().backward()
        with torch.no_grad():
            torch._foreach_sub_(list(net.parameters()), moves)
        optimizer.step()
        optimizer.zero_grad()


def toggle(config: Any) -> None:
    """Freezes its discriminator while it trains its generator."""
    makes, tells = torch.nn.Linear(8, 24), Net()
    of_maker, of_teller = sgd(makes), sgd(tells)
    for (real,) in autotune.steps(loader(config)):
        tells.requires_grad_(True)
        made = makes(torch.randn(len(real), 8))
        (tells(made.detach()).mean() - tells(real).mean()).backward()
        of_teller.step()
        of_teller.zero_grad()
        tells.requires_grad_(False)
        (-tells(made).mean()).backward()
        of_maker.step()
        of_maker.zero_grad()


class Choosing(Net):
    """Gives scores of some samples, others each time."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """One score for each that is chosen, the first aside."""
        return super().forward(inputs)[1:][torch.rand(len(inputs) - 1) > 0.3]


# Computes its loss from some of the scores.
choose = trains(lambda net, x: net(x).mean(), Choosing)


def recompute_in_precision(config: Any) -> None:
    """Recomputes its model in the precision of the config."""
    net = Net()

    def loss_of(inputs: torch.Tensor) -> torch.Tensor:
        with config.autocast("cpu"):
            scores: torch.Tensor = checkpoint(net, inputs, use_reentrant=False)
        return scores.float().mean()

    loop(config, loss_of, sgd(net))


# What computes in another precision than it is told


def _cast(config: Any, net: Net, casts: Callable[[int], Any]) -> None:
    count = iter(range(10**9))

    def loss_of(inputs: torch.Tensor) -> torch.Tensor:
        with casts(next(count)):
            return net(inputs).float().mean()

    loop(config, loss_of, sgd(net))


class OffWithin(Net):
    """Turns off what it is called in."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(inputs)


def off_within(config: Any) -> None:
    """Calls a model in the precision of the config that computes in its own."""
    _cast(config, OffWithin(), lambda _: config.autocast("cpu"))


def always_half(config: Any) -> None:
    """Computes in 16 bits, whatever it reads."""
    print(f"reads {config.precision}, and forgets it")
    _cast(config, Net(), lambda _: torch.autocast("cpu", torch.bfloat16))


def off_later(config: Any) -> None:
    """Computes in the precision of the config in its first steps."""
    _cast(config, Net(), lambda number: config.autocast("cpu") if number < 5 else contextlib.nullcontext())


# What changes once the clock runs


def _changes(change: Callable[[Net], object], first: Callable[[Net], object] = id, batch: int = 6) -> Any:
    """A loop that makes a change to its model before this batch, and another one at first."""

    def train(config: Any) -> None:
        net, count = Net(), iter(range(1, 10**9))
        optimizer = sgd(net)
        first(net)

        def loss_of(inputs: torch.Tensor) -> torch.Tensor:
            if next(count) == batch:
                change(net)
            weights = next(net.parameters())
            loss: torch.Tensor = net(inputs.to(weights.device, weights.dtype)).mean()
            return loss

        loop(config, loss_of, optimizer)

    return train


def _freeze_clocks(_: Net) -> None:
    now = time.perf_counter()
    time.perf_counter = time.monotonic = time.time = lambda: now  # type: ignore[assignment]


# Honest: freezes Python's clocks, as libraries for tests do.
stop_the_clock = _changes(_freeze_clocks, batch=2)
# Freezes most of its model after some steps; trains more of it; has its weights in 16 bits; puts another layer into it;
# moves it to the meta device.
freeze_later = _changes(lambda net: net.body.requires_grad_(False))
unfreeze_later = _changes(lambda net: net.body.requires_grad_(True), lambda net: net.body.requires_grad_(False))
half_later = _changes(lambda net: net.bfloat16())
other_layer_later = _changes(lambda net: setattr(net, "body", torch.nn.Linear(24, 48)))
to_no_device_later = _changes(lambda net: net.to("meta"))


class TruncatesLater(TruncatingNet):
    """Leaves most of its batch out after some calls."""

    calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(inputs) if self.calls > 5 else Net.forward(self, inputs)


# Has a model that leaves out most of the batch after some steps; one on the meta device, which computes nothing.
truncate_later = trains(lambda net, x: net(x).mean(), TruncatesLater)
on_no_device = trains(lambda net, x: net(x.to("meta")).mean(), lambda: Net().to("meta"))


def accumulate_more(config: Any) -> None:
    """Steps its optimizer after twice as many batches as it is told."""
    net = Net()
    optimizer = sgd(net)
    for number, (inputs,) in enumerate(autotune.steps(loader(config)), start=1):
        net(inputs).mean().backward()
        if number % (2 * config.gradient_accumulation_steps) == 0:
            optimizer.step()
            optimizer.zero_grad()
