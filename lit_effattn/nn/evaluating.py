"""Evaluation mode within a context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put `module` into evaluation mode, and restore the mode of each submodule afterwards.

    A submodule that was in evaluation mode before, such as a frozen one, stays in it.
    """
    training = [submodule for submodule in module.modules() if submodule.training]
    module.eval()
    try:
        yield
    finally:
        for submodule in training:
            submodule.training = True
