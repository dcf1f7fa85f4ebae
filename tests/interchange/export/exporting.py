"""Exporting a case, compared with the model for as many tokens."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from lit_effattn.interchange.export import SUFFIXES, Exported, export
from lit_effattn.interchange.onnx_operators import DEFAULT
from tests.interchange.export.cases import N_TOKENS, build


def exported(name: str, format: str, batch_size: int, n: int = N_TOKENS, operators: str = DEFAULT) -> Exported:
    """Export a case and compare it for as many tokens."""
    model = build(name)
    with TemporaryDirectory() as folder:
        room = None if model.backbone.bounded_by is None else N_TOKENS
        path = Path(folder) / f"step{SUFFIXES[format]}"
        return export(model, path, format=format, batch_size=batch_size, max_len=room, check=n, operators=operators)
