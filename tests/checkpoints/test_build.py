"""How values of a file become those of annotated types."""

import enum
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NewType, Optional, Protocol, Union

import pytest
import torch

from lit_effattn.attention import Attention, LinearAttention
from lit_effattn.attention.feature_maps import EluFeatureMap
from lit_effattn.checkpoints.build import Allowed, _Builder, build, is_built, members
from lit_effattn.checkpoints.trust import NotAllowedError, Trust
from lit_effattn.hparams import parameters
from lit_effattn.tasks import Task

LINEAR = "lit_effattn.attention.linear.LinearAttention"
ELU = "lit_effattn.attention.feature_maps.EluFeatureMap"


class Color(enum.Enum):
    RED = 1


class Factory(Protocol):
    def __call__(self, width: int) -> Attention: ...


def as_type(value: Any, annotation: Any) -> Any:
    return _Builder(Allowed("it.ckpt")).value(value, annotation, "there")


def test_a_value_has_an_annotated_type():
    for value, annotation, expected in [
        (None, int, None),
        (3, int, 3),
        (3, float, 3.0),
        (True, bool | None, True),
        ("a", Literal["a", 1], "a"),
        ("os.system", str, "os.system"),
        ("a/b", Path | None, Path("a/b")),
        ("a/b", str | Path, "a/b"),
        ("RED", Color, Color.RED),
        ([1, 2], list[int], [1, 2]),
        ([1, 2], tuple[int, ...], (1, 2)),
        ([1, "a"], tuple[int, str], (1, "a")),
        ([1], Sequence[float], [1.0]),
        ({"a": 1}, Mapping[str, float], {"a": 1.0}),
        ([{"a": [1, None, "x"]}], Any, [{"a": [1, None, "x"]}]),
        ({"class_path": "os.system"}, Any, {"class_path": "os.system"}),  # plain data: nobody calls it
        (2, NewType("New", int), 2),
        (2, Annotated[int, "it"], 2),
        (LINEAR, type[Attention], LinearAttention),
        (ELU, EluFeatureMap | str, ELU),  # text, where text is a value
    ]:
        result = as_type(value, annotation)
        assert result == expected
        assert type(result) is type(expected)
    factory = as_type({"class_path": LINEAR, "init_args": {"chunk_size": 3}}, Callable[[int, int, bool], Attention])
    assert isinstance(factory, partial)
    assert factory.func is LinearAttention
    assert factory.keywords == {"chunk_size": 3}


def test_any_other_value_is_refused():
    for value, annotation in [
        ("3", int),
        (True, int),
        (1, bool),
        (1.5, int),
        (10**400, float),
        (3, str),
        ("b", Literal["a"]),
        (True, Literal[1]),
        ("BLUE", Color),
        ([1, "a"], list[int]),
        ([1], tuple[int, int]),
        ("ab", list[str]),
        ({"a": "b"}, dict[str, int]),
        ({("a",): 1}, dict[str, int]),
        (torch.zeros(2), Any),
        ([torch.zeros(2)], Any),
        (object(), object),
        (LINEAR, Callable),
        (LINEAR, Callable[..., Any]),
        (LINEAR, Callable[[int], float]),
        (LINEAR, type),
        (LINEAR, Factory),
        (LINEAR, EluFeatureMap),
        ({"class_path": LINEAR}, Callable[[torch.Tensor], torch.Tensor]),
        ({"class_path": LINEAR, "init_args": {"chunk_size": "{}"}}, type[Attention] | None),
        ({"class_path": LINEAR, "init_args": {"x": 1}}, type[Attention]),
        ({"class_path": LINEAR, "init_args": [1]}, type[Attention]),
        ({"class_path": LINEAR, "dict_kwargs": {}}, type[Attention]),
        ({"init_args": {}}, Attention),
        (["os.system"], list[Attention]),
    ]:
        with pytest.raises(NotAllowedError, match=r"^it\.ckpt"):
            as_type(value, annotation)


def test_members_and_classes_of_annotations():
    assert list(members(Optional[Union[int, Annotated[str, "it"]]])) == [int, str]  # noqa: UP007, UP045
    for kind, built in [(Attention, True), (int, False), (Any, False), (torch.Tensor, False), (Path, False)]:
        assert is_built(kind) == built
    assert {"feature_map", "chunk_size"} <= parameters(LinearAttention).keys()


def test_the_message_says_why():
    for name, words in [
        (f"{Task.__module__}.Task", "which is not derived from Attention"),
        ("os.system", "no checkpoint may name; do not use this file"),
        ("mine.Attention", "--trust mine.Attention (in Python: trust=('mine.Attention',))"),
    ]:
        with pytest.raises(NotAllowedError, match=r"it\.ckpt names ") as caught:
            build({"class_path": name}, Attention, "there", Allowed("it.ckpt"))
        assert words in str(caught.value)
    with pytest.raises(NotAllowedError, match="a checkpoint can't name functions"):
        build("os.getcwd", Attention, "there", Allowed("it.ckpt", Trust(["os.getcwd"])))


def test_arguments_of_the_user_replace_those_of_the_file():
    spec = {"class_path": LINEAR, "init_args": {"d_model": 8, "n_heads": 2, "causal": "many", "chunk_size": 4}}
    made = build(spec, Attention, "there", Allowed("it.ckpt"), causal=True)
    assert made.causal
    assert made.chunk_size == 4


def test_nesting_that_python_cannot_follow_is_an_error():
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    spec = {"class_path": LINEAR, "init_args": {"chunk_size": deep}}
    with pytest.raises(NotAllowedError, match=r"nested too deeply|must be int"):
        build(spec, Attention, "there", Allowed("it.ckpt"))
    while deep:
        deep = deep.pop()  # else taking it apart would exhaust the stack too
