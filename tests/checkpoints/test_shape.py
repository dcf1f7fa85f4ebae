"""The structure of a checkpoint's contents is checked before anything reads it."""

from typing import Any

import pytest
import torch

from lit_effattn.callbacks.random_states import _capture
from lit_effattn.checkpoints.files import DamagedError, read
from lit_effattn.checkpoints.shape import MAX_DEPTH, check_contents, check_like, check_plain


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


def test_versions_of_lightning():
    for value in ["2.6.6", "2.5.0.dev20240101", "2.6.0rc1", "1.9.0+cu118", "2.6.6.post0"]:
        check_contents({"state_dict": {}, "pytorch-lightning_version": value})


def test_the_position_of_a_random_state_is_in_its_memory():
    """At a position beyond the words of its generator, NumPy would read outside of them."""
    states = _capture(torch.device("cpu"))
    check_contents({"state_dict": {}, "random_states": [states]})
    for position in (625, -1, None):
        states["numpy"][2] = position
        with pytest.raises(ValueError, match=r"random_states\[0\]\.numpy"):
            check_contents({"state_dict": {}, "random_states": [states]})


def test_a_state_unlike_the_new_one():
    for saved, new, words in [
        ({}, {"lr": 0.1}, "it has no 'lr'"),
        ({"lr": "x"}, {"lr": 0.1}, "it.lr is the text 'x', not a number"),
        ({"t": torch.zeros(3)}, {"t": torch.zeros(2)}, r"shape \(3,\), not a tensor of shape \(2,\)"),
        ({"of": None}, {"of": {"n": 1}}, "it.of is None, not a mapping"),
    ]:
        with pytest.raises(ValueError, match=words):
            check_like(saved, new, "it")


def test_a_state_like_the_new_one():
    new = {"n": 3, "x": None, "best": float("inf"), "lr": 0.1, "of": {}}
    check_like({**new, "n": 0.5, "x": "any", "best": torch.tensor(1.0), "more": 7, "of": {1: 2}}, new, "it")
