"""Compiled steps without a compiler."""

from pathlib import Path

import pytest
import torch

from lit_effattn.generation import compiled, sampling


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """Traced programs run without inductor. Returns the files of those that were compiled."""
    files: list[Path] = []
    programs: dict[Path, torch.export.ExportedProgram] = {}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiled.cpp_build.private_folder.cache_clear()

    def compile_(exported: torch.export.ExportedProgram, path: Path) -> None:
        part = path.with_name("part.pt2")
        part.write_text("a program")
        compiled.cpp_build.install(part, path)
        files.append(path)
        programs[path] = exported

    monkeypatch.setattr(compiled, "_compile", compile_)
    monkeypatch.setattr(compiled, "_loaded", lambda path, exported: programs[path].module())
    monkeypatch.setattr(compiled, "check_inductor", lambda asked, device: None)
    monkeypatch.setattr(sampling, "LEAST_ROOM", 4)
    yield files
    compiled.cpp_build.private_folder.cache_clear()
