"""Computes attention with four threads in two forks of a fork, as an inspection does; prints what came of it."""

import os
from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

from autotune.worker.imports import renew_thread_pool_in_forks


def in_fork(function: Callable[[], None]) -> None:
    pid = os.fork()
    if pid == 0:
        function()
        os._exit(0)
    os.waitpid(pid, 0)


def attend() -> None:
    heads = torch.ones(8, 8, 64, 64)
    try:
        scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1)
        print("computed", flush=True)
    except RuntimeError as error:
        print(str(error).splitlines()[0], flush=True)


def attend_in_forks() -> None:
    torch.set_num_threads(4)
    for _ in range(2):
        in_fork(attend)


# Asking for the number of threads makes it this thread's own, so that its forks do not ask again.
torch.get_num_threads()
torch.set_num_threads(1)
renew_thread_pool_in_forks()
in_fork(attend_in_forks)
