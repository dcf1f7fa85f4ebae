"""Which form of an operation runs, and what a GPU that is not there would say."""

import pytest
import torch

from lit_effattn.ops.runtime import operators
from lit_effattn.ops.runtime.operators import KERNELS


@pytest.fixture(params=["plain", ""], ids=["in PyTorch", "in C++"])
def in_float32(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """Run what is in float32 by either form."""
    monkeypatch.setenv(KERNELS, request.param)


@pytest.fixture
def no_notices():
    """Every notice is given again."""
    operators._notice.cache_clear()
    yield
    operators._notice.cache_clear()


@pytest.fixture
def in_triton(no_notices, monkeypatch: pytest.MonkeyPatch):
    """Ask for the kernels in Triton; on the CPU those in C++ are used."""
    monkeypatch.setenv(KERNELS, "triton")


@pytest.fixture
def groups(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """Say into how many groups a head's chunks are cut, if there are as many chunks, of the module's B · H heads."""
    module = request.module

    def cut(into: int) -> None:
        monkeypatch.setattr(module.triton_kernels, "_at_once", lambda device: into * module.B * module.H)

    cut(1)
    return cut


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch):
    """Say which compute capability the GPU has."""
    monkeypatch.delenv(KERNELS)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU of old")

    def of(*numbers: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: numbers)
        monkeypatch.setattr(operators, "shared_memory", lambda device: 100 if numbers == (8, 6) else 228)

    return of
