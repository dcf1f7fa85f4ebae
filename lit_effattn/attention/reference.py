"""Each kind of attention by its definition: the equation of its paper, in plain O(N²) or one position at a time.

For readers, and for the tests, which compare every kind with it. No other module of the package uses this one, so it
stays independent of what it verifies. It is slow, and imports torch, math and itertools alone.

Shapes: batch B, heads H, queries N, keys M, width E, dimensions of a head D, features F. Queries are (B, H, N, D), keys
and values (B, H, M, D), and so are the outputs: a kind's projections come before and after. `seen` is (N, M) booleans,
or (H, N, M), or (B, H, N, M): whether a query sees a key.
"""

import itertools
import math

import torch
from torch import Tensor

# ------------------------------------------------------------------------------------------------ what a query sees


def everything(n: int, m: int) -> Tensor:
    """Every query sees every key: (N, M)."""
    return torch.ones(n, m, dtype=torch.bool)


def past(n: int, window: int | None = None) -> Tensor:
    """Position i sees i − window < j ≤ i, or without a window all j ≤ i: (N, N)."""
    distance = distances(n)
    return (distance >= 0) & (distance < (window or n))


def distances(n: int) -> Tensor:
    """The distance i − j of each query i and key j: (N, N)."""
    return torch.arange(n)[:, None] - torch.arange(n)


# ------------------------------------------------------------------------------------------------ queries and keys


def rotated(x: Tensor, base: float) -> Tensor:
    """Rotary positions, Su et al. 2021, equation 13.

        x_t,d + 𝑖 x_t,d+D/2  ←  (x_t,d + 𝑖 x_t,d+D/2) exp(𝑖 t base^(−2d/D)),  d = 0 … D/2 − 1

    (B, H, N, D) queries or keys at the positions t = 0 … N − 1 -> (B, H, N, D).
    """
    n, d = x.shape[-2:]
    angle = torch.arange(n, dtype=torch.float64)[:, None] * base ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    real, imaginary = x.chunk(2, -1)  # (B, H, N, D / 2) each
    turned = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], -1)  # (B, H, N, D)


