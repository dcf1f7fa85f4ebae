"""The models that are measured: the same `PixelModel` with linear, softmax or LSH attention."""

from functools import partial
from typing import NamedTuple

import torch

from lit_effattn import PixelModel, Transformer
from lit_effattn.attention import LinearAttention, LSHAttention, SoftmaxAttention
from lit_effattn.nn.heads import MixtureOfLogisticsHead

KINDS = {"linear": LinearAttention, "softmax": SoftmaxAttention}

LSH = "LSH-1"
"""Reformer's attention with one round of hashing, as Katharopoulos et al. 2020 measure it."""

IMAGES = {784: "784 (MNIST, 28×28×1)", 3072: "3072 (CIFAR-10, 32×32×3)"}


class Size(NamedTuple):
    """The size of a Transformer."""

    n_layers: int
    n_heads: int
    d_model: int

    def __str__(self) -> str:
        return f"{self.n_layers} layers, {self.n_heads} heads, E {self.d_model}"


MNIST = Size(8, 8, 256)
CIFAR = Size(16, 8, 256)
SMALL = Size(4, 4, 128)


def size_for(length: int, small: bool) -> Size:
    """Return the recipe of Katharopoulos et al. 2020 for images of `length` dimensions, or the small one."""
    if small:
        return SMALL
    return CIFAR if length >= 3072 else MNIST


def build(kind: str, length: int, size: Size, device: torch.device) -> PixelModel:
    """Make a model of images of `length` dimensions. Linear and softmax have equal initial weights."""
    torch.manual_seed(0)
    # Everything but the size is the paper's, as in configs/mnist_linear.yaml.
    attention = partial(LSHAttention, n_hashes=1, n_buckets=64, chunk_size=32) if kind == LSH else KINDS[kind]
    backbone = Transformer(
        size.d_model,
        size.n_heads,
        size.n_layers,
        attention=attention,
        position_width=size.d_model // 2,
        norm="post",
        final_norm=True,
        activation="relu",
        init="pytorch",
    )
    # As in the paper, the first dimension is not scored. The image's shape has no effect: positions are 1-D.
    return PixelModel(backbone, (length, 1, 1), head=MixtureOfLogisticsHead, score_first=False).to(device)


def random_levels(rows: int, length: int, device: torch.device) -> torch.Tensor:
    """Return random levels, (rows, length). The cost does not depend on them."""
    return torch.randint(0, 256, (rows, length), generator=torch.Generator().manual_seed(0)).to(device)
