from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from jsonargparse import Namespace

from lit_effattn.attention import LinearAttention
from lit_effattn.settings.arguments import Arguments, File
from lit_effattn.settings.derived import leave_out, set_strides, set_windows


def kind(name: str, **options: Any) -> Namespace:
    module = "attention" if name.endswith("Attention") else "callbacks"
    return Namespace(class_path=f"lit_effattn.{module}.{name}", init_args=Namespace(**options))


def config(attention: Any, *, callbacks: Any, segment_len: int | None = 8) -> Namespace:
    backbone = Namespace(class_path="Transformer", init_args=Namespace(attention=attention))
    return Namespace(
        model=Namespace(class_path="LanguageModel", init_args=Namespace(backbone=backbone)),
        data=Namespace(class_path="TextStream", init_args=Namespace(segment_len=segment_len)),
        trainer=Namespace(callbacks=callbacks),
    )


CARRY = kind("MemoryCarry")


def given(*flags: str, files: Sequence[dict[str, Any]] = ()) -> Arguments:
    return Arguments(["fit", *flags], [File("a.yaml", content) for content in files])


def file(*lengths: Any) -> dict[str, Any]:
    kinds = [{"class_path": "TransformerXLAttention", "init_args": {"mem_len": length}} for length in lengths]
    return {"model": {"init_args": {"backbone": {"init_args": {"attention": kinds}}}}}


def test_only_windows_that_are_null_are_set():
    kinds = [kind("SoftmaxAttention", window=None), kind("LinearAttention"), kind("ShawAttention", window=5)]
    set_windows(config(kinds, callbacks=[kind("FeatureRedraw"), CARRY]), given(files=[file(6)]))
    assert [k.get("init_args.window") for k in kinds] == [14, None, 5]
    assert "window" not in kinds[1].init_args


@pytest.mark.parametrize(
    ("callbacks", "mem_len", "segment_len"),
    [(None, 6, 8), ([kind("FeatureRedraw")], 6, 8), (CARRY, None, 8), (CARRY, 6, None)],
    ids=["no callbacks", "no memory is carried", "no memory length", "no segments"],
)
def test_nothing_is_invented(callbacks: Any, mem_len: int | None, segment_len: int | None):
    softmax = kind("SoftmaxAttention", window=None)
    set_windows(config(softmax, callbacks=callbacks, segment_len=segment_len), given(files=[file(mem_len)]))
    assert softmax.init_args.window is None


@pytest.mark.parametrize(
    ("files", "window"),
    [
        ([{"data": {"mem_len": 3}}], None),
        ([file(6), {"data": {"mem_len": 3}}], 14),
        ([file(6), file(7, 9), file("many")], 17),
    ],
)
def test_the_last_memory_length_counts(files: list[dict[str, Any]], window: int | None):
    softmax = kind("SoftmaxAttention", window=None)
    set_windows(config(softmax, callbacks=CARRY), given(files=files))
    assert softmax.init_args.window == window


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
    set_strides(config(kinds, callbacks=None), given(), lambda: data, resumes=False)
    assert kinds[1].init_args.stride == stride
    assert "stride" not in kinds[0].init_args


def test_data_are_made_only_for_the_kind_that_needs_them():
    made = config(kind("LinearAttention"), callbacks=None)
    set_strides(made, given(), lambda: pytest.fail("the data were made"), resumes=False)


@pytest.mark.parametrize(
    ("flags", "files", "resumes", "stride"),
    [
        (["--model.backbone.attention", "SparseAttention"], [], True, 11),
        (["--model.backbone.attention=[{class_path: my.SparseAttention}]"], [], True, 11),
        ([], [{"model": {"backbone": {"attention": "SparseAttention"}}}], True, 11),
        (["--model.backbone.attention.pattern", "strided"], [], False, 11),
        (["--data.root", "SparseAttention"], [], True, 128),
        (["--model.backbone.attention", "{class_path: SparseAttention, init_args: {stride: 128}}"], [], False, 128),
        ([], [{"model": {"init_args": {"backbone.attention.stride": 128}}}], False, 128),
    ],
)
def test_a_stride_that_is_stated_stays(flags: list[str], files: list[dict[str, Any]], resumes: bool, stride: int):
    """By a flag, a file, or the checkpoint that a run resumes."""
    sparse = kind("SparseAttention", stride=128)
    data = SimpleNamespace(segment_len=120)
    set_strides(config(sparse, callbacks=None), given(*flags, files=files), lambda: data, resumes=resumes)
    assert sparse.init_args.stride == stride


FEATURES = {"class_path": "lit_effattn.attention.PerformerAttention"}
MEMORY = {"class_path": "lit_effattn.attention.TransformerXLAttention"}


def stating(attention: Any = None, **model: Any) -> dict[str, Any]:
    backbone = {} if attention is None else {"backbone": {"init_args": {"attention": attention}}}
    return {"model": {"init_args": {**model, **backbone}}}


def run(*kinds: str) -> Namespace:
    made = config([kind(name) for name in kinds], callbacks=None)
    made.model.init_args.update(Namespace(eval_mem_len=9, eval_same_length=True))
    return made


def left(config: Namespace) -> tuple[Any, Any]:
    return config.model.init_args.eval_mem_len, config.model.init_args.eval_same_length


def test_what_was_for_the_replaced_attention_is_left_out():
    made = run("LinearAttention")
    leave_out(made, given(files=[stating(MEMORY, eval_mem_len=9)]))
    assert left(made) == (None, True)  # eval_same_length is of no file


@pytest.mark.parametrize(
    ("kinds", "files", "flags"),
    [
        (["LinearAttention"], [MEMORY], ["--model.eval_mem_len", "9"]),
        (["LinearAttention"], [MEMORY], ["--model={eval_mem_len: 9}"]),
        (["TransformerXLAttention"], [MEMORY], []),
        (["TransformerXLAttention"], [[FEATURES, MEMORY]], []),
        (["LinearAttention"], [None], []),
        (["TransformerXLAttention"], [FEATURES, MEMORY], []),
    ],
    ids=["given by flags", "in mappings", "the same kind", "one of its kinds", "for no kind", "replaced by a file"],
)
def test_settings_that_nobody_replaced_stay(kinds: list[str], files: list[Any], flags: list[str]):
    made = run(*kinds)
    *before, last = files
    leave_out(made, given(*flags, files=[*map(stating, before), stating(last, eval_mem_len=9)]))
    assert left(made) == (9, True)


def test_what_a_file_says_belongs_to_the_attention_of_the_files_before():
    made = run("LinearAttention")
    leave_out(made, given(files=[stating(MEMORY), stating(eval_mem_len=9), stating(FEATURES)]))
    assert left(made)[0] is None


class BlockSparseAttention(LinearAttention):
    """One of the user's own, without a stride."""


def test_a_kind_whose_name_ends_as_another_does_not_get_its_options():
    own = Namespace(class_path=f"{__name__}.BlockSparseAttention", init_args=Namespace())
    made = config(own, callbacks=None)
    set_strides(made, given(), lambda: SimpleNamespace(image_shape=(8, 8, 1)), resumes=False)
    assert "stride" not in own.init_args
