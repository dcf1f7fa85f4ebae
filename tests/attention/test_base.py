"""What every kind of attention does alike, where no law says it: errors of options, dropout, and sums."""

import re
from functools import partial

import pytest
import torch

from lit_effattn import sequence
from lit_effattn.attention import (
    CompressiveAttention,
    DeltaNetAttention,
    GatedDeltaNetAttention,
    GatedLinearAttention,
    HedgehogFeatureMap,
    InfiniteAttention,
    KimiDeltaAttention,
    LinearAttention,
    LinearCrossAttention,
    LSHAttention,
    Mamba2Attention,
    PerformerAttention,
    PerformerCrossAttention,
    ReluFeatureMap,
    RetentionAttention,
    ShawAttention,
    SoftmaxAttention,
    SoftmaxCrossAttention,
    SparseAttention,
    TransformerXLAttention,
    WindowedLinearAttention,
)

E, H = 12, 3
FIXED = {"pattern": "fixed", "stride": 6, "summary": 2}
BAD_OPTIONS = {
    SoftmaxAttention: [
        ({"d_model": 10, "n_heads": 3}, "n_heads=3", "d_model=10"),
        ({"n_heads": 0}, "n_heads=0"),
        ({"d_model": 0}, "d_model=0"),
        ({"window": 0}, "window=0"),
        ({"window": 4, "causal": False}, "window=4", "causal"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"dropout": -0.1}, "dropout=-0.1"),
        ({"d_qk": 7}, "d_qk=7", "n_heads=3"),
        ({"d_qk": 0}, "d_qk=0"),
        ({"n_kv_heads": 2}, "n_kv_heads=2", "n_heads=3"),
        ({"head_dim": 0}, "head_dim=0"),
        ({"qk_norm_eps": 0.0}, "qk_norm_eps=0.0"),
    ],
    ShawAttention: [({"max_distance": 0}, "max_distance=0", "at least 1")],
    LinearAttention: [
        ({"chunk_size": 0}, "chunk_size=0"),
        ({"feature_map": partial(ReluFeatureMap, floor=-1.0)}, "floor=-1.0"),
        ({"feature_map": partial(HedgehogFeatureMap, eps=0.0)}, "eps=0.0"),
    ],
    PerformerAttention: [
        ({"n_features": 0}, "n_features=0"),
        ({"n_features": 7, "features": "hyperbolic"}, "n_features=7", "hyperbolic", "even"),
        ({"n_features": 7, "features": "trigonometric"}, "n_features=7", "trigonometric", "even"),
        ({"features": "cosine"}, "features='cosine'", "positive"),
        ({"norms": "one"}, "norms='one'", "sqrt_d"),
        ({"eps": -1e-4}, "eps=-0.0001", "at least 0"),
        ({"eps": 1e-4, "features": "hyperbolic"}, "eps=0.0001", "hyperbolic", "positive and relu"),
        ({"chunk_size": 0}, "chunk_size=0"),
        ({"chunk_size": 48}, "chunk_size=48", "power of 2"),
    ],
    WindowedLinearAttention: [
        ({"causal": False}, "causal=False"),
        ({"window": 0}, "window=0"),
        ({"chunk_size": 0}, "chunk_size=0"),
    ],
    LSHAttention: [
        ({"n_buckets": 7}, "n_buckets=7", "even"),
        ({"n_buckets": 0}, "n_buckets=0", "even"),
        ({"n_buckets": -2}, "n_buckets=-2", "even"),
        ({"chunk_size": 0}, "chunk_size=0"),
        ({"n_hashes": 0}, "n_hashes=0"),
    ],
    SparseAttention: [
        ({"pattern": "random"}, "pattern='random'", "strided"),
        ({"combine": "both"}, "combine='both'", "merged"),
        ({"stride": 0}, "stride=0"),
        ({"summary": 2}, "summary=2", "pattern='strided'", "pattern='fixed'"),
        ({"distinct": True}, "distinct=True", "pattern='strided'"),
        ({"num_verts": 1}, "num_verts=1", "pattern='strided'"),
        (FIXED | {"num_verts": 2}, "num_verts=2", "n_heads=3"),
        (FIXED | {"num_verts": 0}, "num_verts=0", "n_heads=3"),
        (FIXED | {"num_verts": 3, "summary": 3}, "num_verts=3", "summary=3", "stride=6", "9"),
        (FIXED | {"num_verts": 3, "distinct": True}, "distinct=True", "num_verts=3"),
        (FIXED | {"summary": 0}, "summary=0", "stride=6"),
        (FIXED | {"summary": 7}, "summary=7", "stride=6"),
        (FIXED | {"summary": 3, "distinct": True}, "distinct=True", "n_heads=3", "summary=3", "stride=6"),
        ({"combine": "heads", "n_heads": 1}, "combine='heads'", "n_heads=1"),
        ({"dropout": 1.0}, "dropout=1.0"),
    ],
    TransformerXLAttention: [
        ({"d_model": 9}, "d_model=9", "odd"),
        ({"mem_len": -1}, "mem_len=-1"),
        ({"mem_len": 0, "same_length": True}, "same_length=True", "mem_len=0"),
        ({"same_length": True, "causal": False}, "same_length=True", "causal"),
        ({"clamp_len": -2}, "clamp_len=-2"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"position_dropout": -0.1}, "position_dropout=-0.1"),
        ({"chunk_size": 0}, "chunk_size=0"),
    ],
    CompressiveAttention: [
        ({"causal": False}, "causal=False"),
        ({"compressed_len": 0}, "compressed_len=0", "TransformerXLAttention"),
        ({"compression_rate": 0}, "compression_rate=0"),
        ({"segment_len": 0}, "segment_len=0"),
        ({"compression": "median"}, "compression='median'", "conv"),
    ],
    InfiniteAttention: [
        ({"causal": False}, "causal=False"),
        ({"segment_len": 0}, "segment_len=0"),
        ({"n_basis": -2}, "n_basis=-2"),
        ({"n_basis": 9, "widths": (0.1, 0.2)}, "n_basis=9", "2 widths"),
        ({"widths": ()}, "widths=()"),
        ({"widths": (0.1, 0.0)}, "widths=(0.1, 0.0)"),
        ({"ridge": 0.0}, "ridge=0.0"),
        ({"tau": 1.0}, "tau=1.0"),
        ({"n_samples": 0}, "n_samples=0"),
        ({"n_bins": 0}, "n_bins=0"),
        ({"sigma_0": 0.0}, "sigma_0=0.0"),
        ({"kl_weight": -1.0}, "kl_weight=-1.0"),
        ({"writes": "all"}, "writes='all'", "evicted"),
        ({"grid": "even"}, "grid='even'", "ends"),
        ({"sampling": "all", "sticky": True}, "sampling='all'", "bins"),
        ({"sampling": "bins"}, "sampling='bins'", "sticky=True"),
        *(
            ({"short_term": "softmax", name: value}, f"{name}={value}", "short_term='softmax'")
            for name, value in {"clamp_len": 3, "position_dropout": 0.1, "share_uv": True}.items()
        ),
    ],
    DeltaNetAttention: [
        ({"d_model": 10}, "n_heads=3", "d_model=10"),
        ({"n_heads": 0}, "n_heads=0"),
        ({"causal": False}, "n_heads=3", "even"),
        ({"beta_max": 0.0}, "beta_max=0.0", "above 0"),
        ({"beta_max": 2.1}, "beta_max=2.1", "at most 2"),
        ({"conv_size": 0}, "conv_size=0"),
        ({"qk_dim": 0}, "qk_dim=0"),
        ({"head_dim": 0}, "head_dim=0"),
        ({"n_qk_heads": 2}, "n_qk_heads=2", "n_heads=3"),
        ({"n_qk_heads": 0}, "n_qk_heads=0"),
        ({"norm_eps": 0.0}, "norm_eps=0.0"),
        ({"chunk_size": 0}, "chunk_size=0"),
    ],
    GatedDeltaNetAttention: [({"n_qk_heads": 2}, "n_qk_heads=2"), ({"beta_max": 3.0}, "beta_max=3.0")],
    KimiDeltaAttention: [({"conv_size": 0}, "conv_size=0")],
    RetentionAttention: [({"qk_dim": 1}, "width=1", "at least 2"), ({"norm_eps": -1.0}, "norm_eps=-1.0")],
    GatedLinearAttention: [
        ({"tau": 0.0}, "tau=0.0"),
        ({"gate_rank": 0}, "gate_rank=0"),
        ({"n_heads": E}, "head_dim=1 must be at least 2"),
    ],
    Mamba2Attention: [({"n_qk_heads": 2}, "n_qk_heads=2", "n_heads=3"), ({"qk_dim": 0}, "qk_dim=0")],
    SoftmaxCrossAttention: [({"n_heads": 5}, "n_heads=5", "d_model=12"), ({"dropout": 1.0}, "dropout=1.0")],
    LinearCrossAttention: [({"d_qk": 7}, "d_qk=7", "n_heads=3")],
    PerformerCrossAttention: [({"n_features": 0}, "n_features=0")],
}


