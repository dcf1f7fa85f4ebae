from types import SimpleNamespace
from typing import Any

import pytest
from jsonargparse import Namespace

from lit_effattn.cli.derived import set_strides, set_windows, stated


def kind(name: str, **options: Any) -> Namespace:
    return Namespace(class_path=f"lit_effattn.attention.{name}", init_args=Namespace(**options))


def config(attention: Any, *, callbacks: Any, segment_len: int | None = 8) -> Namespace:
    backbone = Namespace(class_path="Transformer", init_args=Namespace(attention=attention))
    return Namespace(
        model=Namespace(class_path="LanguageModel", init_args=Namespace(backbone=backbone)),
        data=Namespace(class_path="TextStream", init_args=Namespace(segment_len=segment_len)),
        trainer=Namespace(callbacks=callbacks),
    )


CARRY = kind("MemoryCarry")


def file(*lengths: Any) -> dict[str, Any]:
    kinds = [{"class_path": "TransformerXLAttention", "init_args": {"mem_len": length}} for length in lengths]
    return {"model": {"init_args": {"backbone": {"init_args": {"attention": kinds}}}}}


def test_only_windows_that_are_null_are_set():
    kinds = [kind("SoftmaxAttention", window=None), kind("LinearAttention"), kind("ShawAttention", window=5)]
    set_windows(config(kinds, callbacks=[kind("FeatureRedraw"), CARRY]), [file(6)])
    assert [k.get("init_args.window") for k in kinds] == [14, None, 5]
    assert "window" not in kinds[1].init_args


@pytest.mark.parametrize(
    ("callbacks", "mem_len", "segment_len"),
    [(None, 6, 8), ([kind("FeatureRedraw")], 6, 8), (CARRY, None, 8), (CARRY, 6, None)],
    ids=["no callbacks", "no memory is carried", "no memory length", "no segments"],
)
def test_nothing_is_invented(callbacks: Any, mem_len: int | None, segment_len: int | None):
    softmax = kind("SoftmaxAttention", window=None)
    set_windows(config(softmax, callbacks=callbacks, segment_len=segment_len), [file(mem_len)])
    assert softmax.init_args.window is None


def test_the_last_memory_length_counts():
    assert stated([], "mem_len") is None
    assert stated([file(6), {"data": {"mem_len": None}}], "mem_len") == 6
    assert stated([file(6), file(7, 9), file("many")], "mem_len") == 9


@pytest.mark.parametrize(
    ("data", "stride"),
    [
        (SimpleNamespace(image_shape=(8, 6, 3), stride=1), 18),
        (SimpleNamespace(segment_len=120), 11),
        (SimpleNamespace(length=4096), 64),
        (SimpleNamespace(), 128),
    ],
)
def test_a_stride_is_a_row_or_the_root_of_the_length(data: Any, stride: int):
    kinds = [kind("LinearAttention"), kind("SparseAttention", stride=128)]
    set_strides(config(kinds, callbacks=None), lambda: data)
    assert kinds[1].init_args.stride == stride
    assert "stride" not in kinds[0].init_args


def test_data_are_made_only_for_the_kind_that_needs_them():
    set_strides(config(kind("LinearAttention"), callbacks=None), lambda: pytest.fail("the data were made"))
