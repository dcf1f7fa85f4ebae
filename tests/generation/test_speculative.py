"""Speculative decoding: the tokens of `generate`, or their distribution, whatever the draft."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lit_effattn import LSTM, Transformer
from lit_effattn.attention import LinearAttention, SoftmaxAttention, TransformerXLAttention
from lit_effattn.generation import Sampling, generate
from lit_effattn.generation import speculative as module
from lit_effattn.generation.drafts import DraftModel, NGrams, Proposal
from lit_effattn.generation.speculative import speculate, verified
from lit_effattn.nn.heads import CategoricalHead
from lit_effattn.sequence import SequenceModule
from tests.laws.cases import CAUSAL, Case
from tests.laws.tools import assert_same, copied
from tests.support.cases import of_kinds, some

V = 7


def around(backbone: SequenceModule, vocabulary: int = V, seed: int = 2, sharp: float = 5) -> DraftModel:
    """Return `backbone` between an embedding and a head whose distributions are far from uniform."""
    torch.manual_seed(seed)
    embed, head = nn.Embedding(vocabulary, backbone.d_input).double(), CategoricalHead(backbone.d_model, vocabulary)
    with torch.no_grad():
        head.proj.weight.mul_(sharp)
    return DraftModel(backbone.eval(), embed, head.double())


def small(vocabulary: int = V, seed: int = 5, sharp: float = 5) -> DraftModel:
    torch.manual_seed(seed)
    return around(Transformer(8, 2, 1, attention=LinearAttention, init="pytorch").double(), vocabulary, seed, sharp)


class Oracle:
    """Proposes what is known to follow, wrong from a place on that `right` says for each row and position."""

    def __init__(self, text: Tensor, right: Callable[[int, int], int], counts: Callable[[int, int], int]) -> None:
        self.text, self.right, self.counts = text, right, counts

    def begin(self, rows: int, room: int, sampling: Sampling) -> Any:
        assert (rows, room) == self.text.shape
        return self.propose

    def propose(self, tokens: Tensor, length: Tensor, most: Tensor, uniform: Tensor) -> Proposal:
        k = int(most.max())
        proposed, counts = torch.zeros(len(tokens), k, dtype=torch.long), torch.zeros_like(length)
        for row, n in enumerate(length.tolist()):
            assert torch.equal(tokens[row, :n], self.text[row, :n])
            counts[row] = min(int(most[row]), self.counts(row, n))
            for i in range(int(counts[row])):
                proposed[row, i] = (int(self.text[row, n + i]) + (i >= self.right(row, n))) % V
        return Proposal(proposed, counts)


ORACLES = {
    "right": (lambda row, n: 99, lambda row, n: 99),
    "wrong": (lambda row, n: 0, lambda row, n: 99),
    "ragged": (lambda row, n: (2 * row + n) % 5, lambda row, n: (row + 3 * n) % 5),
}


@pytest.mark.parametrize("case", of_kinds(CAUSAL))
@pytest.mark.parametrize("oracle", ORACLES)
def test_the_likeliest_tokens_are_those_of_generate(case: Case, oracle: str, monkeypatch: pytest.MonkeyPatch):
    """Of every kind, over several memories and chunks, with rows that accept different numbers of tokens."""
    monkeypatch.setattr(module, "_MOST_AGAIN", 5)
    made = around(case.build())
    prompt, n = torch.randint(V, (3, 6)), case.long + 2
    expected = generate(*made, prompt, n, temperature=0)
    draft = Oracle(torch.cat([prompt, expected], 1), *ORACLES[oracle])
    result = speculate(*made, prompt, n, draft, temperature=0)
    assert torch.equal(result.tokens, expected)
    if oracle == "right":
        assert result.accepted.tolist() == result.proposed.tolist() == [n - result.calls] * 3
        assert result.calls == 1 + -(-(n - 1) // 5)
    elif oracle == "wrong":
        assert result.accepted.tolist() == [0] * 3
    else:
        assert 0 < result.accepted.sum() < result.proposed.sum()


@pytest.mark.parametrize("case", of_kinds(CAUSAL))
def test_any_kind_can_be_the_draft(case: Case):
    """A draft with the model's weights is always right, also where its rows are read from different positions on."""
    made, prompt = around(case.build()), torch.randint(V, (3, 4))
    expected = generate(*made, prompt, 14, temperature=0)
    other = around(Transformer(8, 2, 1, attention=SoftmaxAttention).double())
    for draft in (made, NGrams(shortest=1)):
        result = speculate(*made, prompt, 14, draft, temperature=0)
        assert torch.equal(result.tokens, expected)
        if draft is made:
            assert torch.equal(result.accepted, result.proposed)
            assert result.calls == 4
    result = speculate(*other, prompt, 14, made, temperature=0)
    assert torch.equal(result.tokens, generate(*other, prompt, 14, temperature=0))


