"""Models whose steps are exported: every kind with the options that the laws try, and what is around an attention."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from lit_effattn import LSTM, LanguageModel, PixelModel, Transformer
from lit_effattn.attention import (
    InfiniteAttention,
    LinearAttention,
    ReluFeatureMap,
    SoftmaxAttention,
    SparseAttention,
    TransformerXLAttention,
)
from lit_effattn.attention.positions import GridPositions, LearnedPositions, SinusoidalPositions
from lit_effattn.nn.heads import MixtureOfLogisticsHead
from tests.laws.cases import ATTENTIONS

N_TOKENS = 1000
IMAGE = (20, 25, 2)  # as many dimensions


def language_model(kind: Any, **options: Any) -> LanguageModel:
    options = {"positions": "auto", "init": "xavier"} | options
    return LanguageModel(Transformer(16, 2, 1, attention=kind, **options), 257, unit="byte", embedding_std=1.0)


def _pixel_model(kind: Any, **options: Any) -> PixelModel:
    return PixelModel(Transformer(16, 2, 1, attention=kind, **options), IMAGE, 8, head=MixtureOfLogisticsHead)


_linear, _softmax = partial(language_model, LinearAttention), partial(language_model, SoftmaxAttention)
_LEARNED = partial(LearnedPositions, max_len=N_TOKENS)
_SIGNAL = {"mem_len": 6, "segment_len": 6, "n_basis": 8, "widths": (0.1, 0.2), "n_samples": 7}

CASES: dict[str, Callable[[], LanguageModel | PixelModel]] = {
    **{case.name: partial(language_model, case.make) for case in ATTENTIONS if case.causal},
    "softmax, normalised": partial(language_model, partial(SoftmaxAttention, qk_norm=True, head_dim=6)),
    "sparse, two summaries": partial(language_model, partial(SparseAttention, stride=4, pattern="fixed", num_verts=2)),
    "linear, normalised": partial(language_model, partial(LinearAttention, qk_norm=True)),
    **{
        f"linear, floor={floor}": partial(
            language_model, partial(LinearAttention, feature_map=partial(ReluFeatureMap, floor=floor))
        )
        for floor in (0.0, 1e-9)
    },
    "LSTM": lambda: LanguageModel(LSTM(16, 2), 257, unit="byte", embedding_std=1.0),
    "linear, learned positions": partial(_linear, positions=_LEARNED),
    "softmax, learned positions": partial(_softmax, positions=_LEARNED),
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
        language_model, partial(InfiniteAttention, **_SIGNAL, norm_signal=False), norm_memory=True
    ),
    "softmax, images on a grid": partial(_pixel_model, SoftmaxAttention, positions=GridPositions),
    "linear, images on a grid": partial(_pixel_model, LinearAttention, positions=GridPositions),
}


def build(name: str) -> LanguageModel | PixelModel:
    """Make a model with random weights."""
    torch.manual_seed(0)
    return CASES[name]().eval()
