"""Compiled steps without a compiler."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from lit_effattn.generation import packages, sampling


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """Traced programs run without inductor. Returns the files of those that were compiled."""
    compiled: list[Path] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    packages.cpp_build.private_folder.cache_clear()

    def compile_(exported, path: Path) -> None:
        torch.export.save(exported, path)
        compiled.append(path)

    class Package:
        def __init__(self, path: str) -> None:
            self._run = torch.export.load(path).module()
            self._named = {**dict(self._run.named_parameters()), **dict(self._run.named_buffers())}
            self.loader = self

        def get_constant_fqns(self) -> list[str]:
            return list(self._named)

        def load_constants(self, values, check_full_update, user_managed) -> None:
            for name, t in values.items():
                self._named[name].data = t

        def run(self, inputs: list[Tensor]) -> list[Tensor]:
            tokens, *state = inputs
            return [self._run(tokens, state)]

    monkeypatch.setattr(packages, "_compile", compile_)
    monkeypatch.setattr(packages, "_name_in_package", lambda name: name)
    monkeypatch.setattr(torch._inductor, "aoti_load_package", Package)
    monkeypatch.setattr(sampling, "LEAST_ROOM", 4)
    yield compiled
    packages.cpp_build.private_folder.cache_clear()
