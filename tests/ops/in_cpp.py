"""What tests of kernels in C++ share: they skip without a compiler, and try each kind of vectors that there is."""

from types import ModuleType

import pytest
import torch

from lit_effattn.ops import compiled

VECTORS = {4: (), 8: compiled._VECTORS["AVX2"], 16: compiled._VECTORS["AVX512"]}
HAS = {"AVX512": 16, "AVX2": 8}.get(torch.backends.cpu.get_cpu_capability(), 4)


def needs_kernels(module: ModuleType) -> pytest.MarkDecorator:
    """Skip where `module`'s kernels can't be compiled."""
    obstacle = compiled.obstacle(module.NAME)
    return pytest.mark.skipif(obstacle is not None, reason=f"no kernels: {obstacle}")


def each_kind_of_vectors(module: ModuleType):
    """Make a fixture that has `module` use vectors of 4, 8 or 16 numbers."""

    @pytest.fixture(params=sorted(VECTORS))
    def vectors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
        if request.param > HAS:
            pytest.skip(f"the processor has no vectors of {request.param} numbers")
        path = compiled.build(module.NAME, VECTORS[request.param])
        monkeypatch.setattr(compiled, "library", lambda name: compiled.ctypes.CDLL(str(path)))
        module._library.cache_clear()
        assert module._library().width_of_vectors() == request.param
        yield
        module._library.cache_clear()

    return vectors
