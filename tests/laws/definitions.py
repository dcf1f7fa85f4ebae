"""The definition of each attention kind with a module's parameters and options: what the laws measure the code by.

The mathematics is in `lit_effattn.attention.reference`. Nothing here calls the code under test; of a module, only its
parameters and its options are read. A definition takes `(module, x)`, with `x` (B, N, E) without padding, and returns
(B, N, E).
"""

import torch
from torch import Tensor

from lit_effattn.attention import (
    GatedLinearAttention,
    KimiDeltaAttention,
    Mamba2Attention,
    RetentionAttention,
    reference,
)
from lit_effattn.attention.reference import everything, past


def softmax(module, x: Tensor) -> Tensor:
    return heads_together(module, reference.softmax_attention(*queries_keys_values(module, x), sees(module, x)))


def shaw(module, x: Tensor) -> Tensor:
    tables = module.key_table, module.value_table
    q, k, v = queries_keys_values(module, x)
    y = reference.shaw_attention(q, k, v, *tables, sees(module, x), max_distance=module.max_distance)
    return heads_together(module, y)


def linear(module, x: Tensor) -> Tensor:
    q, k, v = queries_keys_values(module, x)
    y = reference.linear_attention(*features(module, q, k), v, sees(module, x), eps=epsilon(module))
    return heads_together(module, y)


def windowed_linear(module, x: Tensor) -> Tensor:
    q, k, v = queries_keys_values(module, x)
    gamma = 1 / (1 + (-module.mixing).exp())  # (H,)
    y = reference.windowed_linear_attention(q, k, v, *features(module, q, k), gamma, window=module.window)
    return heads_together(module, y)


def lsh(module, x: Tensor) -> Tensor:
    shared, v = in_heads(module, module.q_proj, x), in_heads(module, module.v_proj, x)
    if module.rotary is not None:
        shared = reference.rotated(shared, module.rotary.base)
    options = {"chunk_size": module.chunk_size, "causal": module.causal}
    return heads_together(module, reference.lsh_attention(shared, v, module.rotations, **options))


def performer(module, x: Tensor) -> Tensor:
    return heads_together(module, random_features(module, *queries_keys_values(module, x), sees(module, x)))


def softmax_cross(module, x: Tensor, source: Tensor) -> Tensor:
    q, k, v = queries_and_source(module, x, source)
    return heads_together(module, reference.softmax_attention(q, k, v, everything(x.size(1), source.size(1))))


def linear_cross(module, x: Tensor, source: Tensor) -> Tensor:
    q, k, v = queries_and_source(module, x, source)
    seen = everything(x.size(1), source.size(1))
    y = reference.linear_attention(*features(module, q, k), v, seen, eps=epsilon(module))
    return heads_together(module, y)


def performer_cross(module, x: Tensor, source: Tensor) -> Tensor:
    seen = everything(x.size(1), source.size(1))
    return heads_together(module, random_features(module, *queries_and_source(module, x, source), seen))


def transformer_xl(module, x: Tensor) -> Tensor:
    """One segment, no memory."""
    window = module.mem_len if module.same_length else None
    seen = past(x.size(1), window) if module.causal else everything(x.size(1), x.size(1))
    return heads_together(module, relative(module, *queries_keys_values(module, x), seen))


def sparse(module, x: Tensor) -> Tensor:
    options = {
        name: getattr(module, name) for name in ("pattern", "stride", "summary", "combine", "num_verts", "causal")
    }
    seen = reference.sparse_seen(x.size(1), module.n_heads, **options)
    return heads_together(module, reference.softmax_attention(*queries_keys_values(module, x), seen))


def compressive(module, x: Tensor) -> Tensor:
    names = ("mem_len", "compressed_len", "compression_rate", "segment_len", "clamp_len")
    options = {name: getattr(module, name) for name in names}
    _, summary_k, summary_v = queries_keys_values(module, summaries(module, x))
    heads = *queries_keys_values(module, x), summary_k, summary_v
    y = reference.compressive_attention(*heads, module.r_proj.weight, module.u, module.v, **options)
    return heads_together(module, y)


def summaries(module, x: Tensor) -> Tensor:
    """(B, N, E) -> (B, ⌊N/c⌋, E)."""
    c, conv = module.compression_rate, module.compressor
    given = () if conv is None else (conv.weight.unflatten(1, (c, -1)), conv.bias)
    return reference.compress(x, c, module.compression, *given)


