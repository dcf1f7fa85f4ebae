import copy
import itertools
from functools import partial

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lit_effattn import Transformer, sequence
from lit_effattn.attention import InfiniteAttention, SoftmaxAttention, long_term_memory
from lit_effattn.laws.subject import stream
from lit_effattn.nn.transformer import Block, FeedForward
from lit_effattn.ops.continuous import jitter, normal_masses, width_divergence
from tests.laws import definitions
from tests.support.tensor_sizes import Largest, Made

E, H, D = 12, 3, 4
SIZES = {"mem_len": 4, "segment_len": 4, "n_basis": 10, "widths": (0.1, 0.2), "n_samples": 6, "n_bins": 8}


def make(**options) -> InfiniteAttention:
    torch.manual_seed(0)
    return InfiniteAttention(E, H, **SIZES | options).double()


def inputs(batch: int, n: int) -> torch.Tensor:
    return torch.randn(batch, n, E, dtype=torch.float64, generator=torch.Generator().manual_seed(n))


def test_softmax_attention_within_segments_gets_a_long_term_memory():
    """Without the signal's term each segment is softmax attention to itself; the first one has no such term anyway."""
    for chunk_size in [3, 128]:
        softmax = SoftmaxAttention(E, H).double()
        attention = make(short_term="softmax", mem_len=0, bias=True, chunk_size=chunk_size)
        left = attention.load_state_dict(softmax.state_dict(), strict=False)
        assert not left.unexpected_keys
        assert all(name.startswith(attention.extra_parameters) for name in left.missing_keys)
        x = inputs(2, 11)
        alone = torch.cat([softmax(segment)[0] for segment in x.split(4, 1)], 1)
        y, _ = attention(x)
        torch.testing.assert_close(y[:, :4], alone[:, :4])
        assert not torch.isclose(y[:, 4:], alone[:, 4:]).any()
        attention.ltm_out_proj.weight.data.zero_()
        torch.testing.assert_close(attention(x)[0], alone)
        torch.testing.assert_close(stream(attention, x, [1] * 11)[0], alone)


def test_a_signal_of_inputs_as_they_were():
    """As in the authors' code for GPT-2: the LayerNorm is before the short-term memory and the queries alone."""
    for options, norm_signal in itertools.product(
        [{}, {"short_term": "softmax", "mem_len": 0, "bias": True, "gate": True}], [True, False]
    ):
        attention = InfiniteAttention(E, H, **SIZES | options, norm_signal=norm_signal)
        block = Block(attention, FeedForward(E, 16), norm_memory=True).double()
        norm = block.norm_1
        torch.nn.init.normal_(norm.weight)
        torch.nn.init.normal_(norm.bias)
        x = 3 * inputs(2, 21) + 1
        expected = definitions.infinite(attention, norm(x), norm(x) if norm_signal else x)
        found, state = stream(attention, x, [9, 1, 1, 10])
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(attention(x)[0], expected)
        torch.testing.assert_close(state.inputs, x[:, -state.inputs.size(1) :])


def test_a_signal_of_inputs_as_they_were_needs_them():
    kind = partial(InfiniteAttention, **SIZES, norm_signal=False)
    for options in ({}, {"norm": "post", "norm_memory": True}):
        with pytest.raises(ValueError, match=r"norm_signal=False with norm=.* set norm='pre' and norm_memory=True"):
            Transformer(E, H, 1, attention=kind, **options)
    Transformer(E, H, 1, attention=kind, norm_memory=True)