@pytest.mark.parametrize("mem_len", [0, 1, 3])
@pytest.mark.parametrize("oracle", ORACLES)
def test_a_memory_shorter_than_a_call_sees_what_single_steps_see(mem_len: int, oracle: str):
    """`generate` reads the prompt in one call, where positions see more than the memory, and then single tokens."""
    torch.manual_seed(3)
    attention = partial(TransformerXLAttention, mem_len=mem_len)
    made = around(Transformer(8, 2, 2, attention=attention, positions="auto", init="pytorch").double())
    for block in made.backbone.blocks:
        block.attention.out_proj.weight.data.mul_(5)
    prompt = torch.randint(V, (3, 7))
    expected = generate(*made, prompt, 21, temperature=0)
    draft = Oracle(torch.cat([prompt, expected], 1), *ORACLES[oracle])
    assert torch.equal(speculate(*made, prompt, 21, draft, temperature=0).tokens, expected)
    assert not made.backbone.blocks[0].attention.stepwise


# ------------------------------------------------------------------------------------------------ the distribution


def as_defined(p: list[float], temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0) -> list[float]:
    """Return the distribution that is drawn from, level by level."""
    p = [value ** (1 / temperature) for value in p]
    order = sorted(range(len(p)), key=lambda level: -p[level])[:top_k]
    total, taken, kept = sum(p[level] for level in order), 0.0, []
    for level in order:
        if taken < top_p * total * (1 - 1e-12):
            kept.append(level)
        taken += p[level]
    return [p[level] / sum(p[k] for k in kept) if level in kept else 0.0 for level in range(len(p))]


@torch.no_grad()
def probabilities_of_all(made: DraftModel, prompt: list[int], n: int, levels: int, **options: Any) -> Tensor:
    """Return the probability of each of the levelsⁿ continuations, by the chain rule."""
    every = torch.tensor([[*prompt, *rest] for rest in product(range(levels), repeat=n)])
    p = made.head.log_probs(made.backbone(made.embed(every))[0]).exp().tolist()
    first = len(prompt) - 1
    result = torch.ones(len(every), dtype=torch.float64)
    for row, text in enumerate(every.tolist()):
        for i in range(n):
            result[row] *= as_defined(p[row][first + i], **options)[text[first + 1 + i]]
    return result


def chi_square(seen: Tensor, expected: Tensor) -> tuple[float, int]:
    """Return χ² and its degrees of freedom; outcomes expected less than 8 times are one."""
    assert seen.sum() == pytest.approx(expected.sum().item())
    assert (seen[expected == 0] == 0).all()
    rare = expected < 8
    seen, expected = (torch.cat([t[~rare], t[rare].sum()[None]]) for t in (seen, expected))
    if expected[-1] < 8:
        seen, expected = seen[:-1], expected[:-1]
    return ((seen - expected) ** 2 / expected).sum().item(), len(expected) - 1


OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"top_k": 2},
    {"top_p": 0.7},
    {"temperature": 1.5, "top_k": 3, "top_p": 0.9},
]


@pytest.mark.parametrize(
    ("kind", "options"),
    some(product(["model", "ngrams", "itself"], OPTIONS), [*product(["model"], OPTIONS), ("ngrams", OPTIONS[4])]),
)
def test_the_distribution_is_the_models(kind: str, options: dict[str, Any]):
    """χ² of 6,000 continuations of 4 tokens against their exact probabilities."""
    levels, n, rows, prompt = 3, 4, 6000, [1, 0, 2, 1, 0]
    made = small(levels, sharp=1.5)
    drafts = {"model": small(levels, seed=9, sharp=1.5), "ngrams": NGrams(shortest=1), "itself": made}
    prompts = torch.tensor([prompt]).expand(rows, -1)
    result = speculate(*made, prompts, n, drafts[kind], n_draft=2, seed=1, **options)
    weights = torch.tensor([levels**i for i in reversed(range(n))])
    seen = (result.tokens @ weights).bincount(minlength=levels**n).double()
    value, freedom = chi_square(seen, rows * probabilities_of_all(made, prompt, n, levels, **options))
    assert freedom >= 3
    half = torch.tensor([freedom / 2, value / 2], dtype=torch.float64)
    assert torch.special.gammaincc(*half) > 1e-3, (value, freedom)  # P(χ² exceeds this)
    if kind == "itself":
        assert torch.equal(result.accepted, result.proposed)
    else:
        assert 0.1 < result.accepted.sum() / result.proposed.sum() < 0.95


