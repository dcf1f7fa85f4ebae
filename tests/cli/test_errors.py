"""Settings that jsonargparse rejects: the message names the option, the value and the type, or the nearest name."""

import re

import pytest

from lit_effattn.cli.errors import fault
from lit_effattn.settings.arguments import Arguments
from tests.support.commands import fails

MODEL = ["--model=PixelModel", "--model.backbone=Transformer"]
DATA = ["--data=PixelSequences"]
TEXT = ["--model=LanguageModel", "--model.backbone=Transformer"]
XL = [*TEXT, "--model.backbone.attention=TransformerXLAttention"]
KNOWN = ["model", "data", "seed_everything", "trainer.max_epochs", "trainer.callbacks"]


def complaint(*args: str) -> str:
    """Return the message for these settings of `test`, which needs neither model nor data."""
    message = fault(Arguments(["test", *args]), KNOWN)
    assert message is not None
    assert len(message) < 400, message
    assert not re.search(r"Namespace|NestedArg|Parser key|Subtypes|Does not validate|<class|\n|typing\.", message), (
        message
    )
    return message


def test_an_unknown_option():
    for args, place, owner, name, suggestion in (
        (["--model.backbone.d_mode=8"], "model.backbone", "Transformer", "d_mode", "d_model"),
        (["--model.embeding_std=8"], "model", "PixelModel", "embeding_std", "embedding_std"),
        (["--model.head=MixtureOfLogisticsHead", "--model.head.mixtures=5"], "model.head", "", "mixtures", ""),
        (
            ["--model.backbone.attention=LinearAttention", "--model.backbone.attention.chunk=5"],
            "model.backbone.attention",
            "LinearAttention",
            "chunk",
            "chunk_size",
        ),
        (["--model.optimizer=torch.optim.AdamW", "--model.optimizer.lrr=1"], "model.optimizer", "AdamW", "lrr", "lr"),
        (
            ["--model.lr_scheduler=WarmupCosine", "--model.lr_scheduler.total=9"],
            "model.lr_scheduler",
            "WarmupCosine",
            "total",
            "total_steps",
        ),
        ([*DATA, "--data.batchsize=9"], "data", "PixelSequences", "batchsize", "batch_size"),
        ([*XL, "--model.backbone.attention.mem_length=9"], "model.backbone.attention", "", "mem_length", "mem_len"),
        (
            [*TEXT, "--model.embedding=AdaptiveEmbedding", "--model.embedding.cutofs=[5]"],
            "model.embedding",
            "AdaptiveEmbedding",
            "cutofs",
            "cutoffs",
        ),
    ):
        message = complaint(*MODEL, *args)
        assert message.startswith(f"{place}: {owner}")
        assert f"has no option '{name}'" in message
        assert f"did you mean {suggestion}" in message


def test_an_unknown_option_like_none_lists_those_there_are():
    message = complaint(*MODEL, "--model.backbone.attention=LinearAttention", "--model.backbone.attention.zzz=1")
    for option in ("chunk_size", "feature_map", "bias"):
        assert option in message
    assert "self" not in message


def test_an_unknown_class():
    for arg, place, name, suggestion in (
        ("--model=PixelModle", "model", "PixelModle", "PixelModel"),
        ("--data=PixelSequence", "data", "PixelSequence", "PixelSequences"),
        ("--model.backbone=Transformr", "model.backbone", "Transformr", "Transformer"),
        ("--model.backbone.attention=LinearAtention", "model.backbone.attention", "LinearAtention", "LinearAttention"),
        (
            "--model.backbone.attention=[LinearAttention, SoftmaxAtention]",
            "model.backbone.attention",
            "SoftmaxAtention",
            "SoftmaxAttention",
        ),
        ("--model.backbone.positions=GridPosition", "model.backbone.positions", "GridPosition", "GridPositions"),
        ("--model.head=MixtureOfLogistics", "model.head", "MixtureOfLogistics", "MixtureOfLogisticsHead"),
        ("--model.embedding=AdaptiveEmbeding", "model.embedding", "AdaptiveEmbeding", "AdaptiveEmbedding"),
        ("--model.optimizer=AdamX", "model.optimizer", "AdamX", "Adam"),
        ("--model.lr_scheduler=WarmupCos", "model.lr_scheduler", "WarmupCos", "WarmupCosine"),
    ):
        message = complaint(*(TEXT if "embedding" in arg else MODEL), arg)
        assert message == f"{place}: there is no class '{name}'; did you mean {suggestion}?"


def test_an_unknown_class_like_none_lists_those_there_are():
    message = complaint(*MODEL, "--model.backbone.positions=zzz")
    for name in ("GridPositions", "LearnedPositions", "RotaryPositions", "SinusoidalPositions"):
        assert name in message
    assert " Positions" not in message  # abstract: it can't be had
    assert complaint(*TEXT, "--model.embedding=zzz") == "model.embedding: there is no class 'zzz'"  # of hundreds
    message = complaint(*MODEL, "--model.backbone.attention=zzz")
    listed = message.partition("there are ")[2].partition(" and ")[0].split(", ")
    assert len(listed) == 16
    assert {"DeltaNetAttention", "LinearAttention"} <= {*listed}