def test_the_signal_and_where_it_is_attended_to():
    attention = make(n_basis=40, widths=(0.05, 0.1), ridge=1e-6, mem_len=0, segment_len=20, n_samples=40)
    wave = torch.sin(torch.pi * (torch.arange(20, dtype=torch.float64) + 0.5) / 20) ** 3
    x = torch.cat([wave, -wave, wave])[None, :, None].repeat(1, 1, E)
    _, before = attention(x[:, :40])  # the second segment waits for who attends to it
    _, after = attention(x[:, 40:41], before)
    t = torch.linspace(0.1, 0.9, 9, dtype=torch.float64)
    expected = torch.sin(torch.pi * t) ** 3
    for state, times, sign in ((before, t, 1), (after, t / 2, 1), (after, 0.5 + t / 2, -1)):
        torch.testing.assert_close(attention.signal(state, times)[0, :, 0], sign * expected, atol=0.02, rtol=0)

    grid = torch.linspace(-20, 21, 41001, dtype=torch.float64)
    density = attention.density(x[:, :3], after, grid)
    assert density.shape == (1, H, 3, len(grid))
    torch.testing.assert_close(density.sum(-1) / 1000, torch.ones(1, H, 3, dtype=torch.float64))
    mean, variance = attention.long_term.attended(attention._heads(attention.ltm_q_proj(x[:, :3])), after.coefficients)
    torch.testing.assert_close((density * grid).sum(-1) / 1000, mean)
    torch.testing.assert_close((density * grid**2).sum(-1) / 1000 - mean**2, variance)
    assert ((mean > 0) & (mean < 1)).all()


def test_sticky_samples_are_quantiles_of_where_it_was_attended_to():
    attention = make(sticky=True, n_samples=64).eval()
    with torch.no_grad():
        attention.ltm_density.bias.copy_(torch.tensor([1.5, -5.0]))  # narrow, around sigmoid(1.5) = 0.82
        _, before = attention(inputs(1, 12))
        mean, variance = attention.long_term.attended(
            attention._heads(attention.ltm_q_proj(inputs(1, 12)[:, 8:])), before.coefficients
        )
        torch.testing.assert_close(before.histogram[0], normal_masses(mean, variance, 8).sum((0, 1, 2)))
        times = attention.sample_times(before)
        share = before.histogram[0] / before.histogram.sum()
    count = torch.histc(times, 8, 0, 1)
    assert ((count - 64 * share).abs() < 1.1).all()  # one at each border
    assert (times.diff() > 0).all()
    assert ((times > 0.7) & (times < 0.95)).sum() > 45
    assert make().sample_times(before).tolist() == [(i + 0.5) / 6 for i in range(6)]


@pytest.mark.parametrize("authors", [False, True])
def test_parameters_of_the_long_term_memory(authors: bool):
    """3,520 in the authors' code: W_k', W_v', W_o', the gate, and two rows of n_basis."""
    e, n = 24, 20
    attention = InfiniteAttention(e, 3, n_basis=n, gate=True, tie_query=authors, density_bias=not authors)
    count = sum(p.numel() for name, p in attention.named_parameters() if name.startswith(("ltm_", "gate")))
    assert count == (3 * e**2 + (3 * e**2 + e) + 2 * n if authors else 4 * e**2 + (3 * e**2 + e) + 2 * (n + 1))
    assert count == (3520 if authors else 4098)


