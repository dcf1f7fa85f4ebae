import math

import pytest
import torch
import torch.nn.functional as F

from lit_effattn import Transformer, sequence
from lit_effattn.attention import CompressiveAttention
from lit_effattn.laws.subject import stream
from tests.laws import definitions
from tests.support.tensor_sizes import Made

E, H, D = 12, 3, 4


def make(**options) -> CompressiveAttention:
    torch.manual_seed(0)
    return CompressiveAttention(E, H, **{"mem_len": 4, "compressed_len": 5, "compression_rate": 3, **options}).double()


def uneven_norm() -> torch.nn.LayerNorm:
    norm = torch.nn.LayerNorm(E).double()
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(-1, 2, E))
        norm.bias.copy_(torch.linspace(1, 0, E))
    return norm


def by_content(attention, x, inputs):
    """Softmax attention of `x` (N, E) to `inputs` (M, E), without positions: (N, H, D)."""
    for norm in attention._norm:
        x, inputs = norm(x), norm(inputs)
    q, k, v = (
        (t @ p.weight.T).unflatten(-1, (H, D))
        for p, t in ((attention.q_proj, x), (attention.k_proj, inputs), (attention.v_proj, inputs))
    )
    weights = (torch.einsum("nhd,mhd->nhm", q, k) / math.sqrt(D)).softmax(-1)
    return torch.einsum("nhm,mhd->nhd", weights, v)


def summaries(attention, inputs):
    """The convolution, by torch's own."""
    c = attention.compression_rate
    kernel = attention.compressor.weight.unflatten(1, (c, E)).transpose(1, 2)  # (E out, E in, c)
    return F.conv1d(inputs.T[None], kernel, stride=c)[0].T


@pytest.mark.parametrize("chunk_size", [3, 128])
def test_segments_are_compressed_as_in_algorithm_1(chunk_size: int):
    """Segment by segment, with the memories of the paper but for their zeros, and its loss."""
    attention = make(segment_len=6, mem_len=6, compressed_len=3, chunk_size=chunk_size)
    x = torch.randn(2, 36, E, dtype=torch.float64)
    memory = compressed = x[:, :0]
    whole = attention(x)[0]
    torch.testing.assert_close(stream(attention, x, [5, 2, 4, 12, 1, 12])[0], whole)
    state = None
    for t, h in enumerate(x.split(6, 1)):
        keys = torch.cat([compressed, memory, h], 1)
        n = keys.size(1) - 6  # keys before the segment
        q, _, _ = definitions.queries_keys_values(attention, h)
        _, k, v = definitions.queries_keys_values(attention, keys)
        r = definitions.relative_vectors(attention, 6, n)
        scores = (q + attention.u[:, None]) @ k.mT + torch.einsum("bhid,ijhd->bhij", q + attention.v[:, None], r)
        seen = torch.ones(6, n + 6, dtype=torch.bool).tril(n)
        weights = (scores / math.sqrt(D)).masked_fill(~seen, -torch.inf).softmax(-1)
        y, state = attention(h, state)
        torch.testing.assert_close(y, definitions.heads_together(attention, weights @ v))
        torch.testing.assert_close(y, whole[:, 6 * t : 6 * t + 6])
        old, memory = torch.cat([memory, h], 1).tensor_split([memory.size(1)], 1)
        if old.size(1):
            new = torch.stack([summaries(attention, row) for row in old])
            compressed = torch.cat([compressed, new], 1)[:, -3:]
            if chunk_size > 6:
                differences = [by_content(attention, *rows) for rows in zip(h, new, strict=True)]
                exact = [by_content(attention, *rows) for rows in zip(h, old, strict=True)]
                expected = (torch.stack(differences) - torch.stack(exact)).square().mean((1, 2, 3))
                torch.testing.assert_close(state.loss, expected)