def rms_normalised(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Normalised queries or keys, Yang et al. 2025 (Qwen3), section 2.

        x  ←  g ⊙ x / √(mean(x²) + ε)

    (B, H, N, D) queries or keys and a gain g (D,) -> (B, H, N, D).
    """
    return gain * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def for_groups(x: Tensor, n_heads: int) -> Tensor:
    """Grouped-query attention, Ainslie et al. 2023: consecutive heads share keys and values.

    (B, H_kv, M, D) -> (B, H, M, D)
    """
    return torch.stack([x[:, h * x.size(1) // n_heads] for h in range(n_heads)], 1)


# ------------------------------------------------------------------------------------------------ SoftmaxAttention


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Vaswani et al. 2017, equation 1.

        y_i = Σ_j softmax_j(q_i · k_j / √D) v_j

    (B, H, N, D) queries, (B, H, M, D) keys and values -> (B, H, N, D).
    """
    scores = q @ k.mT / math.sqrt(q.size(-1))  # (B, H, N, M)
    return softmax_over(scores, seen) @ v


def softmax_over(scores: Tensor, seen: Tensor) -> Tensor:
    """The softmax over the keys that a query sees.

        exp(s_ij) / Σ_{j seen by i} exp(s_ij), 0 where j is not seen

    (B, H, N, M) scores -> (B, H, N, M).
    """
    return scores.masked_fill(~seen, -math.inf).softmax(-1)


# ------------------------------------------------------------------------------------------------ ShawAttention


def shaw_attention(
    q: Tensor, k: Tensor, v: Tensor, key_table: Tensor, value_table: Tensor, seen: Tensor, *, max_distance: int
) -> Tensor:
    """Shaw et al. 2018, equations 3 and 4.

        y_i = Σ_j softmax_j(q_i · (k_j + aᵏ_d) / √D) (v_j + aᵛ_d),  d = clip(j − i, −K, K)

    with K = `max_distance`. The tables (2K + 1, D) hold aᵏ_d and aᵛ_d for d = −K … K; (K + 1, D), d ≤ 0, if causal.
    """
    n, d = q.shape[-2:]
    row = (-distances(n)).clamp(-max_distance, len(key_table) - 1 - max_distance) + max_distance  # (N, N)
    a_k, a_v = key_table[row], value_table[row]  # (N, N, D)
    scores = torch.einsum("bhid,bhijd->bhij", q, k[:, :, None] + a_k) / math.sqrt(d)
    return torch.einsum("bhij,bhijd->bhid", softmax_over(scores, seen), v[:, :, None] + a_v)


# ------------------------------------------------------------------------------------------ TransformerXLAttention


def transformer_xl_attention(q: Tensor, k: Tensor, v: Tensor, r: Tensor, u: Tensor, w: Tensor, seen: Tensor) -> Tensor:
    """Dai et al. 2019, section 3.3, the terms (a) + (c) and (b) + (d).

        y_i = Σ_j softmax_j(((q_i + u) · k_j + (q_i + w) · W_r R_{i−j}) / √D) v_j

    `r` (N, M, H, D) is W_r R_{i−j}, see `relative_vectors`; `u` and `w` (H, D) are the paper's u and v.
    """
    content = (q + u[:, None]) @ k.mT  # (B, H, N, M)
    position = torch.einsum("bhid,ijhd->bhij", q + w[:, None], r)  # (B, H, N, M)
    return softmax_over((content + position) / math.sqrt(q.size(-1)), seen) @ v


def relative_vectors(distance: Tensor, weight: Tensor, clamp_len: int | None = None) -> Tensor:
    """Dai et al. 2019, section 3.3, with the sinusoids of Vaswani et al. 2017, section 3.5.

        W_r R_d,  R_d = [sin(d ω_0), sin(d ω_1), …, cos(d ω_0), cos(d ω_1), …],  ω_i = 10000^(−2i/E)

    (N, M) distances d, clamped to ± `clamp_len`, and W_r (E, E) -> (N, M, E).
    """
    e = weight.size(1)
    if clamp_len is not None:
        distance = distance.clamp(-clamp_len, clamp_len)
    angle = distance[..., None] * 10000.0 ** (-torch.arange(0, e, 2, dtype=torch.float64) / e)  # (N, M, E / 2)
    r = torch.cat([angle.sin(), angle.cos()], -1).to(weight.dtype)  # (N, M, E)
    return r @ weight.T


# -------------------------------------------------------------------------------------------- CompressiveAttention


def compressive_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    summary_k: Tensor,
    summary_v: Tensor,
    r_weight: Tensor,
    u: Tensor,
    w: Tensor,
    *,
    mem_len: int,
    compressed_len: int,
    compression_rate: int,
    segment_len: int = 1,
    clamp_len: int | None = None,
) -> Tensor:
    """Rae et al. 2019, algorithm 1, one position t at a time.

        y_t = Transformer-XL's attention to [the newest summaries b < s; x_{cs}, …, x_t]
        s = ⌊max(0, L ⌊t/L⌋ − mem_len) / c⌋,  L = `segment_len`,  c = `compression_rate`

    of at most `compressed_len` summaries. The distance of a key is the number of keys after it. `summary_k` and
    `summary_v` (B, H, ⌊N/c⌋, D) are W_k and W_v of the summaries: see `compress`. `r_weight` is W_r; the others are as
    in `transformer_xl_attention`.
    """
    y = []
    for t in range(q.size(2)):
        s = max(0, t // segment_len * segment_len - mem_len) // compression_rate
        inputs = slice(s * compression_rate, t + 1)
        keys = torch.cat([summary_k[:, :, :s][:, :, -compressed_len:], k[:, :, inputs]], 2)  # (B, H, M, D)
        values = torch.cat([summary_v[:, :, :s][:, :, -compressed_len:], v[:, :, inputs]], 2)
        distance = torch.arange(keys.size(2)).flip(0)[None]  # (1, M)
        r = relative_vectors(distance, r_weight, clamp_len).unflatten(-1, u.shape)  # (1, M, H, D)
        y.append(transformer_xl_attention(q[:, :, t : t + 1], keys, values, r, u, w, everything(*distance.shape)))
    return torch.cat(y, 2)


def compress(
    x: Tensor, rate: int, compression: str, weight: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Rae et al. 2019, section 3: summary b of c = `rate` inputs, (B, N, E) -> (B, ⌊N/c⌋, E).

        "conv": Σ_i W_i x_{bc+i} + β,  "mean": Σ_i x_{bc+i} / c,  "max": max_i x_{bc+i},  i = 0 … c − 1

    `weight` (E, c, E) holds the W_i, of output and input; `bias` (E,) is β.
    """
    b, n, e = x.shape
    windows = x[:, : n // rate * rate].reshape(b, n // rate, rate, e)  # (B, K, c, E)
    if compression == "mean":
        return windows.mean(2)
    if compression == "max":
        return windows.max(2).values
    y = torch.einsum("bkce,fce->bkf", windows, weight)
    return y if bias is None else y + bias


# ------------------------------------------------------------------------------------------------ InfiniteAttention


def recent_segments(n: int, mem_len: int, segment_len: int) -> Tensor:
    """The inputs that ∞-former attends to directly: those that have not left the memory in whole segments.

        t sees L max(0, ⌊(t − mem_len) / L⌋) ≤ j ≤ t,  L = `segment_len`

    Positions of a stream take the place of the paper's calls, so this is `InfiniteAttention`'s definition. (N, N), for
    `transformer_xl_attention`.
    """
    t = torch.arange(n)
    first = ((t - mem_len).clamp(min=0) // segment_len * segment_len)[:, None]  # (N, 1)
    return past(n) & (t >= first)


def infinite_attention(
    q: Tensor,
    x: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    density_weight: Tensor,
    density_bias: Tensor | None,
    centre: Tensor,
    width: Tensor,
    *,
    delay: int,
    segment_len: int,
    ridge: float,
    tau: float,
    n_samples: int,
    grid: str = "midpoints",
    sticky: bool = False,
    n_bins: int = 0,
    draws: Tensor | None = None,
) -> Tensor:
    """∞-former's attention to the past as a signal, Martins et al. 2022, sections 2.2 and 3.

        y_t = Σ_j E_{τ ~ N(μ_t, σ_t²)}[ψ_j(τ)] W_v B_j,  s_tj = q_t · W_k B_j / √D
        μ_t = sigmoid(w_μ · s_t + b_μ),  σ_t² = softplus(w_σ · s_t + b_σ)

    The signal is X̄(τ) = Bᵀ ψ(τ). Position t reads that of the segments which ended `delay` or more positions before it,
    0 if there is none. Each segment updates it: see `updated_signal`. All tensors are float64.

    Args:
        q: (B, H, N, D), the queries to the signal.
        x: (B, N, E), what is written to the signal: see `gated`.
        key_weight: W_k, (E, E).
        value_weight: W_v, (E, E).
        density_weight: w_μ and w_σ, (2, K), K the number of basis functions ψ.
        density_bias: b_μ and b_σ, (2,); None: 0.
        centre: μ_j of the ψ_j, (K,): see `centres_widths`.
        width: σ_j of the ψ_j, (K,).
        delay: Positions from the end of a segment to the first that reads a signal with it.
        segment_len: L.
        ridge: λ of `fit`.
        tau: τ of `updated_signal`.
        n_samples: M of `updated_signal`.
        grid: That of `updated_signal`.
        sticky: Whether the old signal is sampled where it was attended to: see `quantiles`.
        n_bins: Bins of the histogram of the densities, if `sticky`.
        draws: (U, M), the parts of the histogram's mass at which update 0, 1, … samples, if bins are drawn. None: the
            midpoints of M equal parts.

    Returns:
        The heads (B, H, N, D); the caller has W_o.
    """
    b, h, n, d = q.shape
    signal, written, y = None, 0, []
    read: list[tuple[Tensor, Tensor]] = []
    for t in range(n):
        if t - delay >= (written + 1) * segment_len:
            segment = x[:, written * segment_len : (written + 1) * segment_len]
            where = evenly(n_samples, grid).expand(b, -1)  # (B, M)
            if sticky and signal is not None:
                levels = where[0] if draws is None else draws[written]
                where = quantiles(histogram(read, n_bins), levels, left_edges=draws is not None)
            signal = updated_signal(signal, segment, where, centre, width, ridge, tau, grid)  # (B, K, E)
            written, read = written + 1, []
        if signal is None:
            y.append(torch.zeros_like(q[:, :, t]))
            continue
        keys, values = (
            (signal @ weight.T).unflatten(-1, (h, d)).transpose(1, 2) for weight in (key_weight, value_weight)
        )  # (B, H, K, D) each
        s = torch.einsum("bhd,bhkd->bhk", q[:, :, t], keys) / math.sqrt(d)
        m, w = (s @ density_weight.T + (0 if density_bias is None else density_bias)).unbind(-1)  # (B, H) each
        mean, variance = 1 / (1 + (-m).exp()), (1 + w.exp()).log() + 1e-6  # σ² above 0
        read.append((mean, variance))
        y.append(torch.einsum("bhk,bhkd->bhd", expected_basis(mean, variance, centre, width), values))
    return torch.stack(y, 2)


def basis(times: Tensor, centre: Tensor, width: Tensor) -> Tensor:
    """The basis functions, Martins et al. 2022, section 2.2: the normal densities.

        ψ_j(τ) = N(τ; μ_j, σ_j²)

    (…) times -> (…, K).
    """
    return normal(times[..., None] - centre, width**2)


def expected_basis(mean: Tensor, variance: Tensor, centre: Tensor, width: Tensor) -> Tensor:
    """The basis functions' expectations under a density, Martins et al. 2022, section 2.2.

        E_{τ ~ N(μ, σ²)}[ψ_j(τ)] = N(μ; μ_j, σ² + σ_j²)

    (B, H) means and variances -> (B, H, K).
    """
    return normal(mean[..., None] - centre, variance[..., None] + width**2)


def normal(x: Tensor, variance: Tensor) -> Tensor:
    """The normal density of mean 0: exp(−x² / 2σ²) / √(2π σ²)."""
    return (-(x**2) / (2 * variance)).exp() / (2 * math.pi * variance).sqrt()


def centres_widths(n_basis: int, widths: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """μ_j and σ_j, (K,) each: as many ψ_j of each width, one width after the other, their centres evenly in [0, 1]."""
    centres = torch.linspace(0, 1, n_basis // len(widths), dtype=torch.float64)
    return centres.repeat(len(widths)), torch.tensor(widths, dtype=torch.float64).repeat_interleave(len(centres))


def evenly(n: int, grid: str = "midpoints") -> Tensor:
    """The middles, or with "ends" the right ends, of n equal parts of [0, 1]: (n,)."""
    return (torch.arange(n, dtype=torch.float64) + (1 if grid == "ends" else 0.5)) / n


def updated_signal(
    signal: Tensor | None,
    segment: Tensor,
    where: Tensor,
    centre: Tensor,
    width: Tensor,
    ridge: float,
    tau: float,
    grid: str,
) -> Tensor:
    """The signal with one more segment, Martins et al. 2022, section 3.2.

    The first signal is fitted to the segment's inputs on [0, 1]. Later, M samples of the old signal, at the times
    `where` (B, M), are placed on [0, τ], and the L inputs of the segment (B, L, E) on [τ, 1].

    Returns:
        B, (B, K, E).
    """
    length = segment.size(1)
    if signal is None:
        return fit(segment, evenly(length), centre, width, ridge, beyond(length))
    samples = basis(where, centre, width) @ signal  # (B, M, E)
    times = torch.cat([tau * evenly(where.size(1), grid), tau + (1 - tau) * evenly(length, grid)])
    outside = beyond(len(times), length if grid == "ends" else None)
    return fit(torch.cat([samples, segment], 1), times, centre, width, ridge, outside)


def fit(targets: Tensor, times: Tensor, centre: Tensor, width: Tensor, ridge: float, outside: Tensor) -> Tensor:
    """Ridge regression of targets (B, T, E) at times (T,), Martins et al. 2022, section 2.2.

        B = argmin Σ_t ‖x_t − Bᵀψ(t)‖² + λ ‖B‖² = (ΨᵀΨ + λ I)⁻¹ Ψᵀ X,  Ψ = [ψ(t_1), …, ψ(t_T)]ᵀ

    As in the authors' code, the signal is also fitted to 0 at the times `outside` (O,). Returns (B, K, E).
    """
    psi = basis(torch.cat([times, outside]), centre, width)  # (T + O, K)
    zeros = targets.new_zeros(len(targets), len(outside), targets.size(2))
    gram = psi.T @ psi + ridge * torch.eye(len(centre), dtype=psi.dtype)
    return torch.linalg.solve(gram, psi.T @ torch.cat([targets, zeros], 1))


def beyond(n: int, segment_len: int | None = None) -> Tensor:
    """Times before 0, from −½ on, and as many after 1, as densely as n times in [0, 1].

    With `segment_len` as in the authors' code: of 2n even times, whose first and last are 1 / (n + L) inside −½ and 1½,
    those outside [0, 1].
    """
    if segment_len is None:
        before = evenly(n)
        before = before[before <= 0.5]
    else:
        inset = 1 / (n + segment_len)
        before = 0.5 - inset - torch.arange(n, dtype=torch.float64) * (2 - 2 * inset) / (2 * n - 1)
        before = before[before > 0]
    return torch.cat([-before, 1 + before])


def histogram(read: list[tuple[Tensor, Tensor]], n_bins: int) -> Tensor:
    """The mass in each bin of [0, 1] of all densities that read a signal, Martins et al. 2022, section 3.3.

    The sum over positions and heads, divided by its total: (B, n_bins).
    """
    mean, variance = (torch.stack(part, -1)[..., None] for part in zip(*read, strict=True))  # (B, H, T, 1)
    edges = torch.arange(n_bins + 1, dtype=torch.float64) / n_bins
    mass = (1 + torch.erf((edges - mean) / (2 * variance).sqrt())).diff(dim=-1).sum((1, 2))  # (B, n_bins)
    return mass / mass.sum(1, keepdim=True)


def quantiles(mass: Tensor, levels: Tensor, *, left_edges: bool) -> Tensor:
    """The times (B, M) before which a histogram (B, n_bins) has the shares `levels` (M,) of its mass.

    A thousandth of the mass is spread evenly. With `left_edges`, as in the authors' code, nothing is spread, and a time
    is the left edge of its bin.
    """
    n_bins = mass.size(1)
    mass = mass if left_edges else 0.999 * mass + 0.001 / n_bins
    below = torch.cat([torch.zeros_like(mass[:, :1]), mass.cumsum(1)[:, :-1]], 1)  # (B, n_bins), that of earlier bins
    bin_of = (below[:, None] <= levels[:, None]).sum(-1) - 1  # (B, M)
    if left_edges:
        return bin_of.to(mass.dtype) / n_bins
    return (bin_of + (levels - below.gather(1, bin_of)) / mass.gather(1, bin_of)) / n_bins


def gated(x: Tensor, weight: Tensor, bias: Tensor, segment_len: int) -> Tensor:
    """Inputs weighted before they are written.

        x_i ⊙ sigmoid(W_1 x_{i−1} + W_2 x_i + W_3 x_{i+1} + b)

    Inputs outside a segment of `segment_len` positions count as 0. x is (B, N, E), `weight` (E, E, 3), `bias` (E,).
    """
    segments = []
    for segment in x.split(segment_len, 1):
        zero = torch.zeros_like(segment[:, :1])
        before, after = torch.cat([zero, segment[:, :-1]], 1), torch.cat([segment[:, 1:], zero], 1)
        a = sum(part @ weight[:, :, i].T for i, part in enumerate((before, segment, after))) + bias
        segments.append(segment / (1 + (-a).exp()))
    return torch.cat(segments, 1)


# ------------------------------------------------------------------------------------------------ SparseAttention


def sparse_seen(
    n: int,
    n_heads: int,
    *,
    pattern: str,
    stride: int,
    summary: int = 1,
    combine: str = "merged",
    num_verts: int = 1,
    causal: bool = True,
) -> Tensor:
    """The keys A_i of each query i, for `softmax_attention`: Child et al. 2019, equations 2 to 4.

                     local                        distant
        strided:     |i − j| < l                  (i − j) mod l = 0
        fixed:       ⌊j/l⌋ = ⌊i/l⌋                f ≤ j mod l < f + c, or j = i

    with l = `stride`, c = `summary`, f = l − c (h mod V + 1) for head h with V = `num_verts`, and j ≤ i if causal. A
    head sees both ("merged"), one of them ("local", "distant"), or local if it is in the first half and else distant
    ("heads").

    Returns:
        (H, N, N) booleans.
    """
    i, j = torch.arange(n)[:, None], torch.arange(n)
    seen = []
    for head in range(n_heads):
        if pattern == "strided":
            local, distant = (i - j).abs() < stride, (i - j) % stride == 0
        else:
            first = stride - summary * (head % num_verts + 1)
            local = i // stride == j // stride
            distant = (first <= j % stride) & (j % stride < first + summary) | (i == j)
        which = combine if combine != "heads" else "local" if 2 * head < n_heads else "distant"
        seen.append({"merged": local | distant, "local": local, "distant": distant}[which])
    return torch.stack(seen) & (past(n) if causal else everything(n, n))


# ------------------------------------------------------------------------------------------------ LinearAttention


def linear_attention(phi_q: Tensor, phi_k: Tensor, v: Tensor, seen: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Katharopoulos et al. 2020, equation 4, with ε as in the authors' code.

        y_i = Σ_j φ(q_i)ᵀφ(k_j) v_j / (Σ_j φ(q_i)ᵀφ(k_j) + ε)

    of features φ (B, H, ·, F): `elu_features`, `relu_features`, `hedgehog_features`.
    """
    weights = phi_q @ phi_k.mT * seen  # (B, H, N, M)
    return weights @ v / (weights.sum(-1, keepdim=True) + eps)


def elu_features(x: Tensor) -> Tensor:
    """Katharopoulos et al. 2020, equation 7: φ(x) = elu(x) + 1."""
    return torch.where(x > 0, x + 1, x.exp())


def relu_features(x: Tensor, floor: float) -> Tensor:
    """φ(x) = relu(x) + floor."""
    return torch.where(x > 0, x, 0) + floor


def hedgehog_features(x: Tensor, weight: Tensor) -> Tensor:
    """Zhang et al. 2024 (LoLCATs), the authors' code: φ(x) = [softmax(W x), softmax(−W x)], W (H, D, D) a head."""
    u = torch.einsum("hfd,bhnd->bhnf", weight, x).exp()
    return torch.cat([t / t.sum(-1, keepdim=True) for t in (u, 1 / u)], -1)


# ---------------------------------------------------------------------------------------------- PerformerAttention


def performer_attention(
    q: Tensor, k: Tensor, v: Tensor, omega: Tensor, seen: Tensor, *, features: str = "positive", eps: float = 0.0
) -> Tensor:
    """FAVOR+, Choromanski et al. 2020, section 2.2: `linear_attention` whose features are random.

        y_i = Σ_j φ(q_i)ᵀφ(k_j) v_j / Σ_j φ(q_i)ᵀφ(k_j),  E φ(q)ᵀφ(k) = exp(q · k / √D)

    `omega` (H, F, D) are the random vectors ω. The expectation is that of "positive", "hyperbolic" and "trigonometric"
    features; "relu" features are a kernel of their own. With `eps` above 0, positive features are those of the authors'
    code: see `stabilised_features`.
    """
    if features == "positive" and eps:
        rows = []
        for i in range(q.size(2)):
            keys, values = k[:, :, seen[i]], v[:, :, seen[i]]  # query i's own: (B, H, M_i, D)
            phi_q = stabilised_features(q[:, :, i : i + 1], omega, (-1,), eps)
            phi_k = stabilised_features(keys, omega, (-1, -2), eps)
            rows.append(linear_attention(phi_q, phi_k, values, everything(1, keys.size(2)), eps=0))
        return torch.cat(rows, 2)
    if features == "relu":
        phi_q, phi_k = (random_relu_features(x, omega, eps) for x in (q, k))
    else:
        maps = {
            "positive": positive_features,
            "hyperbolic": hyperbolic_features,
            "trigonometric": trigonometric_features,
        }
        phi_q, phi_k = (maps[features](x, omega) for x in (q, k))
    return linear_attention(phi_q, phi_k, v, seen, eps=0)


def positive_features(x: Tensor, omega: Tensor) -> Tensor:
    """Choromanski et al. 2020, lemma 1.

        φ(x) = F^(−½) exp(ωᵀx̃ − ‖x̃‖²/2),  x̃ = D^(−¼) x,  ω ~ N(0, I)

    (B, H, N, D) -> (B, H, N, F).
    """
    u, half = projected(x, omega)
    return (u - half).exp() / math.sqrt(u.size(-1))


def hyperbolic_features(x: Tensor, omega: Tensor) -> Tensor:
    """Choromanski et al. 2020, lemma 1.

        φ(x) = F^(−½) [exp(ωᵀx̃ − ‖x̃‖²/2), exp(−ωᵀx̃ − ‖x̃‖²/2)]

    (B, H, N, D) -> (B, H, N, F), of F/2 vectors ω.
    """
    u, half = projected(x, omega)
    return torch.cat([(u - half).exp(), (-u - half).exp()], -1) / math.sqrt(2 * u.size(-1))


def trigonometric_features(x: Tensor, omega: Tensor) -> Tensor:
    """Choromanski et al. 2020, section 2.3, after Rahimi & Recht 2007.

        φ(x) = (F/2)^(−½) exp(‖x̃‖²/2) [sin(ωᵀx̃), cos(ωᵀx̃)]

    (B, H, N, D) -> (B, H, N, F), of F/2 vectors ω.
    """
    u, half = projected(x, omega)
    return half.exp() * torch.cat([u.sin(), u.cos()], -1) / math.sqrt(u.size(-1))


def projected(x: Tensor, omega: Tensor) -> tuple[Tensor, Tensor]:
    """ωᵀx̃ and ‖x̃‖²/2, x̃ = D^(−¼) x: (B, H, N, D) -> (B, H, N, F) and (B, H, N, 1)."""
    x = x / x.size(-1) ** 0.25
    return torch.einsum("bhnd,hfd->bhnf", x, omega), (x * x).sum(-1, keepdim=True) / 2


def random_relu_features(x: Tensor, omega: Tensor, eps: float) -> Tensor:
    """Choromanski et al. 2020, section 2.2, generalised attention: φ(x) = F^(−½) (relu(ωᵀx) + ε)."""
    u = torch.einsum("bhnd,hfd->bhnf", x, omega)
    return relu_features(u, eps) / math.sqrt(u.size(-1))


def stabilised_features(x: Tensor, omega: Tensor, over: tuple[int, ...], eps: float) -> Tensor:
    """The authors' code of Choromanski et al. 2020.

        φ(x) = F^(−½) (exp(ωᵀx̃ − ‖x̃‖²/2 − max ωᵀx̃) + ε)

    The maximum is `over` the features (−1) of a query, or those of all keys (−1, −2) that it sees.
    """
    u, half = projected(x, omega)
    return ((u - half - u.amax(over, keepdim=True)).exp() + eps) / math.sqrt(u.size(-1))


# ------------------------------------------------------------------------------------------ WindowedLinearAttention


def windowed_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, phi_q: Tensor, phi_k: Tensor, gamma: Tensor, *, window: int
) -> Tensor:
    """Zhang et al. 2024 (LoLCATs), section 3.3.

        y_i = Σ_{j≤i} p_ij v_j / Σ_{j≤i} p_ij
        p_ij = γ exp(q_i·k_j / √D − c_i) for i − w < j ≤ i,  p_ij = φ(q_i)ᵀφ(k_j) for j ≤ i − w
        c_i = max_{i−w<j≤i} q_i·k_j / √D

    `gamma` is (H,), `window` w.
    """
    n, d = q.shape[-2:]
    near = past(n, window)
    far = past(n) & ~near
    scores = (q @ k.mT / math.sqrt(d)).masked_fill(~near, -math.inf)  # (B, H, N, N)
    largest = scores.max(-1, keepdim=True).values
    terms = gamma[:, None, None] * (scores - largest).exp() + phi_q @ phi_k.mT * far
    return terms @ v / terms.sum(-1, keepdim=True)


# ------------------------------------------------------------------------------------------------ LSHAttention


def lsh_attention(x: Tensor, v: Tensor, rotations: Tensor, *, chunk_size: int, causal: bool = True) -> Tensor:
    """Kitaev et al. 2020, equation 2, with the shared queries and keys x (B, H, N, D) of section 2.

        y_i = Σ_{j ∈ P_i} softmax_j(x_i · x_j / (‖x_j‖ √D)) v_j,  P_i = ∪_r P_i^r without i; i alone where that is empty

    `rotations` (R, H, D, n_buckets / 2) has a round r for each R_r: see `lsh_seen` for P_i^r.
    """
    b, h, n, d = x.shape
    seen = torch.zeros(b, h, n, n, dtype=torch.bool)
    for row, head, rotation in itertools.product(range(b), range(h), rotations):
        seen[row, head] |= lsh_seen(x[row, head], rotation[head], chunk_size, causal)
    rest = seen & ~torch.eye(n, dtype=torch.bool)
    seen = torch.where(rest.any(-1, keepdim=True), rest, seen)
    return softmax_over(x @ (x / x.norm(dim=-1, keepdim=True)).mT / math.sqrt(d), seen) @ v


def lsh_seen(x: Tensor, rotation: Tensor, chunk_size: int, causal: bool) -> Tensor:
    """The keys seen in one round, Kitaev et al. 2020, section 2 and appendix A: (N, D) vectors -> (N, N).

        P_i^r = {j: h_r(x_j) = h_r(x_i), chunk(i) − 1 ≤ chunk(j) ≤ chunk(i), j ≤ i if causal}
        h_r(x) = argmax [x R_r; −x R_r]

    chunk(i) is ⌊rank / `chunk_size`⌋, of the rank among all positions sorted by bucket, or if causal among those of the
    same bucket.
    """
    turned = x @ rotation  # (N, n_buckets / 2)
    n = len(x)
    bucket = torch.cat([turned, -turned], -1).argmax(-1) if turned.numel() else torch.zeros(n, dtype=torch.long)
    same = bucket[:, None] == bucket  # (N, N)
    rank = (same & (distances(n) > 0)).sum(1)  # earlier positions of the same bucket
    if not causal:
        rank = rank + (bucket < bucket[:, None]).sum(1)
    chunk = rank // chunk_size
    near = (chunk[:, None] - 1 <= chunk) & (chunk <= chunk[:, None])
    return same & near & (past(n) if causal else everything(n, n))


# ------------------------------------------------------------------------------------- kinds with a recurrent state


def short_convolution(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The convolution before the recurrence, Dao and Gu 2024, section 7.1.

        y_t = b + Σ_{j<K} w_j ⊙ x_{t−j},  x_t = 0 for t < 0

    (B, N, C) inputs and w (K, C) -> (B, N, C).
    """
    shifted = [torch.cat([torch.zeros_like(x[:, :j]), x[:, : max(0, x.size(1) - j)]], 1) for j in range(len(weight))]
    return sum(w * y for w, y in zip(weight, shifted, strict=True)) + (0 if bias is None else bias)


def silu(x: Tensor) -> Tensor:
    """SiLU, x / (1 + e^(−x))."""
    return x / (1 + (-x).exp())


def unit(x: Tensor) -> Tensor:
    """Vectors of unit length, x / √(‖x‖² + 10⁻⁶), Yang et al. 2024 (arXiv 2406.06484), section 3.3."""
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def one_by_one(q: Tensor, k: Tensor, v: Tensor, update, *factors: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
    """Read a state that each position changes.

        S_t = update(S_{t−1}, k_t, v_t, …),  y_t = S_tᵀ q_t,  S_0 = 0 (D_qk × D)

    (B, H, N, D_qk) queries and keys, (B, H, N, D) values, factors (B, H, N) or (B, H, N, D_qk) -> (B, H, N, D).
    """
    s, y = torch.zeros_like(k[:, :, 0, :, None] * v[:, :, 0, None]), []  # (B, H, D_qk, D)
    for t in range(q.size(2)):
        s = update(s, k[:, :, t], v[:, :, t], *(f[:, :, t] for f in factors))
        y.append(read(s, q[:, :, t]))
    return torch.stack(y, 2)


def read(s: Tensor, k: Tensor) -> Tensor:
    """Sᵀ k: (B, H, D_qk, D) and (B, H, D_qk) -> (B, H, D)."""
    return (s * k[..., None]).sum(2)


def outer(k: Tensor, v: Tensor) -> Tensor:
    """The outer product k vᵀ: (B, H, D_qk) and (B, H, D) -> (B, H, D_qk, D)."""
    return k[..., None] * v[..., None, :]


def delta_net_attention(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """Yang et al. 2024 (arXiv 2406.06484), section 2.2, transposed: (B, H, N, ·) -> (B, H, N, D).

    S_t = S_{t−1} − β_t k_t (S_{t−1}ᵀ k_t − v_t)ᵀ
    """
    return one_by_one(q, k, v, lambda s, k, v, b: s - outer(k, b[..., None] * (read(s, k) - v)), beta)


def gated_delta_net_attention(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """Yang et al. 2024 (arXiv 2412.06464), equation 10, transposed: (B, H, N, ·) -> (B, H, N, D).

    S_t = α_t (I − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ
    """

    def update(s: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
        a, b = a[..., None, None], b[..., None, None]
        return a * (s - b * outer(k, read(s, k))) + b * outer(k, v)

    return one_by_one(q, k, v, update, alpha, beta)


def kimi_delta_attention(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """Kimi Team 2025 (arXiv 2510.26692), equation 1.

        S_t = (I − β_t k_t k_tᵀ) Diag(α_t) S_{t−1} + β_t k_t v_tᵀ,  y_t = S_tᵀ q_t

    `alpha` is (B, H, N, D_qk), `beta` (B, H, N).
    """

    def update(s: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
        s, b = a[..., None] * s, b[..., None, None]
        return s - b * outer(k, read(s, k)) + b * outer(k, v)

    return one_by_one(q, k, v, update, alpha, beta)


def gated_linear_attention(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor) -> Tensor:
    """Yang et al. 2023 (arXiv 2312.06635), equation 3.

        S_t = Diag(α_t) S_{t−1} + k_t v_tᵀ,  y_t = S_tᵀ q_t

    `alpha` is (B, H, N, D_qk).
    """
    return one_by_one(q, k, v, lambda s, k, v, a: a[..., None] * s + outer(k, v), alpha)


def mamba2_attention(q: Tensor, k: Tensor, v: Tensor, step: Tensor, a: Tensor, d: Tensor) -> Tensor:
    """Dao and Gu 2024 (arXiv 2405.21060), equation 1 with A = −a Δ and B = Δ k; q, k, v are C, B, X.

        S_t = exp(−a Δ_t) S_{t−1} + Δ_t k_t v_tᵀ,  y_t = S_tᵀ q_t + d v_t

    `step` is Δ (B, H, N), `a` and `d` are (H,).
    """
    decay = (-a[:, None] * step).exp()

    def update(s: Tensor, k: Tensor, v: Tensor, g: Tensor, step: Tensor) -> Tensor:
        return g[..., None, None] * s + step[..., None, None] * outer(k, v)

    return one_by_one(q, k, v, update, decay, step) + d[:, None, None] * v


def retention_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Sun et al. 2023 (arXiv 2307.08621), equations 5 and 8, of queries and keys that are rotated already.

    y_i = Σ_{j≤i} γ_h^{i−j} q_i · k_j v_j,  γ_h = 1 − 2^(−5−h),  h = 0 … H − 1
    """
    gamma = torch.tensor([1 - 2.0 ** (-5 - h) for h in range(q.size(1))], dtype=q.dtype)
    n = q.size(2)
    weight = gamma[:, None, None] ** distances(n).clamp(min=0) * past(n)  # (H, N, N)
    return (q @ k.mT * weight) @ v