def infinite(module, x: Tensor, remembered: Tensor | None = None) -> Tensor:
    """The signal is of `remembered`, of the shape of `x`, if it is given."""
    remembered = x if remembered is None else remembered
    seen = reference.recent_segments(x.size(1), module.mem_len, module.segment_len)
    attend = (
        relative if module.short_term == "transformer_xl" else lambda _, *given: reference.softmax_attention(*given)
    )
    y = heads_together(module, attend(module, *queries_keys_values(module, x), seen))
    if module.n_basis == 0:
        return y
    if module.gate is not None:
        remembered = reference.gated(remembered, module.gate.weight, module.gate.bias, module.segment_len)
    names = ("segment_len", "ridge", "tau", "n_samples", "grid", "sticky", "n_bins")
    far = reference.infinite_attention(
        in_heads(module, module.q_proj if module.tie_query else module.ltm_q_proj, x),
        remembered,
        module.ltm_k_proj.weight,
        module.ltm_v_proj.weight,
        module.ltm_density.weight,
        module.ltm_density.bias,
        *reference.centres_widths(module.n_basis, module.widths),
        delay=module.mem_len if module.writes == "evicted" else 0,
        draws=drawn(module, x.size(1) // module.segment_len + 1) if module.sampling == "bins" else None,
        **{name: getattr(module, name) for name in names},
    )
    return y + far.transpose(1, 2).flatten(2) @ module.ltm_out_proj.weight.T


def drawn(module, updates: int) -> Tensor:
    """The parts of a histogram's mass that each update draws, in order, a hash of its number: (updates, n_samples)."""
    rows = []
    for number in range(updates):
        mixed = []
        for i in range(module.n_samples):
            x = number * 2_592_223 + i
            for shift in (16, 15, 16):
                x %= 2**31
                x = (x ^ (x >> shift)) * 1_812_433_253
            x %= 2**31
            mixed.append(((x ^ (x >> 16)) % 2**22 + 0.5) / 2**22)
        rows.append(sorted(mixed))
    return torch.tensor(rows, dtype=torch.float64)


# ----------------------------------------------------------------------------------------- kinds with a recurrent state


def delta_net(module, x: Tensor) -> Tensor:
    return recurrent(module, x, lambda x: reference.delta_net_attention(*convolved(module, x), beta(module, x)))


def gated_delta_net(module, x: Tensor) -> Tensor:
    def heads(x: Tensor) -> Tensor:
        alpha = (-module.a_log.exp()[:, None] * softplus(module, at_heads(module.decay_proj, x))).exp()
        return reference.gated_delta_net_attention(*convolved(module, x), alpha, beta(module, x))

    return recurrent(module, x, heads)


def kimi_delta(module, x: Tensor) -> Tensor:
    def heads(x: Tensor) -> Tensor:
        raw = of_channels(module, x @ module.decay_proj[0].weight.T @ module.decay_proj[1].weight.T + module.dt_bias)
        alpha = (-module.a_log.exp()[:, None, None] * (1 + raw.exp()).log()).exp()
        return reference.kimi_delta_attention(*convolved(module, x), alpha, beta(module, x))

    return recurrent(module, x, heads)


def gated_linear(module, x: Tensor) -> Tensor:
    def heads(x: Tensor) -> Tensor:
        down, up = module.decay_proj
        alpha = of_channels(module, x @ down.weight.T @ up.weight.T + up.bias).sigmoid() ** (1 / module.tau)
        return reference.gated_linear_attention(*convolved(module, x), alpha)

    return recurrent(module, x, heads)


def mamba2(module, x: Tensor) -> Tensor:
    def heads(x: Tensor) -> Tensor:
        step = softplus(module, at_heads(module.decay_proj, x))
        return reference.mamba2_attention(*convolved(module, x), step, module.a_log.exp(), module.skip)

    return recurrent(module, x, heads)


def retention(module, x: Tensor) -> Tensor:
    def heads(x: Tensor) -> Tensor:
        q, k, v = convolved(module, x)
        q, k = (reference.rotated(t, module.rotary.base) for t in (q, k))
        return reference.retention_attention(q, k / module.qk_dim**0.5, v)

    return recurrent(module, x, heads)


def recurrent(module, x: Tensor, heads) -> Tensor:
    """`heads` is (B, N, E) -> (B, H, N, D), read forward; norm, gate and output projection follow."""
    y = heads(x)
    if not module.causal:  # heads 1, 3, 5, … read backward
        y = torch.stack([y[:, ::2], heads(x.flip(1)).flip(2)[:, 1::2]], 2).flatten(1, 2)
    return finished(module, x, y)


def finished(module, x: Tensor, y: Tensor) -> Tensor:
    """(B, H, N, D) -> (B, N, E)."""
    norm, y = module.norm, y.transpose(1, 2).flatten(2)  # (B, N, H D)
    if module.gate_proj is not None:
        z = x
        for layer in module.gate_proj if isinstance(module, KimiDeltaAttention) else [module.gate_proj]:
            z = through(layer, z)
        gate = z.sigmoid() if isinstance(module, KimiDeltaAttention) else reference.silu(z)
    else:
        gate = 1
    if isinstance(module, Mamba2Attention):
        groups = (y * gate).unflatten(2, (module.n_qk_heads, -1))
        y = (norm.gain * rms(groups, norm.eps)).flatten(2)
    else:
        y = y.unflatten(2, (module.n_heads, -1))
        if isinstance(module, GatedLinearAttention | RetentionAttention):
            y = rms(y - y.mean(-1, keepdim=True), norm.eps)
        else:
            y = norm.gain * rms(y, norm.eps)
        y = y.flatten(2) * gate
    return through(module.out_proj, y)


def rms(y: Tensor, eps: float) -> Tensor:
    return y / (y.square().mean(-1, keepdim=True) + eps).sqrt()


def convolved(module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys (B, H, N, D_qk), with a delta rule of unit length, and values (B, H, N, D)."""
    projections = module.q_proj, module.k_proj, module.v_proj
    channels = torch.cat([through(projection, x) for projection in projections], -1)  # (B, N, C)
    if module.convolution is not None:
        channels = reference.short_convolution(channels, module.convolution.weight, module.convolution.bias)
    if module.convolution is not None or not isinstance(module, GatedLinearAttention | RetentionAttention):
        channels = reference.silu(channels)
    q, k, v = channels.split([len(projection.weight) for projection in projections], -1)
    q, k = (t.unflatten(2, (module.n_qk_heads, -1)).transpose(1, 2) for t in (q, k))
    if module.beta_proj is not None:
        q, k = reference.unit(q), reference.unit(k)
    q, k = (reference.for_groups(t, module.n_heads) for t in (q, k))
    return q, k, v.unflatten(2, (module.n_heads, -1)).transpose(1, 2)


def beta(module, x: Tensor) -> Tensor:
    """(B, N, E) -> (B, H, N)."""
    return module.beta_max * at_heads(module.beta_proj, x).sigmoid()


def softplus(module, raw: Tensor) -> Tensor:
    """(B, H, N) -> (B, H, N)."""
    return (1 + (raw + module.dt_bias[:, None]).exp()).log()


def of_channels(module, t: Tensor) -> Tensor:
    """(B, N, H D) -> (B, H, N, D)."""
    return t.unflatten(2, (module.n_heads, -1)).transpose(1, 2)


def at_heads(projection, x: Tensor) -> Tensor:
    """(B, N, E) -> (B, H, N)."""
    return (x @ projection.weight.T).transpose(1, 2)


# ------------------------------------------------------------------------------------------------- what they share


def queries_keys_values(module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(B, N, E) -> three of (B, H, N, D), queries and keys turned where the module has rotary positions."""
    q = in_heads(module, module.q_proj, x)
    k, v = (
        reference.for_groups(in_heads(module, p, x, module.n_kv_heads), module.n_heads)
        for p in (module.k_proj, module.v_proj)
    )
    if module.q_norm is not None:
        q, k = (
            reference.rms_normalised(t, norm.weight, norm.eps) for t, norm in ((q, module.q_norm), (k, module.k_norm))
        )
    if module.rotary is not None:
        q, k = (reference.rotated(t, module.rotary.base) for t in (q, k))
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
    return through(projection, x).unflatten(-1, (n_heads or module.n_heads, -1)).transpose(1, 2)


def heads_together(module, y: Tensor) -> Tensor:
    """(B, H, N, D) -> (B, N, E), through the output projection."""
    return through(module.out_proj, y.transpose(1, 2).flatten(2))


def through(projection, x: Tensor) -> Tensor:
    """W x, or W x + b."""
    y = x @ projection.weight.T
    return y if projection.bias is None else y + projection.bias


def sees(module, x: Tensor) -> Tensor:
    """Return (N, N) booleans: whether query i sees key j."""
    return past(x.size(1), getattr(module, "window", None)) if module.causal else everything(x.size(1), x.size(1))


def relative(module, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Transformer-XL's attention to the keys at the queries' own positions."""
    return reference.transformer_xl_attention(q, k, v, relative_vectors(module, q.size(2)), module.u, module.v, seen)


def relative_vectors(module, n: int, m: int = 0) -> Tensor:
    """W_r R_{i−j} of N queries and of the M keys before them and their N own: (N, M + N, H, D)."""
    distance = reference.distances(m + n)[m:]
    return reference.relative_vectors(distance, module.r_proj.weight, module.clamp_len).unflatten(-1, module.u.shape)


def features(module, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """φ(q) and φ(k) of the module's feature map, by its name."""
    feature_map = module.feature_map
    name = type(feature_map).__name__
    if name == "EluFeatureMap":
        return reference.elu_features(q), reference.elu_features(k)
    if name == "ReluFeatureMap":
        return reference.relu_features(q, feature_map.floor), reference.relu_features(k, feature_map.floor)
    if name == "StirredHedgehog":
        of_q, of_k = feature_map.query_weight, feature_map.key_weight
        return reference.hedgehog_features(q, of_q), reference.hedgehog_features(k, of_k)
    raise NotImplementedError(f"write the definition of {name} here")


def epsilon(module) -> float:
    """What is added to the denominator, by the map's name: 10⁻⁶, or 10⁻¹² as in LoLCATs' code (Zhang et al. 2024)."""
    return 1e-12 if type(module.feature_map).__name__ == "StirredHedgehog" else 1e-6


def random_features(module, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """A Performer's attention, with the module's own random vectors."""
    phi = module.feature_map
    return reference.performer_attention(q, k, v, phi.omega, seen, features=phi.features, eps=phi.eps)
