"""The plain O(N²) definition of each attention kind, from its paper's equation: what the laws measure the code by.

Nothing here calls the code under test; of a module, only its parameters and its options are read. A definition takes
`(module, x)`, with `x` (B, N, E) without padding, and returns (B, N, E).
"""

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor


def softmax(module, x: Tensor) -> Tensor:
    """softmax(Q Kᵀ / √D) V, Vaswani et al. 2017, equation 1; of the newest `window` keys."""
    q, k, v = queries_keys_values(module, x)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.size(-1))
    exponential = scores.exp() * sees(module, x.size(1))  # small sizes: no maximum need be subtracted
    return heads_together(module, exponential / exponential.sum(-1, keepdim=True) @ v)


def shaw(module, x: Tensor) -> Tensor:
    """Shaw et al. 2018, equations 3 and 4, with the (N, N, D) vectors aᵏ_ij and aᵛ_ij written out."""
    q, k, v = queries_keys_values(module, x)
    n, most = x.size(1), module.max_distance
    ahead = 0 if module.causal else most
    row = torch.tensor([[min(max(j - i, -most), ahead) + most for j in range(n)] for i in range(n)])
    a_k, a_v = module.key_table[row], module.value_table[row]
    scores = torch.einsum("bhid,bhijd->bhij", q, k[:, :, None] + a_k) / math.sqrt(module.head_dim)
    exponential = scores.exp() * sees(module, n)
    weights = exponential / exponential.sum(-1, keepdim=True)
    return heads_together(module, torch.einsum("bhij,bhijd->bhid", weights, v[:, :, None] + a_v))


def linear(module, x: Tensor) -> Tensor:
    """φ(Q) φ(K)ᵀ V over its row sums, Katharopoulos et al. 2020, equations 4 to 9, and ε as in the authors' code."""
    q, k, v = queries_keys_values(module, x)
    weights = phi(module, q) @ phi(module, k, of_keys=True).transpose(-1, -2) * sees(module, x.size(1))
    return heads_together(module, weights / (weights.sum(-1, keepdim=True) + epsilon(module)) @ v)


def windowed_linear(module, x: Tensor) -> Tensor:
    """Zhang et al. 2024 (LoLCATs), section 3.3, query by query and key by key."""
    q, k, v = queries_keys_values(module, x)
    phi_q, phi_k = phi(module, q), phi(module, k, of_keys=True)
    gamma = 1 / (1 + (-module.mixing).exp())  # (H,)
    rows = []
    for i in range(x.size(1)):
        first = max(0, i - module.window + 1)
        scores = torch.stack([(q[:, :, i] * k[:, :, j]).sum(-1) / math.sqrt(module.head_dim) for j in range(i + 1)], -1)
        largest = scores[..., first:].max(-1, keepdim=True).values
        softmax_terms = gamma[:, None] * (scores - largest).exp()
        linear_terms = torch.stack([(phi_q[:, :, i] * phi_k[:, :, j]).sum(-1) for j in range(i + 1)], -1)
        terms = torch.cat([linear_terms[..., :first], softmax_terms[..., first:]], -1)  # (B, H, i + 1)
        rows.append((terms[..., None] * v[:, :, : i + 1]).sum(2) / terms.sum(-1, keepdim=True))
    return heads_together(module, torch.stack(rows, 2))


