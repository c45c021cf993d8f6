"""Loops that accumulate 4 micro-batches, of which an epoch has 375: what they do with the last 3 differs."""

import torch
from loop_runs import made


def _train(config, *, steps_last, divides_by=None):
    import autotune

    net, train, evaluated = made(config.per_device_batch_size)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    accumulation, batches = config.gradient_accumulation_steps, len(train)
    for _ in range(2):
        for number, batch in enumerate(autotune.steps(train), 1):
            of_step = min(accumulation, batches - (number - 1) // accumulation * accumulation)
            (net(**batch).loss / (divides_by or of_step)).backward()
            if number % accumulation == 0 or (steps_last and number == batches):
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            for batch in evaluated:
                net(**batch)


def right(config):
    _train(config, steps_last=True)


def fixed(config):
    _train(config, steps_last=True, divides_by=config.gradient_accumulation_steps)


def left(config):
    _train(config, steps_last=False, divides_by=config.gradient_accumulation_steps)


def on_accelerate():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    net, train, evaluated = made()
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    net, optimizer, train, evaluated = accelerator.prepare(net, optimizer, train, evaluated)
    for _ in range(2):
        for batch in train:
            with accelerator.accumulate(net):
                accelerator.backward(net(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            for batch in evaluated:
                net(**batch)


if __name__ == "__main__":
    on_accelerate()
