"""Language models from their checkpoints, and the text that they are tested on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_effattn.checkpoints.io import read_checkpoint
from lit_effattn.datamodules import IGNORE, TextStream
from lit_effattn.tasks import LanguageModel

_BLOCK = 1 << 16  # tokens read at a time


def load(path: Path, device: torch.device, *data: str) -> tuple[LanguageModel, dict[str, Any]]:
    """Read a language model, and the arguments of the data that it was trained on.

    Args:
        path: The checkpoint.
        device: The model's.
        data: The data that are accepted, by an argument that only they have: "source" of TextStream.

    Raises:
        ValueError: the checkpoint is of another task or of other data.
    """
    checkpoint = read_checkpoint(path)
    arguments = checkpoint.get("datamodule_hyper_parameters", {})
    name = checkpoint.get("hyper_parameters", {}).get("_class_path", "").rpartition(".")[2]
    if name != "LanguageModel" or not arguments.keys() & set(data):
        raise ValueError(f"ckpt_path={path}: must be of a LanguageModel whose data have {' or '.join(data)}")
    return LanguageModel.load_from_checkpoint(path, map_location=device, weights_only=True).eval(), arguments


def read_documents(data: dict[str, Any]) -> list[Tensor]:
    """Return the tokens of each document of the test text, (n,) each, in order; joined documents are one."""
    stream = TextStream(**{**data, "eval_batch_size": 1, "eval_segment_len": _BLOCK, "num_workers": 0})
    stream.prepare_data()
    documents: list[list[Tensor]] = []
    for batch in stream.test_dataloader():
        if batch.fresh[0]:
            documents.append([])
        documents[-1].append(batch.targets[batch.targets != IGNORE])
    return [torch.cat(pieces) for pieces in documents]