def test_acceptance_is_what_both_have_in_common():
    """P(accept) = Σ min(p, q), and what is drawn after a rejection is max(0, p − q), normalised."""
    p, q, n = torch.tensor([0.5, 0.3, 0.2, 0.0]).double(), torch.tensor([0.2, 0.2, 0.2, 0.4]).double(), 40000
    uniform = torch.rand(n, 2, 3, dtype=torch.float64)
    drawn = torch.multinomial(q, n, replacement=True)[:, None]
    proposal = Proposal(drawn, torch.ones(n, dtype=torch.long), q.expand(n, 1, 4))
    after = torch.tensor([0.0, 0.0, 0.0, 1.0]).double()
    count, token = verified(torch.stack([p, after]).expand(n, 2, 4), proposal, uniform)
    assert count.double().mean().item() == pytest.approx(0.6, abs=0.01)
    assert (token[count == 1] == 3).all()
    rejected = token[count == 0].bincount(minlength=4) / (count == 0).sum()
    assert rejected.tolist() == pytest.approx([0.75, 0.25, 0, 0], abs=0.015)


def test_what_is_not_proposed_is_not_accepted():
    p = torch.tensor([0.0, 1.0]).double().expand(2, 3, 2)
    proposal = Proposal(torch.ones(2, 2, dtype=torch.long), torch.tensor([0, 1]))
    count, token = verified(p, proposal, torch.rand(2, 3, 3, dtype=torch.float64))
    assert count.tolist() == [0, 1]
    assert token.tolist() == [1, 1]


def test_a_rejection_by_rounding_draws_from_the_model():
    """p and q are equal but for rounding: nothing is left of max(0, p − q)."""
    q = torch.tensor([0.5 + 2**-53, 0.5], dtype=torch.float64)
    p = torch.tensor([0.5, 0.5]).double()
    uniform = torch.full((1, 2, 3), 1 - 2**-53, dtype=torch.float64)
    proposal = Proposal(torch.tensor([[0]]), torch.tensor([1]), q.view(1, 1, 2))
    count, token = verified(p.expand(1, 2, 2), proposal, uniform)
    assert (count.tolist(), token.tolist()) == ([0], [1])


# ---------------------------------------------------------------------------------------------- rows, seeds, arguments


@pytest.mark.parametrize("draft", [small(seed=8), NGrams(shortest=1)])
def test_a_row_does_not_know_how_many_there_are(draft: Any):
    made, prompt = small(), torch.randint(V, (5, 4))
    every = speculate(*made, prompt, 17, draft, seed=4)
    for rows in (1, 2, 4):
        some = speculate(*made, prompt[:rows], 17, draft, seed=4)
        assert torch.equal(some.tokens, every.tokens[:rows])
        assert torch.equal(some.accepted, every.accepted[:rows])
    assert torch.equal(speculate(*made, prompt, 17, draft, seed=4).tokens, every.tokens)
    assert not torch.equal(speculate(*made, prompt, 17, draft, seed=5).tokens, every.tokens)


@pytest.mark.parametrize("n_tokens", [0, 1, 2, 5, 6])
def test_it_ends_after_exactly_n_tokens(n_tokens: int):
    """Without reading a position beyond: the state of the model and of the draft have no room for more."""
    made, prompt = around(Transformer(8, 2, 1, attention=SoftmaxAttention).double()), torch.randint(V, (2, 3))
    shown: list[Tensor] = []
    steps: list[int] = []
    options: Any = {"on_tokens": shown.append, "progress": lambda it: (steps.append(i) or i for i in it)}
    result = speculate(*made, prompt, n_tokens, made, temperature=0, **options)
    assert torch.equal(result.tokens, generate(*made, prompt, n_tokens, temperature=0))
    assert steps == list(range(n_tokens))
    assert torch.equal(torch.stack([prompt[:, 0], *shown], 1)[:, 1:], result.tokens)