def lsh(module, x: Tensor) -> Tensor:
    """Softmax attention to the union of what the rounds see, Kitaev et al. 2020, equation 2 and appendix A.

    Chunks are of a bucket's positions if causal (the rank among the earlier ones div C), else of all, sorted by bucket.
    """
    b, n, _ = x.shape
    h, c = module.n_heads, module.chunk_size
    shared, v = (
        (x @ p.weight.T + (0 if p.bias is None else p.bias)).reshape(b, n, h, -1).permute(0, 2, 1, 3)
        for p in (module.q_proj, module.v_proj)
    )
    if module.rotary is not None:
        shared = rotated(shared, module.rotary.base)
    sees = torch.zeros(b, h, n, n, dtype=torch.bool)
    for row, head, r in itertools.product(range(b), range(h), range(module.n_hashes)):
        turned = [shared[row, head, i] @ module.rotations[r, head] for i in range(n)]
        bucket = [max(range(2 * len(t)), key=torch.cat([t, -t]).tolist().__getitem__, default=0) for t in turned]
        if module.causal:
            chunk = [bucket[:i].count(bucket[i]) // c for i in range(n)]
        else:
            chunk = [sum((bucket[j], j) < (bucket[i], i) for j in range(n)) // c for i in range(n)]
        for i, j in itertools.product(range(n), range(n)):
            if bucket[i] == bucket[j] and chunk[i] - 1 <= chunk[j] <= chunk[i] and not (module.causal and j > i):
                sees[row, head, i, j] = True
    others = sees & ~torch.eye(n, dtype=torch.bool)
    sees = torch.where(others.any(-1, keepdim=True), others, sees)
    keys = shared / shared.norm(dim=-1, keepdim=True)
    exponential = (shared @ keys.transpose(-1, -2) / math.sqrt(module.head_dim)).exp() * sees
    return heads_together(module, exponential / exponential.sum(-1, keepdim=True) @ v)


def phi(module, x: Tensor, of_keys: bool = False) -> Tensor:
    """The feature map, by its name: elu(x) + 1 (equation 7), relu(x) and a floor, or Hedgehog's two softmaxes."""
    name = type(module.feature_map).__name__
    if name == "EluFeatureMap":
        return torch.where(x > 0, x + 1, x.exp())
    if name == "ReluFeatureMap":
        return torch.where(x > 0, x, 0) + module.feature_map.floor
    if name == "StirredHedgehog":
        w = module.feature_map.key_weight if of_keys else module.feature_map.query_weight
        u = torch.einsum("hfd,bhnd->bhnf", w, x).exp()
        halves = [t / t.sum(-1, keepdim=True) for t in (u, 1 / u)]
        return torch.cat(halves, -1)
    raise NotImplementedError(f"write the definition of {name} here")


def epsilon(module) -> float:
    """What is added to the denominator, by the map's name: 10⁻⁶, or 10⁻¹² as in LoLCATs' code (Zhang et al. 2024)."""
    return 1e-12 if type(module.feature_map).__name__ == "StirredHedgehog" else 1e-6


def performer(module, x: Tensor) -> Tensor:
    """φ(Q) φ(K)ᵀ V over its row sums, Choromanski et al. 2020, section 2.2, with the module's own random vectors."""
    q, k, v = queries_keys_values(module, x)
    if module.feature_map.features == "positive" and module.feature_map.eps:
        n = x.size(1)
        seen = range(1, n + 1) if module.causal else [n] * n
        rows = [features_plus_eps(module, q[:, :, i : i + 1], k[:, :, :m]) for i, m in enumerate(seen)]
        weights = torch.cat([F.pad(row, (0, n - row.size(-1))) for row in rows], 2)
    else:
        weights = random_features(module, q) @ random_features(module, k).transpose(-1, -2) * sees(module, x.size(1))
    return heads_together(module, weights / weights.sum(-1, keepdim=True) @ v)


def features_plus_eps(module, q: Tensor, k: Tensor) -> Tensor:
    """The authors' products of features of (B, H, N, D) queries and (B, H, M, D) keys: (B, H, N, M)."""

    def scaled(x: Tensor, over: tuple[int, ...]) -> Tensor:
        x = x / module.head_dim**0.25
        u = torch.einsum("bhnd,hfd->bhnf", x, module.feature_map.omega)
        return (u - (x * x).sum(-1, keepdim=True) / 2 - u.amax(over, keepdim=True)).exp() + module.feature_map.eps

    return scaled(q, (-1,)) @ scaled(k, (-1, -2)).transpose(-1, -2)


def random_features(module, x: Tensor) -> Tensor:
    """Lemma 1 and sections 2.2 and 2.3: (B, H, N, D) -> (B, H, N, F), but for a factor that all features share."""
    if module.feature_map.features == "relu":
        u = torch.einsum("bhnd,hfd->bhnf", x, module.feature_map.omega)
        return torch.where(u > 0, u, 0) + module.feature_map.eps
    x = x / module.head_dim**0.25
    u = torch.einsum("bhnd,hfd->bhnf", x, module.feature_map.omega)
    half = (x * x).sum(-1, keepdim=True) / 2
    if module.feature_map.features == "positive":
        return (u - half).exp()
    if module.feature_map.features == "hyperbolic":
        return torch.cat([(u - half).exp(), (-u - half).exp()], -1)
    if module.feature_map.features == "trigonometric":
        return half.exp() * torch.cat([u.sin(), u.cos()], -1)
    raise NotImplementedError(f"write the definition of features={module.feature_map.features!r} here")


def softmax_cross(module, x: Tensor, source: Tensor) -> Tensor:
    """softmax(Q Kᵀ / √D) V, Vaswani et al. 2017, equation 1, of the keys and values of a source (B, S, d_source)."""
    q, k, v = queries_and_source(module, x, source)
    exponential = (q @ k.transpose(-1, -2) / math.sqrt(q.size(-1))).exp()
    return heads_together(module, exponential / exponential.sum(-1, keepdim=True) @ v)


def linear_cross(module, x: Tensor, source: Tensor) -> Tensor:
    """Katharopoulos et al. 2020, equation 4, of a source's keys and values, and ε in the denominator."""
    q, k, v = queries_and_source(module, x, source)
    weights = phi(module, q) @ phi(module, k, of_keys=True).transpose(-1, -2)  # (B, H, N, S)
    return heads_together(module, weights / (weights.sum(-1, keepdim=True) + epsilon(module)) @ v)


def performer_cross(module, x: Tensor, source: Tensor) -> Tensor:
    """Choromanski et al. 2020, section 2.2, of a source's keys and values, with the module's own random vectors."""
    q, k, v = queries_and_source(module, x, source)
    if module.feature_map.features == "positive" and module.feature_map.eps:
        weights = features_plus_eps(module, q, k)  # (B, H, N, S)
    else:
        weights = random_features(module, q) @ random_features(module, k).transpose(-1, -2)
    return heads_together(module, weights / weights.sum(-1, keepdim=True) @ v)


def transformer_xl(module, x: Tensor) -> Tensor:
    """Dai et al. 2019, section 3.3: the four terms (a) to (d), for each pair of positions; one segment, no memory."""
    q, k, v = queries_keys_values(module, x)
    n = x.size(1)
    r = relative_vectors(module, [[i - j for j in range(n)] for i in range(n)]).reshape(n, n, module.n_heads, -1)
    u, w = module.u[:, None], module.v[:, None]
    scores = (q + u) @ k.transpose(-1, -2) + torch.einsum("bhid,ijhd->bhij", q + w, r)
    window = module.mem_len if module.same_length else n
    seen = torch.tensor([[not module.causal or i - window < j <= i for j in range(n)] for i in range(n)])
    exponential = (scores / math.sqrt(module.head_dim)).exp() * seen
    return heads_together(module, exponential / exponential.sum(-1, keepdim=True) @ v)


def relative_vectors(module, distances: list[list[int]]) -> Tensor:
    """W_r R_d of rows of distances d, R_d = [sin(d ω_0), sin(d ω_1), …, cos(d ω_0), …], ω_i = 10000^(−2i/E)."""
    e, most = module.d_model, math.inf if module.clamp_len is None else module.clamp_len

    def vector(d: float) -> list[float]:
        angles = [max(-most, min(d, most)) / 10000 ** (2 * i / e) for i in range(e // 2)]
        return [*map(math.sin, angles), *map(math.cos, angles)]

    r = torch.tensor([[vector(d) for d in row] for row in distances], dtype=module.r_proj.weight.dtype)
    return r @ module.r_proj.weight.T


def sparse(module, x: Tensor) -> Tensor:
    """Softmax over the keys in A_i, Child et al. 2019, equations 2 to 4, with an (N, N) mask a head."""
    q, k, v = queries_keys_values(module, x)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.size(-1))
    exponential = scores.exp() * torch.stack([sees_sparsely(module, x.size(1), h) for h in range(module.n_heads)])
    return heads_together(module, exponential / exponential.sum(-1, keepdim=True) @ v)


def sees_sparsely(module, n: int, head: int) -> Tensor:
    """Return (N, N) booleans: section 4.3's sets, query by query and key by key."""
    length, c = module.stride, module.summary
    first = length - c * (head % module.num_verts + 1)
    kinds = {"merged": ["local", "distant"], "local": ["local"], "distant": ["distant"]}
    kinds["heads"] = ["local"] if 2 * head < module.n_heads else ["distant"]
    mask = torch.zeros(n, n, dtype=torch.bool)
    for i in range(n):
        for j in range(i + 1 if module.causal else n):
            if module.pattern == "strided":
                seen = {"local": abs(i - j) < length, "distant": (i - j) % length == 0}
            else:
                seen = {
                    "local": j // length == i // length,
                    "distant": first <= j % length < first + c or j == i,
                }
            mask[i, j] = any(seen[kind] for kind in kinds[module.combine])
    return mask


def compressive(module, x: Tensor) -> Tensor:
    """Rae et al. 2019, algorithm 1, one position at a time: keys are [summaries; inputs that are not compressed]."""
    c, out = module.compression_rate, []
    summaries = [summary(module, x[:, i : i + c]) for i in range(0, x.size(1) - c + 1, c)]
    for t in range(x.size(1)):
        n = max(0, t // module.segment_len * module.segment_len - module.mem_len) // c
        keys = torch.stack([*summaries[:n][-module.compressed_len :], *x[:, n * c : t + 1].unbind(1)], 1)
        q, _, _ = queries_keys_values(module, x[:, t : t + 1])
        _, k, v = queries_keys_values(module, keys)
        r = relative_vectors(module, [list(range(keys.size(1) - 1, -1, -1))])
        r = r.reshape(-1, module.n_heads, module.head_dim).transpose(0, 1)
        scores = (q + module.u[:, None]) @ k.transpose(-1, -2) + (q + module.v[:, None]) @ r.transpose(-1, -2)
        exponential = (scores / math.sqrt(module.head_dim)).exp()
        out.append(exponential / exponential.sum(-1, keepdim=True) @ v)
    return heads_together(module, torch.cat(out, 2))


def summary(module, window: Tensor) -> Tensor:
    """The strided convolution, mean or maximum of c inputs (B, c, E)."""
    if module.compression == "mean":
        return window.mean(1)
    if module.compression == "max":
        return window.max(1).values
    weights = module.compressor.weight.chunk(module.compression_rate, 1)  # one matrix for each of the c
    y = sum(window[:, i] @ weight.T for i, weight in enumerate(weights))
    return y if module.compressor.bias is None else y + module.compressor.bias


def infinite(module, x: Tensor, remembered: Tensor | None = None) -> Tensor:
    """Martins et al. 2022, section 3, one position at a time: Transformer-XL's attention, and that to the signal.

    The signal is of `remembered`, of the shape of `x`, if it is given.
    """
    remembered = x if remembered is None else remembered
    size, h, d = module.segment_len, module.n_heads, module.head_dim
    delay = module.mem_len if module.writes == "evicted" else 0
    signal, written, densities, near, far = None, 0, [], [], []
    for t in range(x.size(1)):
        first = size * max(0, (t - module.mem_len) // size)
        q, _, _ = queries_keys_values(module, x[:, t : t + 1])
        _, k, v = queries_keys_values(module, x[:, first : t + 1])
        scores = q @ k.transpose(-1, -2)
        if module.short_term == "transformer_xl":
            r = relative_vectors(module, [list(range(t - first, -1, -1))]).reshape(-1, h, d).transpose(0, 1)
            scores = scores + module.u[:, None] @ k.transpose(-1, -2) + (q + module.v[:, None]) @ r.transpose(-1, -2)
        near.append((scores / math.sqrt(d)).softmax(-1) @ v)
        if module.n_basis == 0:
            continue
        if max(0, (t - delay) // size) > written:
            segment = gated(module, remembered[:, written * size : (written + 1) * size])
            signal = updated_signal(module, signal, segment, densities, written)
            written, densities = written + 1, []
        if signal is None:
            far.append(torch.zeros_like(x[:, t]))
            continue
        query = module.q_proj if module.tie_query else module.ltm_q_proj
        q, k, v = (
            (y @ p.weight.T).reshape(len(x), -1, h, d).transpose(1, 2)
            for y, p in ((x[:, t : t + 1], query), (signal, module.ltm_k_proj), (signal, module.ltm_v_proj))
        )
        s = q @ k.transpose(-1, -2) / math.sqrt(d)  # (B, H, 1, n_basis)
        bias = module.ltm_density.bias
        m, w = (s @ module.ltm_density.weight.T + (0 if bias is None else bias)).unbind(-1)
        mean, variance = 1 / (1 + (-m).exp()), (1 + w.exp()).log() + 1e-6  # (B, H, 1)
        densities.append(torch.distributions.Normal(mean, variance.sqrt()))
        centres, widths = centres_widths(module)
        z = (-((mean[..., None] - centres) ** 2) / 2 / (variance[..., None] + widths**2)).exp()
        z = z / (2 * math.pi * (variance[..., None] + widths**2)).sqrt()
        far.append((z @ v).transpose(1, 2).reshape(len(x), -1) @ module.ltm_out_proj.weight.T)
    y = heads_together(module, torch.cat(near, 2))
    return y + torch.stack(far, 1) if far else y


def centres_widths(module) -> tuple[Tensor, Tensor]:
    """The basis functions' μ_j and σ_j, width after width."""
    each = module.n_basis // len(module.widths)
    centres = [i / (each - 1) for i in range(each)]
    widths = [width for width in module.widths for _ in range(each)]
    return torch.tensor(centres * len(module.widths), dtype=torch.float64), torch.tensor(widths, dtype=torch.float64)


def basis(module, times: Tensor) -> Tensor:
    """ψ_j(t): (T, n_basis)."""
    centres, widths = centres_widths(module)
    return torch.distributions.Normal(centres, widths).log_prob(times[:, None]).exp()


def gated(module, segment: Tensor) -> Tensor:
    """x_i σ(Σ_k W_k x_{i+k−1} + b), with zeros beyond the ends."""
    if module.gate is None:
        return segment
    zeros = torch.zeros_like(segment[:, :1])
    around = torch.cat([zeros, segment, zeros], 1)
    n = segment.size(1)
    conv = sum(around[:, k : k + n] @ module.gate.weight[:, :, k].T for k in range(3)) + module.gate.bias
    return segment / (1 + (-conv).exp())


def updated_signal(module, signal: Tensor | None, segment: Tensor, densities: list, number: int) -> Tensor:
    """Fit Bᵀψ to samples of the old signal on [0, τ] and the segment on [τ, 1], or to the segment alone: (B, n, E).

    The update has this number, from 0.
    """

    def even(n: int, shift: float = 0.5) -> Tensor:
        return torch.tensor([(i + shift) / n for i in range(n)], dtype=torch.float64)

    rows = []
    at_ends = signal is not None and module.grid == "ends"
    for row in range(len(segment)):
        targets, times = segment[row], even(module.segment_len, 1 if at_ends else 0.5)
        if signal is not None:
            where = levels = even(module.n_samples, 1 if at_ends else 0.5)
            if module.sticky:
                draws = drawn(module, number) if module.sampling == "bins" else levels
                where = quantiles(module, draws.tolist(), densities, row)
            targets = torch.cat([basis(module, where) @ signal[row], targets])
            times = torch.cat([module.tau * levels, module.tau + (1 - module.tau) * times])
        beyond = even(len(times))
        beyond = beyond[beyond <= 0.5]
        if at_ends:  # 2 n even points, the first and the last as far from −½ and 1½; those below 0
            n, first = len(times), 1 / (len(times) + module.segment_len)
            step = (2 - 2 * first) / (2 * n - 1)
            beyond = torch.tensor([0.5 - first - i * step for i in range(n)], dtype=torch.float64)
            beyond = beyond[beyond > 0]
        psi = basis(module, torch.cat([times, -beyond, 1 + beyond]))
        targets = torch.cat([targets, torch.zeros(2 * len(beyond), targets.size(1), dtype=torch.float64)])
        gram = psi.T @ psi + module.ridge * torch.eye(module.n_basis, dtype=torch.float64)
        rows.append(torch.linalg.solve(gram, psi.T @ targets))
    return torch.stack(rows)


def drawn(module, number: int) -> Tensor:
    """The parts of a histogram's mass that the update with this number draws, in order: a hash of it, at any place."""
    mixed = []
    for i in range(module.n_samples):
        x = number * 2_592_223 + i
        for shift in (16, 15, 16):
            x %= 2**31
            x = (x ^ (x >> shift)) * 1_812_433_253
        x %= 2**31
        mixed.append(((x ^ (x >> 16)) % 2**22 + 0.5) / 2**22)
    return torch.tensor(sorted(mixed), dtype=torch.float64)


def quantiles(module, levels: list[float], densities: list, row: int) -> Tensor:
    """Where these parts of a row's histogram lie, of which a thousandth is even; or the left edges of their bins."""
    n, bins = module.n_bins, module.sampling == "bins"
    edges = torch.linspace(0, 1, n + 1, dtype=torch.float64)
    mass = sum((p.cdf(edges[1:, None, None, None]) - p.cdf(edges[:-1, None, None, None]))[:, row] for p in densities)
    mass = mass.sum((1, 2)) / mass.sum()
    mass = mass if bins else 0.999 * mass + 0.001 / n
    times = []
    for level in levels:
        before = torch.zeros((), dtype=torch.float64)
        for i in range(n):
            if i == n - 1 or before + mass[i] > level:
                times.append(torch.tensor(i / n, dtype=torch.float64) if bins else (i + (level - before) / mass[i]) / n)
                break
            before = before + mass[i]
    return torch.stack(times)


# ------------------------------------------------------------------------------------------------- what they share


def queries_keys_values(module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(B, N, E) -> three of (B, H, N, D), queries and keys turned where the module has rotary positions."""
    q = in_heads(module, module.q_proj, x)
    group = module.n_heads // module.n_kv_heads  # Ainslie et al. 2023: as many heads, one after the other, share keys
    k, v = (
        torch.stack([in_heads(module, p, x, module.n_kv_heads)[:, h // group] for h in range(module.n_heads)], 1)
        for p in (module.k_proj, module.v_proj)
    )
    if module.q_norm is not None:
        q, k = (
            norm.weight * t / (t.square().mean(-1, keepdim=True) + norm.eps).sqrt()
            for t, norm in ((q, module.q_norm), (k, module.k_norm))
        )
    if module.rotary is not None:
        q, k = rotated(q, module.rotary.base), rotated(k, module.rotary.base)
    return q, k, v


def queries_and_source(module, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(B, N, E) -> queries (B, H, N, D); (B, S, d_source) -> keys and values (B, H, S, D)."""
    return (
        in_heads(module, module.q_proj, x),
        in_heads(module, module.k_proj, source),
        in_heads(module, module.v_proj, source),
    )


def in_heads(module, projection, x: Tensor, n_heads: int | None = None) -> Tensor:
    """Project: (B, N, ·) -> (B, H, N, D)."""
    y = x @ projection.weight.T
    if projection.bias is not None:
        y = y + projection.bias
    return y.reshape(len(x), x.size(1), n_heads or module.n_heads, -1).permute(0, 2, 1, 3)


def heads_together(module, y: Tensor) -> Tensor:
    """(B, H, N, D) -> (B, N, E), through the output projection."""
    y = y.permute(0, 2, 1, 3).reshape(y.size(0), y.size(2), -1) @ module.out_proj.weight.T
    return y if module.out_proj.bias is None else y + module.out_proj.bias


def sees(module, n: int) -> Tensor:
    """Return (N, N) booleans: whether query i sees key j."""
    window = getattr(module, "window", None) or n
    return torch.tensor([[not module.causal or i - window < j <= i for j in range(n)] for i in range(n)])


def rotated(x: Tensor, base: float) -> Tensor:
    """Multiply x_i + 𝑖 x_{i+D/2} by exp(𝑖 t base^(−2i/D)), Su et al. 2021, equation 13."""
    n, d = x.shape[-2:]
    angle = torch.tensor([[t * base ** (-2 * i / d) for i in range(d // 2)] for t in range(n)], dtype=torch.float64)
    turned = torch.complex(x[..., : d // 2], x[..., d // 2 :]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], -1)
