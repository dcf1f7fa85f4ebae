"""Autoregressive models of images: each value, given all before it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lit_effattn.attention.positions import bind
from lit_effattn.datamodules.images.pixels import levels_to_images
from lit_effattn.generation.sampling import Kept, generate
from lit_effattn.nn.heads import CategoricalHead, HeadFactory
from lit_effattn.sequence import SequenceModule, State
from lit_effattn.tasks.base import Objective, Task, check_backbone, check_integers
from lit_effattn.tasks.metrics import BitsPerDim, for_stages
from lit_effattn.tasks.options import ImageOptions
from lit_effattn.tasks.samples import write_images


class PixelModel(Task):
    """Models an image as the product of its dimensions' conditionals, in raster order (van den Oord et al. 2016).

        p(x) = Π_t p(x_t | x_1 … x_{t−1}),  bits/dim = −log2 p(x) / (H W C)

    The dimensions are the H·W·C values of an image, the channels of a pixel one after the other. The first dimension is
    predicted from a start token, so all H·W·C dimensions are scored. With `score_first=False` the first is not scored,
    as in Katharopoulos et al. 2020.

    Args:
        backbone: Causal; mixes the sequence.
        image_shape: Height, width, channels. From the command: those of the data.
        n_levels: Number of values of a dimension. From the command: that of the data.
        head: Makes the distribution over the levels. Default: CategoricalHead.
        embedding_std: Standard deviation of the initial embedding. 1 suits sinusoidal positions, whose values have that
            size (the 2017 paper multiplies its embedding by √E); 0.02 suits learned positions.
        ordinal_embedding: Initialise the embedding with waves of the level (see `ordinal_waves`) in place of noise, so
            that neighbouring levels start with similar vectors. This helps with levels that are rare in training.
        score_first: Whether the first dimension is scored, in the loss and in bits/dim.
        options: Arguments of `Task`: the optimiser and its schedule, and the weight of auxiliary losses.

    Raises:
        ValueError: If the backbone is not causal.
    """

    monitor = "val/bits_per_dim"
    fixed_by_data = ("image_shape", "n_levels")
    generation = ImageOptions
    in_progress_bar = ("train/bits_per_dim",)

    def __init__(
        self,
        backbone: SequenceModule,
        image_shape: tuple[int, int, int],
        n_levels: int = 256,
        head: HeadFactory | None = None,
        embedding_std: float = 1.0,
        ordinal_embedding: bool = False,
        score_first: bool = True,
        **options: Any,
    ) -> None:
        check_backbone(backbone, causal=True)
        super().__init__(**options)
        self.image_shape = tuple(image_shape)
        self.n_levels = n_levels
        self.n_dims = image_shape[0] * image_shape[1] * image_shape[2]
        self.score_first = score_first
        bind(backbone, image_shape)
        self.embedding = nn.Embedding(n_levels + 1, backbone.d_input)  # the last is the start token
        nn.init.normal_(self.embedding.weight, std=embedding_std)
        if ordinal_embedding:
            self.embedding.weight.data[:n_levels] = embedding_std * ordinal_waves(n_levels, backbone.d_input)
        self.backbone = backbone
        # Not as the argument's default: see `Task`.
        self.head = (head or CategoricalHead)(backbone.d_model, n_levels)
        self.scores = for_stages({"bits_per_dim": BitsPerDim})

    def nll(self, levels: Tensor) -> Tensor:
        """Return −log p in nats of every scored dimension: (B, H·W·C) integer levels -> (B, H·W·C), or one less.

        Raises:
            ValueError: If the images have another size than the model's, or unknown levels.
        """
        self.check_batch(levels)
        levels = levels.long()
        hidden, _ = self.hidden(levels)
        return self._scored(self.head.nll(hidden, levels))

    def hidden(self, batch: Tensor, memory: State | None = None) -> tuple[Tensor, State]:
        """Return the backbone's output (B, H·W·C, d_model), continuing from `memory`, and its state after it."""
        return self.backbone(self.embedding(self._prompt(batch.long()[:, :-1])), memory)

    def _scored(self, nll: Tensor) -> Tensor:
        return nll if self.score_first else nll[:, 1:]

    def forward(self, levels: Tensor) -> Tensor:
        """Return bits/dim of each image: (B, H·W·C) -> (B,)."""
        nll = self.nll(levels)
        return nll.mean(1) / math.log(2)

    def objective(self, batch: Tensor, memory: State | None = None) -> Objective:
        """Return the mean over the batch's dimensions, in nats, with auxiliary losses. There is no memory."""
        levels = batch.long()
        hidden, state = self.hidden(levels, memory)
        loss = self._scored(self.head.loss(hidden, levels)).mean()
        figures = {"train/bits_per_dim": loss.detach() / math.log(2)}
        n_scored = torch.full((), batch.size(0), device=loss.device)
        return self.with_auxiliary(loss, figures, state, n_scored=n_scored)

    def predict_step(self, batch: Tensor) -> dict[str, Tensor]:
        """Return bits/dim of each image, (B,)."""
        return {"bits_per_dim": self(batch)}

    def score(self, stage: str, batch: Tensor) -> dict[str, Any]:
        """Update the bits/dim."""
        metrics: Any = self.scores[stage]
        metrics["bits_per_dim"](self.nll(batch))
        return dict(metrics.items())

    write_samples = write_images

    @torch.no_grad()
    def sample(
        self,
        n: int = 1,
        *,
        given: Tensor | None = None,
        n_dims: int | None = None,
        kept: Kept | None = None,
        keep: Callable[[Kept], None] | None = None,
        **options: Any,
    ) -> Tensor:
        """Draw images.

        Args:
            n: Number of images.
            given: (n, P) levels of the first P dimensions of each image, which the model completes. `n` is ignored.
            n_dims: Number of dimensions to draw. Default: the rest of the image.
            kept: Go on from here, in place of `given`. Its tokens are the levels (n, P) so far. `n` is ignored.
            keep: Called at the end with what a later call takes as `kept`.
            options: Options of `generation.generate`, such as `temperature`, `top_k`, `top_p`, `seed` and `progress`.

        Returns:
            (n, H·W·C) levels, `given` included; with `n_dims`, those so far.

        Raises:
            ValueError: If `given` is not a tensor of levels, or has too few dimensions left to draw.
        """
        if kept is not None:
            given = kept.tokens
        elif given is None:
            given = torch.empty(n, 0, dtype=torch.long)
        self._check_levels(given)
        given = given.to(self.device).long()
        n_left = self.n_dims - given.size(1)
        n_dims = n_left if n_dims is None else n_dims
        if not 1 <= n_dims <= n_left:
            raise ValueError(
                f"n_dims={n_dims}: {given.size(1)} of an image's {self.n_dims} dimensions are given, {n_left} are left "
                "to draw"
            )
        prompt, ends = self._prompt(given), list[Kept]()
        if kept is not None:
            prompt, kept = given[:, :0], replace(kept, tokens=given[:, -1:])
        with self.in_evaluation():
            how: Any = {"kept": kept, "keep": ends.append, **options}
            drawn = generate(self.backbone, self.embedding, self.head, prompt, n_dims, **how)
            levels = torch.cat([given, drawn], 1)
            if keep is not None:
                keep(replace(ends[0], tokens=levels))
        return levels

    def to_images(self, levels: Tensor) -> Tensor:
        """(n, H·W·C) levels -> (n, C, H, W) uint8, 0 black and 255 white."""
        h, w, c = self.image_shape
        return levels_to_images(levels, (h, w, c), self.n_levels)

    def _prompt(self, levels: Tensor) -> Tensor:
        """Put the start token before `levels`: (B, P) -> (B, P + 1)."""
        return nn.functional.pad(levels, (1, 0), value=self.n_levels)

    def check_batch(self, levels: Tensor) -> None:
        """Raise ValueError if images have another size or unknown levels: see `Task.check_batch`."""
        if not isinstance(levels, Tensor):
            raise ValueError(
                f"the batch is a {type(levels).__name__}, not a tensor of levels; give images alone, without classes"
            )
        if levels.dim() != 2 or levels.size(1) != self.n_dims:
            h, w, c = self.image_shape
            raise ValueError(
                f"images have shape {tuple(levels.shape)}, but a model of {h}×{w}×{c} images expects "
                f"(batch, {self.n_dims})"
            )
        self._check_levels(levels)

    def _check_levels(self, levels: Tensor) -> None:
        if levels.is_floating_point() or levels.is_complex():
            raise ValueError(
                f"images have dtype {levels.dtype}, not integer levels 0 … {self.n_levels - 1}; of values from 0 to 1 "
                f"make them by (x * {self.n_levels - 1}).round().long()"
            )
        check_integers(levels, "level", 0, self.n_levels - 1, f"n_levels={self.n_levels}")


def ordinal_waves(n_levels: int, width: int) -> Tensor:
    """Return (n_levels, width) smooth functions of the level, of mean square 1.

        √2 sin(2π f_i x), √2 cos(2π f_i x),  x = level / (n_levels − 1)

    with frequencies f_i in geometric series, from a quarter of a wave over all levels to one wave over eight levels.

    Args:
        n_levels: Number of levels.
        width: Number of functions.
    """
    x = torch.linspace(0, 1, n_levels)[:, None]
    highest = max(1.0, n_levels / 8)
    f = 0.25 * (4 * highest) ** torch.linspace(0, 1, -(-width // 2))
    angle = 2 * math.pi * f * x  # (n_levels, width / 2)
    return math.sqrt(2) * torch.cat([angle.sin(), angle.cos()], 1)[:, :width]