def test_bad_options_are_named():
    for kind in BAD_OPTIONS:
        for options, *words in BAD_OPTIONS[kind]:
            with pytest.raises(ValueError, match=".*".join(map(re.escape, words))):
                kind(**{"d_model": E, "n_heads": H} | options)


MEMORY = {"mem_len": 4, "segment_len": 4}
SIGNAL = MEMORY | {"n_basis": 10, "widths": (0.1, 0.2), "n_samples": 6}


def test_dropout_in_training_alone():
    for make in [
        SoftmaxAttention,
        partial(SoftmaxAttention, window=4),
        ShawAttention,
        partial(ShawAttention, window=4),
        partial(SparseAttention, stride=4),
        partial(SparseAttention, stride=4, combine="heads"),
        partial(SparseAttention, stride=4, combine="local"),
        partial(SparseAttention, stride=4, causal=False),
        partial(SparseAttention, **FIXED),
        partial(SparseAttention, **FIXED, combine="distant"),
        TransformerXLAttention,
        partial(CompressiveAttention, **MEMORY, compressed_len=5, compression_rate=3),
        partial(InfiniteAttention, **SIGNAL),
        partial(InfiniteAttention, **SIGNAL, short_term="softmax"),
    ]:
        x = torch.randn(2, 20, E)
        relative = hasattr(make(E, H), "position_dropout") and "short_term" not in getattr(make, "keywords", {})
        for option in ("dropout", "position_dropout") if relative else ("dropout",):
            torch.manual_seed(0)
            attention = make(E, H, **{option: 0.5})
            assert not torch.equal(attention(x)[0], attention(x)[0])
            torch.manual_seed(0)
            assert torch.equal(attention.eval()(x)[0], make(E, H)(x)[0])


