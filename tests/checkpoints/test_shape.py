"""The structure of a checkpoint's contents is checked before anything reads it."""

from typing import Any

import pytest
import torch

from lit_effattn.checkpoints.files import DamagedError, read
from lit_effattn.checkpoints.shape import MAX_DEPTH, check_plain


def bomb(levels: int) -> list[Any]:
    """Return a list of 10 lists of 10 lists …, each of which is one object."""
    content: list[Any] = ["ha"] * 10
    for _ in range(levels):
        content = [content] * 10
    return content


def circle() -> dict[str, Any]:
    content: dict[str, Any] = {"state_dict": {}}
    content["state_dict"]["itself"] = content
    return content


def deep(levels: int) -> list[Any]:
    content: list[Any] = []
    for _ in range(levels):
        content = [content]
    return content


def test_what_no_checkpoint_holds(tmp_path: Any):
    for content, words in [
        (bomb(12), "more than 10,000,000 items"),
        (circle(), "contains itself"),
        (deep(MAX_DEPTH + 1), "nested more than 100 deep"),
        ({"w": torch.zeros(1).expand(10**6, 10**6)}, "repeats 4 bytes"),
        ({"w": torch.eye(3).to_sparse()}, "is sparse"),
    ]:
        with pytest.raises(ValueError, match=words):
            check_plain(content)
        if words not in ("contains itself", "is sparse"):
            torch.save({"state_dict": {}, "x": content}, tmp_path / "it.ckpt")
            with pytest.raises(DamagedError, match=words):
                read(tmp_path / "it.ckpt")


def test_what_checkpoints_do_hold():
    tied = torch.zeros(4, 4)
    check_plain({"a": tied, "b": tied, "c": tied.T, "d": tied[:, 1:], "deep": deep(MAX_DEPTH - 2), "many": bomb(3)})
