"""The attention kinds. Each is one file: a class, its state, its equation."""

from lit_effattn.attention.base import Attention, AttentionFactory
from lit_effattn.attention.linear import EluFeatureMap, FeatureMap, LinearAttention, ReluFeatureMap
from lit_effattn.attention.softmax import SoftmaxAttention

__all__ = [
    "Attention",
    "AttentionFactory",
    "EluFeatureMap",
    "FeatureMap",
    "LinearAttention",
    "ReluFeatureMap",
    "SoftmaxAttention",
]
