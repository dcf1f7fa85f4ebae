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


def test_a_random_state_is_one_of_its_generator():
    """A position beyond the words of NumPy's generator would be read outside of its memory."""
    for generator, path, value in [
        ("python", (0,), 2),
        ("python", (1, 0), 2**32),
        ("python", (1, 0), True),
        ("python", (1, 624), 625),
        ("python", (2,), "x"),
        ("numpy", (0,), "PCG64"),
        ("numpy", (2,), 625),
        ("numpy", (3,), 2),
        ("numpy", (4,), float("nan")),
        ("torch", (), torch.zeros(3, dtype=torch.uint8)),
    ]:
        states = _capture(torch.device("cpu"))
        check_contents({"state_dict": {}, "random_states": [states]})
        holder, key = states, generator
        for index in path:
            holder[key] = list(holder[key])
            holder, key = holder[key], index
        holder[key] = value
        with pytest.raises(ValueError, match=rf"random_states\[0\]\.{generator}"):
            check_contents({"state_dict": {}, "random_states": [states]})


def test_a_state_unlike_the_new_one():
    for saved, new, words in [
        ({}, {"lr": 0.1}, "it has no 'lr'"),
        ({"lr": "x"}, {"lr": 0.1}, "it.lr is the text 'x', not a number"),
        ({"lr": True}, {"lr": 0.1}, "it.lr is True, not a number"),
        ({"n": float("nan")}, {"n": 3}, "it.n is nan, not a number"),
        ({"betas": [0.9]}, {"betas": (0.9, 0.999)}, "it.betas is a list of 1, not a list of 2"),
        ({"t": torch.zeros(3)}, {"t": torch.zeros(2)}, r"shape \(3,\), not a tensor of shape \(2,\)"),
        ({"best_score": 2.0}, {"best_score": torch.tensor(1.0)}, r"it.best_score is 2.0, not a tensor of shape \(\)"),
        ({"best_k_models": {"a": "b"}}, {"best_k_models": {}}, "not a mapping of paths to numbers"),
        ({"best_model_score": "x"}, {"best_model_score": None}, "not a number or None"),
    ]:
        with pytest.raises(ValueError, match=words):
            check_like(saved, new, "it")


def test_a_state_like_the_new_one():
    new = {"step": torch.tensor(0.0), "n": 3, "x": None, "best": float("inf"), "lr": 0.1, "of": {}}
    check_like({**new, "step": 4.0, "n": 5, "x": "any", "best": 1, "more": 7, "of": {1: 2}}, new, "it")
