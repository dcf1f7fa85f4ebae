"""Embedding and softmax for large vocabularies, sorted by frequency: rare tokens get narrow vectors."""

from __future__ import annotations

from functools import reduce
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_effattn import registry
from lit_effattn.checks import positive
from lit_effattn.nn.heads import Head
from lit_effattn.sequence import accumulator


class Bands(nn.Module):
    """The vectors of a vocabulary that is divided into frequency bands 0 … K, with a width for each band.

    Token w of band i has a row e_w of width d_i = d_model / div_value^i, and each band with d_i < d_model has a
    projection P_i (d_model, d_i). The token's vector is P_i e_w. An embedding and a softmax can share them.

    Args:
        n_tokens: Number of tokens, sorted by decreasing frequency.
        d_model: Width.
        cutoffs: The first token of each of the bands 1 … K.
        div_value: Factor by which each band is narrower than the previous one.
        proj_init_std: Initial standard deviation of the projections: 0.01 in the code of Dai et al. 2019. Default:
            d_i^−½, so that P_i e_w has the same scale in every band.

    Raises:
        ValueError: If `cutoffs` do not ascend within the vocabulary, a band would have a width of 0, or `proj_init_std`
            is not positive.
    """

    cutoffs: Tensor
    INIT_STD = 0.02

    def __init__(
        self, n_tokens: int, d_model: int, cutoffs: list[int], div_value: float, proj_init_std: float | None
    ) -> None:
        super().__init__()
        borders = [0, *cutoffs, n_tokens]
        if not cutoffs or any(a >= b for a, b in pairwise(borders)):
            raise ValueError(f"cutoffs={cutoffs} must ascend between 0 and {n_tokens}, the number of tokens")
        if not div_value >= 1 or d_model < div_value ** len(cutoffs):
            raise ValueError(
                f"div_value={div_value} with d_model={d_model} and {len(cutoffs)} cutoffs: it must be at least 1, and "
                "so must d_model / div_value^(number of cutoffs), the width of the last band"
            )
        positive(proj_init_std=proj_init_std)
        self.register_buffer("cutoffs", torch.tensor(cutoffs), persistent=False)
        self.starts = borders[:-1]
        self.sizes = [b - a for a, b in pairwise(borders)]
        widths = [int(d_model / div_value**i) for i in range(len(self.sizes))]
        self.rows = nn.ParameterList(torch.empty(n, d) for n, d in zip(self.sizes, widths, strict=True))
        self.projections = nn.ParameterList(torch.empty(d_model, d) for d in widths if d < d_model)
        for rows in self.rows:
            nn.init.normal_(rows, std=self.INIT_STD)
        for projection in self.projections:
            nn.init.normal_(projection, std=proj_init_std or projection.size(1) ** -0.5)

    def __len__(self) -> int:
        """Return K + 1."""
        return len(self.sizes)

    def of(self, tokens: Tensor) -> Tensor:
        """Return the band of each token: (…) -> (…). A token outside the vocabulary gets the nearest band."""
        return (tokens[..., None] >= self.cutoffs).sum(-1)

    def projection(self, band: int) -> Tensor | None:
        """Return P of a band, (d_model, d_i); None: the identity."""
        index = band - (len(self) - len(self.projections))  # the first bands have none
        return self.projections[index] if index >= 0 else None

    def describe(self) -> str:
        """Return the shapes of all rows, for error messages."""
        return ", ".join(f"{rows.size(0)} × {rows.size(1)}" for rows in self.rows)


class AdaptiveEmbedding(nn.Module):
    """An embedding whose rare tokens have narrow vectors, projected to the full width.

        y = P_i e_w,  w in band i                                              Baevski & Auli 2019, section 3

    P_0 is the identity, unless `project_first`. All bands are computed for every token and masked. Without P_0 and with
    a `div_value` of 4 this costs less than a third of a d_model × d_model matrix. Shapes do not depend on the data, and
    every parameter has a gradient in every process. Every band's vectors start with standard deviation 0.02.

    Args:
        n_tokens: Number of tokens, sorted by decreasing frequency.
        d_model: Width of the output.
        cutoffs: The first token of each band except band 0 (WikiText-103: 20000, 40000, 200000).
        div_value: Factor by which each band's vectors are narrower than the previous band's; 1: no projections.
        project_first: Whether band 0 has a projection P_0, too. It is not shared with a tied head. In the code of Dai
            et al. 2019 embedding and head have one each, if `div_value` is not 1.
        proj_init_std: Initial standard deviation of the projections: see `Bands`.

    Raises:
        ValueError: If an argument is out of range: see `Bands`.
    """

    def __init__(
        self,
        n_tokens: int,
        d_model: int,
        *,
        cutoffs: list[int],
        div_value: float = 4.0,
        project_first: bool = False,
        proj_init_std: float | None = None,
    ) -> None:
        super().__init__()
        self.bands = Bands(n_tokens, d_model, cutoffs, div_value, proj_init_std)
        self.first_proj = _square(d_model, proj_init_std) if project_first else None

    def forward(self, tokens: Tensor) -> Tensor:
        """(…) integers -> (…, d_model)."""
        band = self.bands.of(tokens)
        return reduce(torch.add, (self._vectors(i, tokens, band != i) for i in range(len(self.bands))))

    def _vectors(self, i: int, tokens: Tensor, outside: Tensor) -> Tensor:
        """Return the vectors (…, d_model) of tokens in band i, 0 for those `outside` of it."""
        row = (tokens - self.bands.starts[i]).masked_fill(outside, 0)
        e = F.embedding(row, self.bands.rows[i]).masked_fill(outside[..., None], 0)  # (…, d_i)
        if i == 0 and self.first_proj is not None:
            return self.first_proj(e)
        projection = self.bands.projection(i)
        return e if projection is None else F.linear(e, projection)  # (…, d_model)


