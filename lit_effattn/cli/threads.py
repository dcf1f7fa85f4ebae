"""The number of CPU threads for steps that read one position of a few rows."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

LARGEST = 20_000_000  # parameters of the largest model whose steps run on one thread: at most 10 ms a step of one row

_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@contextmanager
def few_threads(model: nn.Module) -> Iterator[None]:
    """Compute on one thread within this context if the model is small and the environment names no number of threads.

    In a small step, threads wait for each other longer than they compute: beside other programs, two threads took 1.1
    to 4 times the time of one, for 1 to 512 rows.
    """
    before = torch.get_num_threads()
    is_set = any(os.environ.get(name) for name in _VARIABLES)
    is_small = sum(parameter.numel() for parameter in model.parameters()) <= LARGEST
    if is_small and not is_set:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