def test_the_authors_formulas():
    """The long-term term after each of five writes, with their queries, times, zeros around and densities."""
    authors = {"tie_query": True, "density_bias": False, "grid": "ends", "ridge": 1.0, "tau": 0.75, "gate": True}
    attention = make(**authors)
    off = make(n_basis=0)
    off.load_state_dict(attention.state_dict(), strict=False)
    x = inputs(2, 32)
    found = attention(x)[0] - off(x)[0]
    w = {name: p.detach() for name, p in attention.named_parameters()}
    length, samples = 4, 6
    centres, sigmas = torch.linspace(0, 1, 5, dtype=torch.float64).repeat(2), torch.tensor([0.1, 0.2]).double()
    psi = torch.distributions.Normal(centres, sigmas.repeat_interleave(5))

    def fit(targets, times, around):
        """B = X F' (F F' + λI)⁻¹, with zeros at the times `around` that are not in [0, 1]."""
        f = psi.log_prob(torch.cat([times, around[(around < 0) | (around > 1)]])[:, None]).exp().T
        g = f.T @ torch.linalg.inv(f @ f.T + torch.eye(10, dtype=torch.float64))
        return torch.einsum("bte,tn->bne", targets, g[: len(times)])

    b = None
    for start in range(8, 32, 4):  # mem_len = 4: the segment that is written ended 4 positions before
        k = x[:, start - 8 : start - 4]
        mask = torch.nn.functional.conv1d(k.mT, w["gate.weight"], w["gate.bias"], padding=1).sigmoid().mT
        k = k * mask
        if b is None:
            n = length
            i = torch.arange(2 * n, dtype=torch.float64)
            around = -0.5 + (i + 0.5) / n
            b = fit(k, (torch.arange(n) + 0.5).double() / n, around)
        else:
            n, shift = length + samples, 1 / (2 * length + samples)
            old, new = torch.arange(1, samples + 1).double() / samples, torch.arange(1, length + 1).double() / length
            around = torch.linspace(-0.5 + shift, 1.5 - shift, 2 * n, dtype=torch.float64)
            past = psi.log_prob(old[:, None]).exp() @ b
            b = fit(torch.cat([past, k], 1), torch.cat([0.75 * old, 0.75 + 0.25 * new]), around)
        q, k, v = (
            (y @ w[name].T).unflatten(2, (H, D)).transpose(1, 2)
            for y, name in (
                (x[:, start : start + 4], "q_proj.weight"),
                (b, "ltm_k_proj.weight"),
                (b, "ltm_v_proj.weight"),
            )
        )
        scores = q @ k.mT / D**0.5  # (B, H, 4, n_basis)
        mean, variance = (scores @ w["ltm_density.weight"].T).unbind(-1)
        mean, variance = mean.sigmoid()[..., None], torch.nn.functional.softplus(variance)[..., None].clamp(min=1e-6)
        r = torch.distributions.Normal(centres, (variance + psi.scale**2).sqrt()).log_prob(mean).exp()
        expected = (r @ v).transpose(1, 2).flatten(2) @ w["ltm_out_proj.weight"].T
        # Their variance is at least 1e-6, ours 1e-6 more.
        torch.testing.assert_close(found[:, start : start + 4], expected, rtol=1e-4, atol=1e-6)


def test_sticky_samples_of_the_authors_code():
    """Left edges of bins that are drawn by their masses, as often as these say, with repetition, in both modes.

    In training rows draw apart. In evaluation rows at the same position draw alike.
    """
    attention = make(sticky=True, sampling="bins", n_samples=2000)
    state = attention.initial_state(3)
    mass = torch.tensor([0, 1.0, 2, 0, 4, 1, 0, 0])
    state = state._replace(histogram=torch.stack([mass, mass, 0 * mass]).double())
    times = attention.sample_times(state)
    assert (times.diff() >= 0).all()
    share = torch.stack([(times == i / 8).double().mean(1) for i in range(8)], 1)  # (3, 8)
    assert (share.sum(1) == 1).all()
    expected = torch.stack([mass / 8, mass / 8, torch.full_like(mass, 1 / 8)])
    assert ((share - expected).abs() < 4 * (expected * (1 - expected) / 2000).sqrt() + 1e-9).all()
    assert not torch.equal(share[0], share[1])
    later = attention.sample_times(state._replace(counter=state.counter + 1))
    assert not torch.equal(times[0], later[0])
    equal, same, _ = attention.eval().sample_times(state)
    assert torch.equal(equal, same)
    assert not torch.equal(equal, attention.sample_times(state._replace(length=state.length + 12))[0])


def test_jitter_in_training_comes_from_the_state_alone():
    attention = make(sticky=True).train()
    x = inputs(1, 24).expand(2, -1, -1)
    torch.manual_seed(1)
    y, state = attention(x)
    torch.manual_seed(2)
    z, again = attention(x)
    assert torch.equal(y, z)
    assert torch.equal(state.coefficients, again.coefficients)
    same = (y[0] - y[1]).abs().amax(-1) < 1e-12
    assert same[:12].all()  # until the second update, the first with samples
    assert not same[12:].any()
    _, carried = attention(x[:, :13])
    parts = attention(x[:, 13:], carried)[0]
    torch.testing.assert_close(torch.cat([attention(x[:, :13])[0], parts], 1), y)
    assert not torch.equal(attention.eval()(x)[0], y)
    torch.testing.assert_close(*attention(x)[0])

    # A segment is written before the positions 8, 12, 16 and 20; each update has other jitter.
    assert (state.counter - attention.initial_state(2).counter).tolist() == [4, 4]
    fresh = attention.reset(state, torch.tensor([True, False]))
    assert torch.equal(fresh.counter, state.counter)
    assert fresh.length.tolist() == [0, 24]


