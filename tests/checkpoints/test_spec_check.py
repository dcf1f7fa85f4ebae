"""How annotations are read, and what the judges say of values there."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal, NewType, Optional, Protocol, Union

import pytest
import torch
from jsonargparse import Namespace

from lit_effattn.attention import Attention, LinearAttention
from lit_effattn.attention.feature_maps import EluFeatureMap
from lit_effattn.checkpoints.allowlist import NotAllowedError, Trust, find
from lit_effattn.checkpoints.spec_check import ANYTHING, CheckpointJudge, Place, UserJudge, check, parameters

Optimizer = torch.optim.Optimizer
Scheduler = torch.optim.lr_scheduler.LRScheduler


class Factory(Protocol):
    def __call__(self, width: int) -> Attention: ...


def test_an_annotation_is_read():
    for annotation, place in [
        (int, Place()),
        (bool | None, Place()),
        (timedelta, Place()),
        (str, Place(text=True)),
        (Path | None, Place(text=True)),
        (Literal["a", "b"], Place(literals=("a", "b"))),
        (Any, ANYTHING),
        (object, ANYTHING),
        ("Forward", ANYTHING),
        (Attention, Place(classes=(Attention,))),
        (Optional[Attention], Place(classes=(Attention,))),  # noqa: UP045
        (Annotated[Attention, "it"], Place(classes=(Attention,))),
        (NewType("New", Attention), Place(classes=(Attention,))),
        (Callable[[int], Attention], Place(makes=(Attention,))),
        (Callable[[Iterable], Union[Optimizer, Scheduler]], Place(makes=(Optimizer, Scheduler))),  # noqa: UP007
        (type[Attention], Place(makes=(Attention,))),
        (Callable, Place(function=True)),
        (Callable[..., Any], Place(function=True)),
        (Callable[[int], float], Place(function=True)),
        (Callable[[torch.Tensor], torch.Tensor], Place(function=True)),
        (Callable[[int], None], Place(function=True)),
        (type, Place(function=True)),
        (ModuleType, Place(function=True)),
        (Factory, Place(function=True)),
        (str | Callable[[int], int], Place(text=True, function=True)),
        (list[Attention] | Attention, Place(classes=(Attention,), items=(Attention,))),
        (tuple[int, ...], Place(items=(int,))),
        (list, Place(items=(Any,))),
        (Sequence[str], Place(items=(str,))),
        (dict[str, Attention], Place(values=(Attention,))),
        (Mapping, Place(values=(Any,))),
    ]:
        assert Place.of(annotation) == place


def test_whether_text_would_be_read_as_a_name():
    for annotation, holds in [
        (str, False),
        (list[str], False),
        (list[list[Attention]], True),
        (dict[str, Callable], True),
        (Attention, True),
        (float | torch.Tensor, True),
    ]:
        assert Place.of(annotation).holds_names == holds


def test_parameters_are_those_that_can_be_given():
    result = parameters(LinearAttention)
    assert Place.of(result["feature_map"][0]).makes[0].__name__ == "FeatureMap"
    assert Place.of(result["chunk_size"][0]) == Place()
    assert Place.of(parameters(torch.optim.SGD)["lr"][0]).classes == (torch.Tensor,)


LINEAR = "lit_effattn.attention.LinearAttention"


def test_a_checkpoints_names_are_kept_and_short_ones_completed():
    judge = CheckpointJudge("it.ckpt", Trust())
    place = Place.of(list[Callable[[int], Attention]] | Callable[[int], Attention])
    spec = {"class_path": LINEAR, "init_args": {"chunk_size": 3, "feature_map": "EluFeatureMap"}}
    full = f"{EluFeatureMap.__module__}.EluFeatureMap"
    checked = {"class_path": LINEAR, "init_args": {"chunk_size": 3, "feature_map": full}}
    assert check([spec, LINEAR], place, "attention", judge) == [checked, LINEAR]


def test_a_checkpoints_refusal_says_why():
    for name, words in [
        ("torch.optim.SGD", "is not derived from Attention"),
        ("os.system", "no checkpoint may name; do not use this file"),
        ("mine.Attention", "--trust mine.Attention (in Python: trust=('mine.Attention',))"),
    ]:
        with pytest.raises(NotAllowedError, match=r"it\.ckpt names ") as caught:
            check({"class_path": name}, Place.of(Attention), "there", CheckpointJudge("it.ckpt", Trust()))
        assert words in str(caught.value)


def test_a_checkpoints_text_is_noted_where_it_may_be_a_path():
    judge = CheckpointJudge("it.ckpt", Trust())
    spec = {"class_path": "lit_effattn.datamodules.TextStream", "init_args": {"source": "files", "root": "texts"}}
    from lightning.pytorch import LightningDataModule

    check(spec, Place.of(LightningDataModule), "data", judge)
    assert judge.texts == {"data.root": "texts"}


def scaled(x: float) -> float:
    return 2 * x


class Uses:
    def __init__(self, function: Callable[[float], float] = scaled, other: Callable | None = None) -> None:
        pass


def test_a_default_is_nobodys_choice_and_needs_no_trust():
    uses, function = find(f"{__name__}.Uses"), find(f"{__name__}.scaled")
    given = Namespace(class_path=f"{__name__}.Uses", init_args=Namespace(function=function, other=None))
    check(given, Place.of(uses), "there", UserJudge(Trust()))
    given.init_args.other = function
    with pytest.raises(NotAllowedError, match=r"there\.other names the function .*scaled"):
        check(given, Place.of(uses), "there", UserJudge(Trust()))
    check(given, Place.of(uses), "there", UserJudge(Trust([f"{__name__}.scaled"])))