SUMS = [
    (LinearAttention, "sz"),
    *(
        (partial(PerformerAttention, features=features), "szm")
        for features in ("positive", "hyperbolic", "trigonometric", "relu")
    ),
]
"""Kinds whose state is sums, and the sums."""


@pytest.mark.parametrize(("make", "names"), SUMS)
def test_sums_have_at_least_float32(make, names: str):
    def types(attention, state=None):
        dtype = attention.out_proj.weight.dtype
        results = [attention(torch.randn(1, n, E, dtype=dtype), state) for n in (1, 5)]
        (found,) = {(y.dtype, *(getattr(after, name).dtype for name in names)) for y, after in results}
        return found

    wide = [torch.float32] * len(names)
    with torch.autocast("cpu", torch.bfloat16):
        attention = make(E, H)
        assert types(attention) == types(attention, attention.initial_state(1)) == (torch.bfloat16, *wide)
    for dtype in (torch.float16, torch.bfloat16):
        attention = make(E, H).to(dtype)
        assert types(attention) == types(attention, attention.initial_state(1)) == (dtype, *wide)
        assert attention.initial_state(1).s.dtype == torch.float32
    assert make(E, H).initial_state(1, dtype=torch.float16).z.dtype == torch.float32
    assert types(make(E, H).double()) == (torch.float64, *[torch.float64] * len(names))


def test_a_donated_step_adds_in_place():
    for make, names in [*SUMS, *((kind, "s") for kind in (DeltaNetAttention, GatedLinearAttention, Mamba2Attention))]:
        attention = make(E, H)
        with torch.no_grad(), sequence.donated():
            state = attention.initial_state(2)
            _, after = attention(torch.randn(2, 1, E), state)
        assert all(getattr(after, name) is getattr(state, name) for name in names)


def test_a_kind_of_ones_own_may_have_a_module_called_dropout():
    class Mine(LinearAttention):
        def __init__(self, *args):
            super().__init__(*args)
            self.dropout = torch.nn.Dropout(0.5)

    assert isinstance(Mine(E, H, True).dropout, torch.nn.Dropout)


# --------------------------------------------------------------------------------------- heads that processes divide


def test_a_process_computes_its_heads():
    """The features of the second half of the heads, and a state of these alone."""
    attention = PerformerAttention(8, 4, n_features=6)
    attention.keep_heads(1, 2)
    assert attention.n_heads == attention.n_kv_heads == 2
    torch.testing.assert_close(
        attention.feature_map.directions(torch.float32), attention.feature_map.omega[2:], rtol=0, atol=0
    )
    assert attention.initial_state(3).s.shape == (3, 2, 6, 2)
    attention.redraw(torch.Generator().manual_seed(0))
    whole = PerformerAttention(8, 4, n_features=6)
    whole.redraw(torch.Generator().manual_seed(0))
    torch.testing.assert_close(attention.feature_map.omega, whole.feature_map.omega, rtol=0, atol=0)


def test_what_does_not_divide_is_told():
    for attention, size, said in [
        (SoftmaxAttention(8, 4), 3, "tensor_parallel_size=3 does not divide n_heads=4 of SoftmaxAttention"),
        (SoftmaxAttention(8, 4, n_kv_heads=1), 2, "tensor_parallel_size=2 does not divide n_kv_heads=1 of Softmax"),
        (LinearCrossAttention(8, 4), 3, "tensor_parallel_size=3 does not divide n_heads=4 of LinearCrossAttention"),
        (
            TransformerXLAttention(8, 4, mem_len=3),
            2,
            "TransformerXLAttention does not divide its heads among processes",
        ),
        (ShawAttention(8, 4), 2, "ShawAttention does not divide its heads among processes; leave it out, or choose"),
        (LinearAttention(8, 4, feature_map=HedgehogFeatureMap), 2, "LinearAttention does not divide its heads"),
        (LinearCrossAttention(8, 4, feature_map=partial(HedgehogFeatureMap)), 2, "LinearCrossAttention does not divi"),
    ]:
        with pytest.raises(ValueError, match=said):
            attention.keep_heads(0, size)
        assert attention.n_heads == 4