def test_every_row_of_a_batch_has_other_jitter():
    assert len(jitter(make(sticky=True).initial_state(64).counter, 1, torch.float64).unique()) == 64


def test_the_gate_learns_from_detached_memories():
    """A segment is written by the call that attends to it first."""
    attention = make(gate=True)
    state = None
    for segment in inputs(2, 16).split(4, 1):
        y, state = attention(segment, sequence.detach(state))
    y.square().sum().backward()
    assert all((p.grad != 0).any() for p in attention.parameters())


def test_all_parameters_have_a_gradient_before_anything_is_remembered():
    """DDP waits for a gradient of each."""
    for lengths in [None, [3, 0]]:
        attention = make(gate=True, sticky=True)
        y, state = attention(inputs(2, 3), None, None if lengths is None else torch.tensor(lengths))
        (y.sum() + sequence.losses(state).sum()).backward()
        for name, p in attention.named_parameters():
            assert p.grad is not None, name
            assert name.startswith(("ltm", "gate")) == bool((p.grad == 0).all()), name


def test_all_parameters_have_a_gradient_in_a_call_that_writes_nothing():
    attention = make(gate=True)
    x = inputs(2, 16)
    _, state = attention(x[:, :13])
    attention(x[:, 13:15], sequence.detach(state))[0].sum().backward()
    assert all(p.grad is not None for p in attention.parameters())
    assert attention.ltm_v_proj.weight.grad.abs().sum() > 0
    assert (attention.gate.weight.grad == 0).all()


def test_how_many_positions_go_together_changes_nothing(monkeypatch: pytest.MonkeyPatch):
    attention, x, lengths = make(), inputs(3, 30), torch.tensor([30, 17, 9])
    _, state = attention(x[:, :11], lengths=torch.tensor([3, 11, 0]))
    y, after = attention(x, state, lengths)
    for together in (1, 8):
        monkeypatch.setattr(long_term_memory, "_TOGETHER", together)
        z, again = attention(x, state, lengths)
        torch.testing.assert_close(z, y)
        torch.testing.assert_close(tuple(again), tuple(after))


@pytest.mark.parametrize("sticky", [False, True])
def test_what_a_call_makes_grows_with_its_length(sticky: bool):
    attention = make(sticky=sticky, chunk_size=8)

    def made(n: int) -> int:
        x = inputs(1, n).requires_grad_()
        with Made() as made:
            attention(x)[0].sum().backward()
        return sum(made.sizes)

    assert made(256) < 1.1 * 4 * made(64)


@pytest.mark.parametrize("lengths", [None, [11, 6, 1]])
def test_the_loss_is_the_mean_divergence(lengths: list[int] | None):
    attention = make(kl_weight=0.3, sigma_0=0.2)
    past, x = inputs(3, 9), inputs(3, 11)
    before = [9, 2, 7]
    _, state = attention(past, None, torch.tensor(before))
    _, state = attention(x, state, None if lengths is None else torch.tensor(lengths))
    for row in range(3):
        n = 11 if lengths is None else lengths[row]
        stream = torch.cat([past[row, : before[row]], x[row, :n]])[None]
        divergences, alone = [], None
        for t in range(stream.size(1)):
            _, alone = attention(stream[:, t : t + 1], alone)
            if t >= max(8, before[row]):
                q = attention._heads(attention.ltm_q_proj(stream[:, t : t + 1]))
                divergences.append(width_divergence(attention.long_term.attended(q, alone.coefficients)[1], 0.2).mean())
        expected = 0.3 * torch.stack(divergences).mean() if divergences else torch.tensor(0.0).double()
        torch.testing.assert_close(state.loss[row], expected)
        assert (expected > 0) == (stream.size(1) > 8)
    assert (make(kl_weight=0.0)(x)[1].loss == 0).all()


