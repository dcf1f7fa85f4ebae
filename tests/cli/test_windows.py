from typing import Any

import pytest
from jsonargparse import Namespace

from lit_effattn.cli.windows import set_windows, stated_mem_len


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


def test_only_windows_that_are_null_are_set():
    kinds = [kind("SoftmaxAttention", window=None), kind("LinearAttention"), kind("ShawAttention", window=5)]
    set_windows(config(kinds, callbacks=[kind("FeatureRedraw"), CARRY]), 6)
    assert [k.get("init_args.window") for k in kinds] == [14, None, 5]
    assert "window" not in kinds[1].init_args


@pytest.mark.parametrize(
    ("callbacks", "mem_len", "segment_len"),
    [(None, 6, 8), ([kind("FeatureRedraw")], 6, 8), (CARRY, None, 8), (CARRY, 6, None)],
    ids=["no callbacks", "no memory is carried", "no memory length", "no segments"],
)
def test_nothing_is_invented(callbacks: Any, mem_len: int | None, segment_len: int | None):
    softmax = kind("SoftmaxAttention", window=None)
    set_windows(config(softmax, callbacks=callbacks, segment_len=segment_len), mem_len)
    assert softmax.init_args.window is None


def test_the_last_memory_length_counts():
    def file(*lengths: Any) -> dict[str, Any]:
        kinds = [{"class_path": "TransformerXLAttention", "init_args": {"mem_len": length}} for length in lengths]
        return {"model": {"init_args": {"backbone": {"init_args": {"attention": kinds}}}}}

    assert stated_mem_len([]) is None
    assert stated_mem_len([file(6), {"data": {"mem_len": None}}]) == 6
    assert stated_mem_len([file(6), file(7, 9), file("many")]) == 9