class AdaptiveHead(Head):
    """A softmax over band 0's tokens and the K other bands, then a softmax over the tokens of a band.

        p(w) = softmax(E_0 h + b_0)_w                            w in band 0
        p(w) = softmax(E_0 h + b_0)_{band i} · softmax(E_i P_iᵀ h + b_i)_w      w in band i ≥ 1

    where the first softmax reads P_0ᵀ h in place of h if `project_first`. Grave et al. 2017, section 4, with the biases
    of Transformer-XL. `nll` computes the second softmax only where the target is in that band, so it never holds a
    position × vocabulary matrix. Under `torch.compile`, which needs shapes that do not depend on the data, it does. But
    `loss`, which training calls, is never compiled. `log_probs`, and a loss with label smoothing, hold the matrix.
    Every parameter gets a gradient from every batch, zero where a band has no target.

    Args:
        d_model: Width of the hidden state.
        n_levels: Number of tokens, sorted by decreasing frequency.
        cutoffs: See `AdaptiveEmbedding`.
        div_value: See `AdaptiveEmbedding`.
        project_first: Whether band 0 has a projection P_0, too: the head's own, even if the head is tied.
        proj_init_std: Initial standard deviation of the projections: see `Bands`.

    Raises:
        ValueError: If an argument is out of range: see `Bands`.
    """

    def __init__(
        self,
        d_model: int,
        n_levels: int,
        *,
        cutoffs: list[int],
        div_value: float = 4.0,
        project_first: bool = False,
        proj_init_std: float | None = None,
    ) -> None:
        super().__init__(d_model, n_levels)
        self.bands = Bands(n_levels, d_model, cutoffs, div_value, proj_init_std)
        self.first_proj = _square(d_model, proj_init_std) if project_first else None
        self.biases = nn.ParameterList(torch.zeros(n) for n in self.bands.sizes)
        self.band_proj = nn.Linear(d_model, len(cutoffs))
        nn.init.normal_(self.band_proj.weight, std=Bands.INIT_STD)
        nn.init.zeros_(self.band_proj.bias)

    def log_probs(self, h: Tensor) -> Tensor:
        """See `Head.log_probs`: (…, d_model) -> (…, n_levels)."""
        frequent, bands = self._first(h).log_softmax(-1).split([self.bands.sizes[0], len(self.bands) - 1], -1)
        rare = [self._within(h, i).log_softmax(-1) + bands[..., i - 1, None] for i in range(1, len(self.bands))]
        return torch.cat([frequent, *rare], -1)

    def nll(self, h: Tensor, target: Tensor) -> Tensor:
        """Return −log p(target) in nats: (…, d_model), (…) -> (…)."""
        if torch.compiler.is_compiling():
            return super().nll(h, target)
        h, flat = h.flatten(0, -2), target.flatten()  # (N, d_model), (N,)
        band = self.bands.of(flat)
        choice = torch.where(band == 0, flat, self.bands.sizes[0] + band - 1)
        nll = F.cross_entropy(self._first(h), choice, reduction="none")
        for i in range(1, len(self.bands)):
            of_band = (band == i).nonzero()[:, 0]  # computed even if empty: DDP waits for every gradient
            within = F.cross_entropy(
                self._within(h[of_band], i), flat[of_band] - self.bands.starts[i], reduction="none"
            )
            nll = nll.index_add(0, of_band, within)
        return nll.view(target.shape)

    @torch.compiler.disable(reason="which rows a band has depends on the data")
    def loss(self, h: Tensor, target: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """See `Head.loss`. Never compiled, so that it does not hold the whole matrix."""
        return super().loss(h, target, label_smoothing)

    def _first(self, h: Tensor) -> Tensor:
        """Return the logits of band 0's tokens and of the other bands: (…, d_model) -> (…, n_0 + K)."""
        h = h if self.first_proj is None else self.first_proj(h)
        logits = torch.cat([F.linear(h, self.bands.rows[0], self.biases[0]), self.band_proj(h)], -1)
        return logits.to(accumulator(logits.dtype))

    def _within(self, h: Tensor, band: int) -> Tensor:
        """Return the logits of a band's tokens: (…, d_model) -> (…, n_i)."""
        projection = self.bands.projection(band)
        h = h if projection is None else F.linear(h, projection.T)  # (…, d_i)
        logits = F.linear(h, self.bands.rows[band], self.biases[band])
        return logits.to(accumulator(logits.dtype))

    def tie(self, embedding: nn.Module) -> None:
        """Share the vectors and projections of an `AdaptiveEmbedding`, but not a P_0: see `Head.tie`."""
        if not isinstance(embedding, AdaptiveEmbedding):
            raise ValueError(
                f"AdaptiveHead can be tied only to an AdaptiveEmbedding, not to {type(embedding).__name__}"
            )
        of_head, of_embedding = self.bands.describe(), embedding.bands.describe()
        if of_head != of_embedding:
            raise ValueError(
                f"the head's bands are {of_head} (tokens × width) and the embedding's {of_embedding}: to tie them, use "
                "the same cutoffs and div_value for both, and a backbone whose d_input equals its d_model"
            )
        self.bands = embedding.bands


def _square(width: int, std: float | None) -> nn.Linear:
    """Return P_0, the projection of band 0."""
    projection = nn.Linear(width, width, bias=False)
    nn.init.normal_(projection.weight, std=std or width**-0.5)
    return projection


registry.enter(AdaptiveEmbedding, nn.Embedding)