@pytest.mark.parametrize("lengths", [None, [11, 6, 1]])
@pytest.mark.parametrize("normed", [False, True])
def test_the_loss_is_the_difference_that_compression_makes(lengths: list[int] | None, normed: bool):
    attention = make()
    if normed:
        attention.normalise_with(uneven_norm())
    past, x = torch.randn(3, 9, E, dtype=torch.float64), torch.randn(3, 11, E, dtype=torch.float64)
    _, state = attention(past, None, torch.tensor([9, 2, 5]))
    _, state = attention(x, state, None if lengths is None else torch.tensor(lengths))
    for row, before in enumerate([9, 2, 5]):
        n = 11 if lengths is None else lengths[row]
        stream = torch.cat([past[row, :before], x[row, :n]])
        first, last = (max(0, (t - 4) // 3) * 3 for t in (before, before + n))
        expected = 0.0
        if first < last:
            old = stream[first:last]
            new = summaries(attention, old)
            expected = (by_content(attention, x[row, :n], new) - by_content(attention, x[row, :n], old)).square().mean()
        torch.testing.assert_close(state.loss[row], torch.as_tensor(expected, dtype=torch.float64), check_device=False)
    if lengths is not None:
        assert state.loss[2] == 0 < state.loss[0]
    assert torch.equal(sequence.losses((state, state)), 2 * state.loss)


def test_the_loss_of_a_long_call_is_that_of_its_chunks():
    """The mean over the queries of all chunks that push something out."""
    attention = make()
    x = torch.randn(1, 20, E, dtype=torch.float64)
    state, losses = None, []
    for segment in x.split(6, 1):  # 6, 6, 6 and 2; the first pushes nothing out
        _, state = attention(segment, state)
        losses.append(state.loss)
    assert losses[0] == 0 < losses[3]
    expected = (6 * losses[1] + 6 * losses[2] + 2 * losses[3]) / 14
    torch.testing.assert_close(make(chunk_size=6)(x)[1].loss, expected)


def test_the_loss_reaches_the_compressor_alone():
    attention, norm = make(bias=True), uneven_norm()
    attention.normalise_with(norm)
    x = torch.randn(2, 15, E, dtype=torch.float64, requires_grad=True)
    _, state = attention(x[:, :8])
    _, state = attention(x[:, 8:], state)
    assert (state.loss > 0).all()
    state.loss.sum().backward()
    for name, p in attention.named_parameters():
        if name.startswith("compressor"):
            assert (p.grad != 0).any(), name
        else:
            assert p.grad is None, name
    assert x.grad is norm.weight.grad is norm.bias.grad is None


def test_the_task_still_trains_what_the_loss_does_not():
    """Detaching in place would freeze W_k and W_v for the task, too."""
    attention = make()
    y, state = attention(torch.randn(2, 15, E, dtype=torch.float64))
    (y.square().sum() + sequence.losses(state).sum()).backward()
    assert all(p.grad is not None and (p.grad != 0).any() for p in attention.parameters())
    assert all(p.requires_grad for p in attention.parameters())


def test_no_loss_where_none_is_of_use():
    x = torch.randn(2, 15, E, dtype=torch.float64)
    attention = make()
    with torch.no_grad():
        assert (attention(x)[1].loss == 0).all()
    for compression in ("mean", "max"):
        assert (make(compression=compression)(x)[1].loss == 0).all()
    _, state = attention(x)
    assert (state.loss > 0).all()
    _, state = attention(x[:, :1], state)  # the 16th completes a window: 4 + 4 · 3
    assert (state.loss > 0).all()
    _, state = attention(x[:, :2], state)
    assert (state.loss == 0).all()


def test_the_loss_goes_through_a_transformer():
    model = Transformer(E, H, 2, attention=make_float, positions=None, gradient_checkpointing=True)
    _, state = model(torch.randn(2, 15, E))
    assert sequence.losses(state).shape == (2,)
    sequence.losses(state).sum().backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None and (p.grad != 0).any()}
    assert trained == {f"blocks.{i}.attention.compressor.weight" for i in range(2)}


def make_float(d_model: int, n_heads: int, causal: bool) -> CompressiveAttention:
    return CompressiveAttention(d_model, n_heads, causal, mem_len=4, compressed_len=5, compression_rate=3)


def test_the_loss_has_at_least_float32():
    for attention in (make().half(), make().float()):
        x = torch.randn(2, 15, E, dtype=attention.out_proj.weight.dtype)
        assert attention(x)[1].loss.dtype == attention.initial_state(2).loss.dtype == torch.float32


def test_evaluation_with_another_memory():
    changed, fresh = make(), make(mem_len=7, clamp_len=5)
    states = [make(mem_len=8).initial_state(2, max_len=max_len) for max_len in (None, 50)]
    changed.set_memory(7, 5)
    x = torch.randn(2, 30, E, dtype=torch.float64)
    assert torch.equal(changed(x)[0], fresh(x)[0])
    for state in states:
        with pytest.raises(ValueError, match=r"mem_len=7.*start with state=None"):
            changed(x, state)


def test_what_a_call_makes_grows_with_its_length():
    attention = make(chunk_size=8)

    def made(n: int) -> int:
        x = torch.randn(1, n, E, dtype=torch.float64, requires_grad=True)
        with Made() as made:
            y, state = attention(x)
            (y.sum() + state.loss.sum()).backward()
        return sum(made.sizes)

    assert made(1024) < 1.02 * 4 * made(256)


def test_a_step_writes_where_the_keys_lie():
    attention = make()
    x = torch.randn(2, 16, E, dtype=torch.float64)
    with torch.no_grad(), sequence.donated():
        _, state = attention(x[:, :14], attention.initial_state(2, max_len=50))
        assert state.keys.shape == state.values.shape == (2, H, 7 + 5, D)
        for i, written in ((14, 1), (15, 2)):  # the 16th position completes a window, too
            before = state.keys.clone()
            _, after = attention(x[:, i : i + 1], state)
            assert after.keys.data_ptr() == state.keys.data_ptr()
            assert after.inputs.data_ptr() == state.inputs.data_ptr()
            assert (before != after.keys).any(-1).any(1).sum(-1).tolist() == [written, written]
            state = after
    assert attention.initial_state(2, max_len=3).inputs.shape == (2, 3, E)


def test_generating_has_the_loss_of_feeding_one_at_a_time():
    attention = make()
    state, generated = attention.initial_state(1), attention.initial_state(1, max_len=20)
    losses = []
    for x in torch.randn(20, 1, 1, E, dtype=torch.float64):
        _, state = attention(x, state)
        _, generated = attention(x, generated)
        torch.testing.assert_close(generated.loss, state.loss)
        losses.append(state.loss.item())
    assert sum(loss > 0 for loss in losses) == 5