def test_a_given_state_is_read_and_left_alone():
    made, prompt = around(LSTM(8, 2).double()), torch.randint(V, (2, 9))
    with torch.no_grad():
        _, state = made.backbone(made.embed(prompt[:, :5]))
    before = copied(state)
    result = speculate(*made, prompt[:, 5:], 12, NGrams(shortest=1), state=state, temperature=0)
    assert torch.equal(result.tokens, generate(*made, prompt, 12, temperature=0))
    assert_same(state, before)


def test_accepted_tokens_are_read_again_few_times(monkeypatch: pytest.MonkeyPatch):
    """A draft that is never right costs few more calls, each of a bounded length."""
    made, prompt = small(), torch.randint(V, (1, 4))
    expected = generate(*made, prompt, 40, temperature=0)
    read: list[int] = []
    made.backbone.register_forward_pre_hook(lambda module, args: read.append(args[0].size(1)))
    draft = Oracle(torch.cat([prompt, expected], 1), *ORACLES["wrong"])
    result = speculate(*made, prompt, 40, draft, temperature=0)
    assert len(read) == result.calls == 40 + 4  # after every ninth token
    assert max(read) == 4 + 9


def test_a_row_that_has_ended_costs_nothing():
    """Row 0 accepts all of its draft and ends early; row 1 accepts nothing. Then the calls are those of row 1 alone."""
    made, prompt = small(), torch.randint(V, (2, 4))
    text = torch.cat([prompt, generate(*made, prompt, 40, temperature=0)], 1)

    def calls(rows: slice) -> int:
        right = [99, 0][rows]
        draft = Oracle(text[rows], lambda row, n: right[row], lambda row, n: 99)
        return speculate(*made, prompt[rows], 40, draft, temperature=0).calls

    assert calls(slice(0, 1)) == 9
    assert calls(slice(1, 2)) == 44
    assert calls(slice(0, 2)) <= 44 + 9 // 2


def test_ngrams_continue_the_latest_of_the_longest_places():
    propose = NGrams(shortest=2, longest=3).begin(1, 99, Sampling())

    def after(text: str, k: int = 4) -> str:
        tokens = torch.tensor([[*text.encode(), 0, 0, 0]])
        result = propose(tokens, torch.tensor([len(text)]), torch.tensor([k]), torch.rand(1, k))
        return bytes(result.tokens[0, : result.counts[0]].tolist()).decode()

    assert after("abcd.bcef.gbc") == "ef.g"  # the latest of two places
    assert after("abcd.xbcef.abc") == "d.xb"  # a longer one, before it
    assert after("abc1.abc2.xabc3.yabc") == "3.ya"  # no more than `longest` are compared
    assert after("abc1.zabc2.xabc", 2) == "2."
    assert after("abcd") == after("a") == after("a.b.ca") == ""
    assert after("xaaa", 5) == "aaaaa"
    assert after("bababa", 3) == "bab"
    with pytest.raises(ValueError, match="longest=1 must be at least 2"):
        NGrams(shortest=2, longest=1)


def test_no_more_is_proposed_than_is_drawn():
    """Else a large `n_draft` would allocate that many columns."""
    made, prompt = small(), torch.zeros(1, 2, dtype=torch.long)
    result = speculate(*made, prompt, 3, made, n_draft=10**12)
    assert torch.equal(result.tokens, speculate(*made, prompt, 3, made, n_draft=3).tokens)


def test_what_does_not_go_together():
    made, prompt = small(), torch.zeros(1, 2, dtype=torch.long)
    with pytest.raises(ValueError, match="n_draft=0 must be at least 1"):
        speculate(*made, prompt, 3, made, n_draft=0)
    with pytest.raises(ValueError, match="compile=True does not support a draft"):
        speculate(*made, prompt, 3, made, compile=True)
    bidirectional = made._replace(backbone=Transformer(8, 2, 1, causal=False).double())
    with pytest.raises(ValueError, match="Transformer has causal=False"):
        speculate(*bidirectional, prompt, 3, made)
    with pytest.raises(ValueError, match="Transformer has causal=False"):
        speculate(*made, prompt, 3, bidirectional)
