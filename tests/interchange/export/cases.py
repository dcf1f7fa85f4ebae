"""Models whose steps are exported: every kind, with each option that changes its graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from lit_effattn import LSTM, LanguageModel, PixelModel, Transformer
from lit_effattn.attention import (
    CompressiveAttention,
    DeltaNetAttention,
    EluFeatureMap,
    GatedDeltaNetAttention,
    GatedLinearAttention,
    HedgehogFeatureMap,
    InfiniteAttention,
    KimiDeltaAttention,
    LinearAttention,
    LSHAttention,
    Mamba2Attention,
    PerformerAttention,
    ReluFeatureMap,
    RetentionAttention,
    ShawAttention,
    SoftmaxAttention,
    SparseAttention,
    TransformerXLAttention,
    WindowedLinearAttention,
)
from lit_effattn.attention.positions import GridPositions, LearnedPositions, SinusoidalPositions
from lit_effattn.nn.heads import MixtureOfLogisticsHead

N_TOKENS = 1000
IMAGE = (20, 25, 2)  # as many dimensions


def language_model(kind: Any, **options: Any) -> LanguageModel:
    options = {"positions": "auto", "init": "xavier"} | options
    return LanguageModel(Transformer(16, 2, 1, attention=kind, **options), 257, unit="byte", embedding_std=1.0)


def _pixel_model(kind: Any, **options: Any) -> PixelModel:
    return PixelModel(Transformer(16, 2, 1, attention=kind, **options), IMAGE, 8, head=MixtureOfLogisticsHead)


_linear = partial(language_model, LinearAttention)


def _kind(
    name: str, cls: type, common: dict[str, Any], *variants: dict[str, Any] | str
) -> dict[str, Callable[[], Any]]:
    """Return a model with the options `common` alone, and one with each of `variants` too, by name.

    A variant may be a text such as `window=7, n_kv_heads=1`, and a text may hold several, with `;` between.
    """
    made = {}
    listed = [v for variant in variants for v in ([variant] if isinstance(variant, dict) else _parsed(variant))]
    for options in ({}, *listed):
        text = ", ".join(f"{option}={_text(value)}" for option, value in options.items())
        made[f"{name}, {text}" if text else name] = partial(language_model, partial(cls, **(common | options)))
    return made


def _parsed(text: str) -> list[dict[str, Any]]:
    return [eval(f"dict({variant})") for variant in text.split(";")]


def _text(value: Any) -> str:
    if isinstance(value, partial):
        return f"{value.func.__name__}({', '.join(f'{k}={v}' for k, v in value.keywords.items())})"
    return getattr(value, "__name__", str(value))


_LEARNED = partial(LearnedPositions, max_len=N_TOKENS)
_FIXED = "pattern='fixed'"
_INFINITE = {"mem_len": 6, "segment_len": 6, "n_basis": 8, "widths": (0.1, 0.2), "n_samples": 7}
_RELU = {"feature_map": partial(ReluFeatureMap, floor=0.0)}, {"feature_map": partial(ReluFeatureMap, floor=1e-9)}
_TRIGONOMETRIC = "features='trigonometric', n_features=64"

CASES: dict[str, Callable[[], LanguageModel | PixelModel]] = {
    **_kind("softmax", SoftmaxAttention, {}, "window=7; window=1; n_kv_heads=1; d_qk=6; head_dim=6; qk_norm=True"),
    **_kind("shaw", ShawAttention, {"max_distance": 4}, "window=7"),
    **_kind(
        *("sparse", SparseAttention, {"stride": 4}, "combine='heads'; combine='local'; combine='distant'; d_qk=6"),
        f"{_FIXED}; {_FIXED}, summary=2; {_FIXED}, summary=2, distinct=True; {_FIXED}, num_verts=2",
        f"{_FIXED}, combine='heads'; {_FIXED}, combine='local'; {_FIXED}, combine='distant'",
    ),
    **_kind("LSH", LSHAttention, {"n_hashes": 2, "n_buckets": 4, "chunk_size": 8}, "n_hashes=1; n_buckets=1"),
    **_kind(
        "linear", LinearAttention, {}, {"feature_map": ReluFeatureMap}, *_RELU, {"feature_map": HedgehogFeatureMap}
    ),
    **_kind("linear", LinearAttention, {}, "n_kv_heads=1; d_qk=6; qk_norm=True"),
    **_kind("performer", PerformerAttention, {}, f"features='hyperbolic'; {_TRIGONOMETRIC}; features='relu'"),
    **_kind("performer", PerformerAttention, {}, "features='relu', eps=0.0; eps=0.01; n_kv_heads=1"),
    **_kind("windowed linear", WindowedLinearAttention, {"window": 7}, "window=1", {"feature_map": EluFeatureMap}),
    **_kind("windowed linear", WindowedLinearAttention, {"window": 7}, "n_kv_heads=1; qk_norm=True"),
    **_kind("retention", RetentionAttention, {}),
    **_kind("gated linear", GatedLinearAttention, {}, "conv_size=4"),
    **_kind("Mamba-2", Mamba2Attention, {"qk_dim": 8}, "n_qk_heads=2"),
    **_kind("DeltaNet", DeltaNetAttention, {}, "conv_size=None; gate=True"),
    **_kind("Gated DeltaNet", GatedDeltaNetAttention, {}, "n_qk_heads=1"),
    **_kind("Kimi Delta", KimiDeltaAttention, {}),
    **_kind("Transformer-XL", TransformerXLAttention, {"mem_len": 7}, "clamp_len=3; same_length=True; share_uv=True"),
    **_kind(
        *("compressive", CompressiveAttention, {"mem_len": 5, "compressed_len": 4, "compression_rate": 2}),
        "mem_len=0; compression='mean'; compression='max'; segment_len=6; clamp_len=3",
    ),
    **_kind(
        *("∞-former", InfiniteAttention, _INFINITE, "writes='segment'; gate=True; sticky=True, n_bins=6"),
        "sticky=True, n_bins=6, sampling='bins'; grid='ends', tie_query=True, density_bias=False",
        "short_term='softmax', bias=True; mem_len=0; n_basis=0; clamp_len=3",
    ),
    "LSTM": lambda: LanguageModel(LSTM(16, 2), 257, unit="byte", embedding_std=1.0),
    "linear, learned positions": partial(language_model, LinearAttention, positions=_LEARNED),
    "softmax, learned positions": partial(language_model, SoftmaxAttention, positions=_LEARNED),
    "softmax, window=7, learned positions of a period": partial(
        language_model, partial(SoftmaxAttention, window=7), positions=partial(LearnedPositions, max_len=7, period=7)
    ),
    "linear, sinusoidal positions, norm=post": partial(_linear, positions=SinusoidalPositions, norm="post"),
    "linear, norm_kind=rms, activation=swiglu": partial(_linear, norm_kind="rms", activation="swiglu"),
    "linear, positions concatenated": partial(_linear, positions=SinusoidalPositions, position_width=4),
    "Transformer-XL, norm_memory=True": partial(
        language_model, partial(TransformerXLAttention, mem_len=7), norm_memory=True
    ),
    "∞-former, norm_signal=False, norm_memory=True": partial(
        language_model, partial(InfiniteAttention, **_INFINITE, norm_signal=False), norm_memory=True
    ),
    "softmax, images on a grid": partial(_pixel_model, SoftmaxAttention, positions=GridPositions),
    "linear, images on a grid": partial(_pixel_model, LinearAttention, positions=GridPositions),
}


def build(name: str) -> LanguageModel | PixelModel:
    """Make a model with random weights."""
    torch.manual_seed(0)
    return CASES[name]().eval()