def test_a_value_of_the_wrong_kind():
    for args, place, value, expected in (
        (["--model.backbone.d_model=abc"], "model.backbone.d_model", "abc", ["int"]),
        (["--model.backbone.d_model=8.5"], "model.backbone.d_model", "8.5", ["int"]),
        (["--model.backbone.dropout=much"], "model.backbone.dropout", "much", ["float"]),
        (["--model.backbone.causal=maybe"], "model.backbone.causal", "maybe", ["bool"]),
        (["--model.backbone.d_ff=wide"], "model.backbone.d_ff", "wide", ["int"]),
        (["--model.backbone.norm=middle"], "model.backbone.norm", "middle", ["one of", "'pre'", "'post'"]),
        (["--model.image_shape=[2,2]"], "model.image_shape", "[2, 2]", ["tuple[int, int, int]"]),
        ([*DATA, "--data.dataset=cats"], "data.dataset", "cats", ["one of", "'digits'", "'cifar10'"]),
        ([*DATA, "--data.eval_batch_size=many"], "data.eval_batch_size", "many", ["int"]),
        ([*XL, "--model.backbone.attention.mem_len=x"], "model.backbone.attention.mem_len", "x", ["int"]),
        ([*TEXT, "--model.unit=bit"], "model.unit", "bit", ["one of", "'byte'", "'character'", "'token'"]),
        ([*DATA, "--data.channels=2"], "data.channels", "2", ["one of", "1", "3"]),
        (
            ["--model.backbone.attention=SoftmaxAttention", "--model.backbone.attention.window=wide"],
            "model.backbone.attention.window",
            "wide",
            ["int"],
        ),
        (
            ["--model.backbone.attention=LinearAttention", "--model.backbone.attention.chunk_size=wide"],
            "model.backbone.attention.chunk_size",
            "wide",
            ["int"],
        ),
        (
            ["--model.lr_scheduler=WarmupCosine", "--model.lr_scheduler.total_steps=many"],
            "model.lr_scheduler.total_steps",
            "many",
            ["int"],
        ),
        (
            ["--model.optimizer=torch.optim.AdamW", "--model.optimizer.weight_decay=heavy"],
            "model.optimizer.weight_decay",
            "heavy",
            ["float"],
        ),
    ):
        message = complaint(*MODEL, *args)
        assert message.startswith(f"{place}={value} is not "), message
        for word in expected:
            assert word in message


def test_options_of_the_trainer():
    for arg, words in (
        ("--trainer.max_epochs=many", ["trainer.max_epochs", "many", "int"]),
        ("--trainer.gradient_clip_val=[", ["trainer.gradient_clip_val"]),
        ("--trainer.callbacks=[{class_path: SampleGrid, init_args: {n_sample: 3}}]", ["SampleGrid", "n_sample"]),
        ("--trainer.callbacks=[SampleGrit]", ["SampleGrit", "did you mean SampleGrid?"]),
        ("--trainer.max_epox=3", ["--trainer.max_epox"]),
    ):
        message = complaint(arg)
        for word in words:
            assert word in message


def test_an_option_of_a_class_that_was_not_named():
    """The attention's class is the default; jsonargparse then can't know whose option it is."""
    message = complaint(*MODEL, "--model.backbone.attention.chunk_size=5")
    assert message.startswith("model.backbone.attention")
    assert "chunk_size" in message
    assert "class" in message
    message = complaint(*TEXT, "--model.embedding.cutoffs=[5]")
    assert message.endswith("name the class that option 'cutoffs' belongs to first, --model.embedding CLASS")


def test_an_option_that_a_class_needs():
    message = complaint(*TEXT)
    assert message.startswith("model.backbone needs d_model, n_heads, n_layers: give --model.backbone.d_model VALUE")
    sizes = ["--model.backbone.d_model=8", "--model.backbone.n_heads=2", "--model.backbone.n_layers=1"]
    message = complaint(*TEXT, *sizes, "--model.embedding=AdaptiveEmbedding")
    assert message.startswith("model.embedding needs cutoffs: give --model.embedding.cutoffs VALUE")


def test_settings_without_a_fault_that_is_found_here():
    assert (
        fault(
            Arguments(["test", *TEXT[:1], "--model.backbone=LSTM", "--model.backbone={d_model: 8, n_layers: 1}"]), KNOWN
        )
        is None
    )
    assert fault(Arguments(["test", "--trainer.strategy=ddp", "--trainer.max_epochs=null"]), KNOWN) is None


def test_fit_without_anything(capsys: pytest.CaptureFixture[str]):
    message = fails(capsys, "fit", code=2)
    for word in ("--config", "digits_linear", "--model", "--data"):
        assert word in message


PAIRS = ["--model", "SequenceToSequence", "--data", "SequencePairs", "--model.backbone", "EncoderDecoder"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--model.backbone.decoder", "Transformer", "--model.backbone.decoder.cross_attention", "LSHAttention"],
            "model.backbone.decoder.cross_attention: LSHAttention is not a CrossAttention; there are "
            "LinearCrossAttention, PerformerCrossAttention, SoftmaxCrossAttention",
        ),
        (
            ["--model.backbone.decoder", "Transfomer"],
            "model.backbone.decoder: there is no class 'Transfomer'; did you mean Transformer?",
        ),
    ],
    ids=["self-attention", "misspelt"],
)
def test_a_class_of_another_kind_is_named(flags: list[str], said: str):
    assert complaint(*PAIRS, *flags) == said
