"""What tests of kernels in C++ share: they skip without a compiler, and try each kind of vectors that there is."""

from types import ModuleType

import pytest
import torch

from lit_effattn.ops.runtime import cpp_build

VECTORS = {4: (), 8: cpp_build._VECTORS["AVX2"], 16: cpp_build._VECTORS["AVX512"]}
HAS = {"AVX512": 16, "AVX2": 8}.get(torch.backends.cpu.get_cpu_capability(), 4)


def needs_kernels(module: ModuleType) -> pytest.MarkDecorator:
    """Skip where `module`'s kernels can't be compiled."""
    obstacle = cpp_build.obstacle(module.NAME)
    return pytest.mark.skipif(obstacle is not None, reason=f"no kernels: {obstacle}")


def use_vectors(width: int, module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `module` use vectors of 4, 8 or 16 numbers."""
    if width > HAS:
        pytest.skip(f"the processor has no vectors of {width} numbers")
    path = cpp_build.build(module.NAME, VECTORS[width])
    monkeypatch.setattr(cpp_build, "library", lambda name: cpp_build.ctypes.CDLL(str(path)))
    module._library.cache_clear()
    assert module._library().width_of_vectors() == width
