"""Language models from their checkpoints, and the text that they are tested on."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_effattn.callbacks.memory_carry import MEMORY_KEY
from lit_effattn.checkpoints import read_checkpoint
from lit_effattn.datamodules import IGNORE, TextStream
from lit_effattn.tasks import LanguageModel

_BLOCK = 1 << 16  # tokens read at a time


class Trained(NamedTuple):
    """What a checkpoint tells."""

    model: LanguageModel
    data: dict[str, Any]  # arguments of the TextStream that it was trained on
    carried: bool  # whether it was trained with a memory


def class_of(path: Path) -> str:
    """Return the name of the class whose checkpoint `path` is; "" if it does not say."""
    return read_checkpoint(path).get("hyper_parameters", {}).get("_class_path", "").rpartition(".")[2]


def load(path: Path, device: torch.device) -> Trained:
    """Read a language model that was trained on text.

    Raises:
        ValueError: the checkpoint is of something else.
    """
    checkpoint = read_checkpoint(path)
    data = checkpoint.get("datamodule_hyper_parameters", {})
    if class_of(path) != "LanguageModel" or "source" not in data:
        raise ValueError(f"ckpt_path={path}: it is not of a LanguageModel that was trained on a TextStream")
    model = LanguageModel.load_from_checkpoint(path, map_location=device, weights_only=True).eval()
    return Trained(model, data, MEMORY_KEY in checkpoint)


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