def test_the_loss_makes_densities_narrow():
    attention = make(kl_weight=1.0, sigma_0=0.05)
    _, state = attention(inputs(2, 16))
    sequence.losses(state).sum().backward()
    assert attention.ltm_density.bias.grad[1] > 0
    assert (attention.ltm_q_proj.weight.grad != 0).any()
    assert attention.q_proj.weight.grad is None


def test_size_and_cost_do_not_depend_on_the_tokens_seen():
    attention = make(sticky=True).float()
    sizes, largest = set(), []
    with torch.no_grad():
        state = None
        for _ in range(30):
            with Largest() as elements:
                _, state = attention(torch.zeros(2, 10, E), state)
            sizes.add(sequence.nbytes(state))
            largest.append(elements.elements)
        state = state._replace(length=state.length + 4_000_000)
        with Largest() as elements:
            _, state = attention(torch.zeros(2, 10, E), state)
    assert sizes == {sequence.nbytes(attention.initial_state(2))} == {2 * (8 * E * 4 + 10 * E * 4 + 8 * 4 + 8 + 8 + 4)}
    assert elements.elements <= max(largest)
    assert attention.bounded_by is None


def test_the_signal_is_kept_in_float32():
    for dtype in [torch.bfloat16, torch.float16]:
        attention = make(sticky=True).to(dtype)
        y, state = attention(inputs(2, 300).to(dtype))
        assert y.dtype == state.inputs.dtype == dtype
        assert state.coefficients.dtype == state.histogram.dtype == state.loss.dtype == torch.float32
        exact = make(sticky=True)
        exact.load_state_dict(attention.state_dict())
        _, expected = exact(inputs(2, 300).to(dtype).double())
        error = (state.coefficients - expected.coefficients).norm() / expected.coefficients.norm()
        assert error < 8 * torch.finfo(dtype).eps  # of where samples are taken; the fit itself is float32's
        assert attention.long_term.fit_next.dtype == torch.float32
        assert attention.double().long_term.fit_next.dtype == torch.float64


def test_copies_and_moves_keep_the_fit():
    attention = make()
    x = inputs(1, 20)
    assert torch.equal(copy.deepcopy(attention)(x)[0], attention(x)[0])
    torch.testing.assert_close(make().half().double().long_term.fit_next, make().long_term.fit_next, rtol=0, atol=0)
    assert not any("fit" in name for name in attention.state_dict())


def test_in_inference_mode_first():
    """Lightning validates in inference mode before it trains: what is made there must not stay."""
    attention = InfiniteAttention(E, H, **SIZES | {"n_samples": 9})
    x = torch.randn(1, 20, E)
    with torch.inference_mode():
        attention(x)
    attention(x)[0].sum().backward()


def test_evaluation_with_another_memory():
    changed, fresh = make(), make(mem_len=7, clamp_len=5)
    state = make(mem_len=8).initial_state(2)
    changed.set_memory(7, 5)
    x = inputs(2, 30)
    assert torch.equal(changed(x)[0], fresh(x)[0])
    with pytest.raises(ValueError, match=r"mem_len=7.*start with state=None"):
        changed(x, state)
    with pytest.raises(ValueError, match="clamp_len=3 with short_term='softmax'"):
        make(short_term="softmax").set_memory(0, clamp_len=3)


def test_few_queries_equal_many():
    attention = make(bias=True, mem_len=8)
    for p in attention.parameters():
        torch.nn.init.normal_(p)
    x = inputs(2, 30)
    attention._is_step = lambda q: False
    many = attention(x)[0]
    attention._is_step = lambda q: True
    torch.testing.assert_close(attention(x)[0], many)


def test_a_generated_token_does_not_project_its_memory():
    attention = InfiniteAttention(64, 2, mem_len=48, segment_len=48, n_basis=64, n_samples=48)
    with torch.no_grad():
        _, state = attention(torch.randn(1, 200, 64))
        with FlopCounterMode(display=False) as flops:
            attention(torch.randn(1, 1, 64), state)
    assert flops.get_total_flops() < 4 * 96 * 64 * 64 / 4  # W_k and W_v of 96 inputs would be 4 · 96 · 64²
