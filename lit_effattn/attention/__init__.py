"""The attention kinds. Each is one file: a class, its state, its equation."""

from lit_effattn.attention.base import Attention, AttentionFactory
from lit_effattn.attention.compressive import CompressiveAttention
from lit_effattn.attention.cross import (
    CrossAttention,
    CrossAttentionFactory,
    LinearCrossAttention,
    PerformerCrossAttention,
    SoftmaxCrossAttention,
)
from lit_effattn.attention.feature_maps import EluFeatureMap, FeatureMap, HedgehogFeatureMap, ReluFeatureMap
from lit_effattn.attention.infinite import InfiniteAttention
from lit_effattn.attention.linear import LinearAttention
from lit_effattn.attention.lsh import LSHAttention
from lit_effattn.attention.memory import MemoryAttention
from lit_effattn.attention.performer import PerformerAttention
from lit_effattn.attention.recurrent import RecurrentAttention
from lit_effattn.attention.recurrent_kinds import (
    DeltaNetAttention,
    GatedDeltaNetAttention,
    GatedLinearAttention,
    KimiDeltaAttention,
    Mamba2Attention,
    RetentionAttention,
)
from lit_effattn.attention.shaw import ShawAttention
from lit_effattn.attention.softmax import SoftmaxAttention
from lit_effattn.attention.sparse import SparseAttention
from lit_effattn.attention.transformer_xl import TransformerXLAttention
from lit_effattn.attention.windowed_linear import WindowedLinearAttention

__all__ = [
    "Attention",
    "AttentionFactory",
    "CompressiveAttention",
    "CrossAttention",
    "CrossAttentionFactory",
    "DeltaNetAttention",
    "EluFeatureMap",
    "FeatureMap",
    "GatedDeltaNetAttention",
    "GatedLinearAttention",
    "HedgehogFeatureMap",
    "InfiniteAttention",
    "KimiDeltaAttention",
    "LSHAttention",
    "LinearAttention",
    "LinearCrossAttention",
    "Mamba2Attention",
    "MemoryAttention",
    "PerformerAttention",
    "PerformerCrossAttention",
    "RecurrentAttention",
    "ReluFeatureMap",
    "RetentionAttention",
    "ShawAttention",
    "SoftmaxAttention",
    "SoftmaxCrossAttention",
    "SparseAttention",
    "TransformerXLAttention",
    "WindowedLinearAttention",
]
