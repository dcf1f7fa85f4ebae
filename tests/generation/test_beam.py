import math
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from lit_effattn import EncoderDecoder, Transformer, sequence
from lit_effattn.attention import (
    InfiniteAttention,
    LinearAttention,
    LinearCrossAttention,
    LSHAttention,
    PerformerAttention,
    PerformerCrossAttention,
    SoftmaxAttention,
    SoftmaxCrossAttention,
    TransformerXLAttention,
)
from lit_effattn.generation import beam as module
from lit_effattn.generation import compiled
from lit_effattn.generation.beam import Hypotheses, beam_search
from lit_effattn.generation.sampling import generate
from lit_effattn.nn.heads import CategoricalHead, Head
from lit_effattn.nn.lstm import LSTM
from lit_effattn.sequence import SequenceModule
from tests.laws.cases import CAUSAL, CROSS, Case
from tests.laws.tools import assert_same, copied
from tests.support.cases import of_kinds, some
from tests.support.rounding import rounding

KINDS: dict[str, Callable[[], SequenceModule]] = {
    name: partial(Transformer, 8, 2, 2, attention=attention, init="pytorch", positions=None)
    for name, attention in {
        "softmax": SoftmaxAttention,
        "window": partial(SoftmaxAttention, window=3),
        "linear": partial(LinearAttention, chunk_size=4),
        "performer": PerformerAttention,
        "xl": partial(TransformerXLAttention, mem_len=3, same_length=True),
        "lsh": partial(LSHAttention, n_hashes=2, n_buckets=2, chunk_size=2),
        "infinite": partial(InfiniteAttention, mem_len=2, segment_len=3, n_basis=4, widths=(0.2,), n_samples=3),
    }.items()
}
KINDS["lstm"] = partial(LSTM, 8, 2)
ALPHAS = (0.0, 0.6, 2.0)
END = 2


class Parts(NamedTuple):
    """What a search takes."""

    backbone: SequenceModule
    embed: Callable[[Tensor], Tensor]
    head: Head


def parts(backbone: str | SequenceModule, vocabulary: int = 3, seed: int = 1) -> Parts:
    """Return a model whose distributions are far from uniform, in float64."""
    torch.manual_seed(seed)
    made = KINDS[backbone]() if isinstance(backbone, str) else backbone
    embed, head = nn.Embedding(vocabulary, made.d_input), CategoricalHead(made.d_model, vocabulary)
    with torch.no_grad():
        head.proj.weight.mul_(4)
    return Parts(made.double().eval(), embed.double(), head.double())


# --------------------------------------------------------------------------------------------------------- the oracles

Found = list[tuple[float, float, list[int]]]
"""Scores, log-probabilities and tokens, the best first."""


@torch.no_grad()
def table(made: Parts, prompt: Tensor, max_len: int) -> dict[tuple[int, ...], list[float]]:
    """The log-probabilities after every prefix, from passes over whole sequences, without a state."""
    levels = range(made.head.n_levels)
    sequences = torch.tensor(list(product(levels, repeat=max_len)))
    whole = torch.cat([prompt.expand(len(sequences), -1), sequences], 1)
    after = made.head.log_probs(made.backbone(made.embed(whole))[0])[:, len(prompt) - 1 :].tolist()
    return {tuple(s[:n]): row[n] for s, row in zip(sequences.tolist(), after, strict=True) for n in range(max_len)}


def score(log_p: float, n: int, alpha: float, norm: str = "gnmt") -> float:
    """Equation 14 of Wu et al. 2016, without coverage; or the score of fairseq and transformers."""
    return log_p / ((5 + n) ** alpha / (5 + 1) ** alpha if norm == "gnmt" else n**alpha)


def exhaustive(made: Parts, prompt: Tensor, max_len: int, alpha: float, end: int | None, norm: str = "gnmt") -> Found:
    """All that end with their only end token, or have `max_len` tokens, none of them the end token but the last."""
    conditionals, found = table(made, prompt, max_len), []
    for n in range(1, max_len + 1):
        for tokens in product(range(made.head.n_levels), repeat=n):
            if end not in tokens[:-1] and (tokens[-1] == end or n == max_len):
                log_p = math.fsum(conditionals[tokens[:i]][token] for i, token in enumerate(tokens))
                found.append((score(log_p, n, alpha, norm), log_p, list(tokens)))
    return sorted(found, reverse=True)


def live_and_ended(
    made: Parts, prompt: Tensor, max_len: int, alpha: float, end: int | None, beam: int, norm: str = "gnmt"
) -> Found:
    """Beam search in plain Python, which never stops early: k live hypotheses, and the k best of those that ended."""
    conditionals, found = table(made, prompt, max_len), []
    live: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for n in range(1, max_len + 1):
        longer = [(p + q, (*t, token)) for p, t in live for token, q in enumerate(conditionals[t])]
        candidates = sorted(longer, reverse=True)[: 1 if beam == 1 else 2 * beam]
        ended = [p_t for p_t in candidates if p_t[1][-1] == end or n == max_len]
        live = [p_t for p_t in candidates if p_t not in ended][:beam]
        found += [(score(p, n, alpha, norm), p, list(t)) for p, t in ended if (p, t) in candidates[:beam]]
    return sorted(found, reverse=True)[:beam]


def assert_found(found: Hypotheses, expected: list[Found], padding: int) -> None:
    """Compare the hypotheses of each prompt with an oracle's best; those with equal scores may be exchanged."""
    n_best = found.scores.size(1)
    assert found.scores.dtype == found.log_probs.dtype == torch.float64
    for tokens, lengths, scores, log_probs, oracle in zip(*map(Tensor.tolist, found), expected, strict=True):
        assert scores == pytest.approx([s for s, _, _ in oracle[:n_best]], rel=1e-9)
        known = {tuple(t): (s, p) for s, p, t in oracle}
        kept = [tuple(row[:length]) for row, length in zip(tokens, lengths, strict=True)]
        assert len(set(kept)) == n_best
        for row, hypothesis, values in zip(tokens, kept, zip(scores, log_probs, strict=True), strict=True):
            assert row[len(hypothesis) :] == [padding] * (len(row) - len(hypothesis))
            assert values == pytest.approx(known[hypothesis], rel=1e-9)


# ---------------------------------------------------------------------------------------------------- what is searched


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("name", KINDS)
def test_a_wide_beam_is_exhaustive(name: str, alpha: float):
    made, prompt = parts(name), torch.tensor([[0, 1, 1, 0], [1, 0, 1, 1]])
    options = {"beam": 3 * 2**3, "end": END, "length_penalty": alpha}
    for norm in ("gnmt", "average"):
        found = beam_search(*made, prompt, 4, **options, length_norm=norm, n_best=3 * 2**3)
        assert_found(found, [exhaustive(made, row, 4, alpha, END, norm) for row in prompt], END)


@pytest.mark.parametrize(
    ("name", "beam", "n_best", "alpha"),
    some(
        product(["softmax", "lstm"], [2, 3, 5], [1, 2], ALPHAS),
        [("softmax", 2, 1, 0.0), ("lstm", 3, 2, 0.6), ("softmax", 5, 2, 2.0), ("lstm", 2, 2, 2.0)],
    ),
)
def test_a_narrow_beam_and_an_early_stop(name: str, beam: int, n_best: int, alpha: float):
    """Of models in which the end token is more or less likely; the oracle never stops early."""
    for seed in range(4):
        made, prompt = parts(name, vocabulary=4, seed=seed), torch.tensor([[0, 1], [3, 3], [1, 0]])
        with torch.no_grad():
            made.head.proj.bias[END] += seed
        for norm in ("gnmt", "average"):
            options = {"beam": beam, "length_penalty": alpha, "length_norm": norm}
            found = beam_search(*made, prompt, 4, **options, end=END, n_best=n_best)
            assert_found(found, [live_and_ended(made, row, 4, alpha, END, beam, norm) for row in prompt], END)


# A cross-attention alone sees no earlier token, so hypotheses of the same pairs of tokens are equally likely.
@pytest.mark.parametrize("case", of_kinds(case for case in CAUSAL if case not in CROSS))
def test_states_of_all_kinds_are_reordered(case: Case):
    made, prompt = parts(case.build()), torch.tensor([[0, 1, 1], [1, 0, 0], [0, 0, 1]])
    found = beam_search(*made, prompt, 5, beam=4, n_best=4)
    assert_found(found, [live_and_ended(made, row, 5, module.LENGTH_PENALTY, None, 4) for row in prompt], 0)


@pytest.mark.parametrize("name", KINDS)
def test_a_beam_of_one_is_greedy(name: str):
    made, prompt = parts(name, vocabulary=5), torch.randint(5, (6, 2), generator=torch.Generator().manual_seed(3))
    drawn = generate(*made, prompt, 7, temperature=0)
    assert torch.equal(beam_search(*made, prompt, 7, beam=1).tokens[:, 0], drawn)
    end = int(drawn[0, 2])
    until_end = [row[: row.index(end) + 1] if end in row else row for row in drawn.tolist()]
    found = beam_search(*made, prompt, 7, beam=1, end=end, length_penalty=2.0)
    assert found.lengths[:, 0].tolist() == [len(row) for row in until_end]
    assert found.tokens[:, 0].tolist() == [row + [end] * (7 - len(row)) for row in until_end]


@pytest.mark.parametrize("name", KINDS)
def test_going_on_from_a_state(name: str):
    """As if what the state has read were a part of the prompt; the state is not changed."""
    made, prompt = parts(name, vocabulary=5), torch.randint(5, (2, 6), generator=torch.Generator().manual_seed(3))
    search = partial(beam_search, *made, max_len=5, beam=3, end=END, n_best=2)
    expected = search(prompt)
    for room in (None, 4, 6 + 5 - 1):  # of 4 positions all are taken, so the state is grown
        with torch.no_grad():
            _, state = made.backbone(made.embed(prompt[:, :4]), made.backbone.initial_state(2, max_len=room))
        before = copied(state)
        for _ in range(2):
            for a, b in zip(search(prompt[:, 4:], state=state), expected, strict=True):
                torch.testing.assert_close(a, b)
        assert_same(state, before)


# -------------------------------------------------------------------------------------------------------- a source

SOURCES = 3 * torch.randn(3, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
SOURCE_LENGTHS = torch.tensor([5, 1, 3])
CROSS_KINDS = {"softmax": SoftmaxCrossAttention, "linear": LinearCrossAttention, "performer": PerformerCrossAttention}


class FromSource(SequenceModule):
    """A decoder, and the source that all its rows read: a module without a source, for the oracles."""

    def __init__(self, model: EncoderDecoder, row: int) -> None:
        super().__init__()
        self.model, self.row = model, row
        self.d_input, self.d_model, self.causal = model.d_input, model.d_model, True

    def forward(self, x, state=None, lengths=None):
        n = SOURCE_LENGTHS[self.row]
        return self.model(x, self.model.remember(SOURCES[[self.row], :n].expand(len(x), -1, -1)))

    def empty_state(self, batch_size, max_len, device, dtype):
        raise NotImplementedError


def translator(name: str, vocabulary: int = 3) -> Parts:
    options = {"attention": [SoftmaxAttention, PerformerAttention], "cross_attention": CROSS_KINDS[name], "d_source": 6}
    decoder = Transformer(8, 2, 2, init="pytorch", positions=None, **options)
    encoder = Transformer(6, 2, 1, init="pytorch", causal=False)
    return parts(EncoderDecoder(encoder, decoder), vocabulary)


def remembered(made: Parts, max_len: int | None = None, rows: slice = slice(None)):
    return sequence.detach(made.backbone.remember(SOURCES[rows], SOURCE_LENGTHS[rows], max_len=max_len))


@pytest.mark.parametrize("max_len", [None, 1, 9])
@pytest.mark.parametrize("name", CROSS_KINDS)
def test_a_wide_beam_is_exhaustive_for_each_source(name: str, max_len: int | None):
    made, prompt = translator(name), torch.tensor([[0, 1], [1, 0], [0, 1]])
    state = remembered(made, max_len)
    before = copied(state)
    found = beam_search(*made, prompt, 4, beam=3**3, end=END, n_best=2**3, state=state)
    assert_same(state, before)
    alone = [made._replace(backbone=FromSource(made.backbone, row)) for row in range(3)]
    pairs = zip(alone, prompt, strict=True)
    assert_found(found, [exhaustive(one, row, 4, module.LENGTH_PENALTY, END) for one, row in pairs], END)


def test_the_source_is_not_copied_at_each_step():
    """Beams of one sentence share it: all later steps read the tensors of the first."""
    made, read = translator("softmax", vocabulary=6), []
    made.backbone.decoder.blocks[1].cross_attention.register_forward_pre_hook(
        lambda module, args: read.append((args[1].kept.keys.data_ptr(), len(args[0])))
    )
    beam_search(*made, torch.zeros(3, 1, dtype=torch.long), 6, beam=4, state=remembered(made, 7))
    assert [rows for _, rows in read] == [3, 12, 12, 12, 12, 12]
    assert len({where for where, _ in read[1:]}) == 1


# ------------------------------------------------------------------------------------------- transformers' own search


@pytest.fixture(scope="module")
def same_weights(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Parts]:
    """A random GPT-2 of transformers, and what it becomes by `convert`: often the end token is likely."""
    for package in ("safetensors", "transformers"):
        pytest.importorskip(package)
    import transformers

    from lit_effattn.interchange.convert import convert
    from lit_effattn.tasks import LanguageModel

    folder = tmp_path_factory.mktemp("gpt2")
    special = {"bos_token_id": END, "eos_token_id": END, "pad_token_id": END, "tie_word_embeddings": False}
    config = transformers.GPT2Config(vocab_size=12, n_positions=40, n_embd=32, n_layer=2, n_head=4, **special)
    torch.manual_seed(0)
    theirs = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            p.copy_(0.4 * torch.randn_like(p) + (p.ndim == 1 and name.endswith("weight")))
    theirs.save_pretrained(folder / "theirs")
    with pytest.warns(UserWarning, match=r"has no tokenizer.json"):
        convert(folder / "theirs", folder / "ours")
    ours = LanguageModel.load_from_checkpoint(folder / "ours" / "model.ckpt").double().eval()
    return theirs.double().eval(), Parts(ours.backbone, ours.embedding, ours.head)


def both_searches(models: tuple[Any, Parts], n: int, alpha: float, early: bool | str) -> tuple[Tensor, Tensor]:
    """The scores (n, 4) of the 4 best of transformers and of ours, after n prompts."""
    theirs, ours = models
    prompts = torch.randint(END + 1, 12, (n, 5), generator=torch.Generator().manual_seed(1))
    of_both = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 20, "length_penalty": alpha}
    how = {"do_sample": False, "early_stopping": early, "return_dict_in_generate": True, "output_scores": True}
    found = theirs.generate(prompts, attention_mask=torch.ones_like(prompts), **of_both, **how)
    options = {"beam": 4, "n_best": 4, "end": END, "length_penalty": alpha, "length_norm": "average"}
    mine = beam_search(*ours, prompts, 20, **options)
    assert 3 < mine.lengths.double().mean() < 19
    assert (mine.lengths < 20).double().mean() > 0.3  # they end at different times
    return found.sequences_scores.view(n, 4).double(), mine.scores


ADDED = rounding(torch.float32, 20, 20)  # sums of the log-probabilities of 20 tokens, down to −20


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_all_ranks_are_those_of_transformers(same_weights: tuple[Any, Parts], alpha: float):
    """It adds log-probabilities in float32."""
    theirs, ours = both_searches(same_weights, 24, alpha, "never")
    torch.testing.assert_close(ours, theirs, rtol=0, atol=ADDED)


@pytest.mark.exhaustive
@pytest.mark.parametrize("early", ["never", False])
@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_no_rank_of_many_sources_is_worse_than_transformers(
    same_weights: tuple[Any, Parts], alpha: float, early: bool | str
):
    """With `early_stopping=False`, its default, transformers stops where a better one may come."""
    theirs, ours = both_searches(same_weights, 144, alpha, early)
    assert (ours >= theirs - ADDED).all()
    if early == "never":
        torch.testing.assert_close(ours, theirs, rtol=0, atol=ADDED)


# --------------------------------------------------------------------------- a model whose probabilities are given


class Markov(SequenceModule):
    """Passes on the token, so that the distribution depends on the last one alone."""

    def __init__(self, levels: int) -> None:
        super().__init__()
        self.d_input = self.d_model = levels
        self.causal, self.steps = True, 0

    def forward(self, x, state=None, lengths=None):
        self.check(x, state, lengths)
        self.steps += 1
        return x, state

    def empty_state(self, batch_size, max_len, device, dtype):
        return torch.zeros(batch_size)


class Given(Head):
    """Log-probabilities by the last token."""

    def __init__(self, probabilities: list[list[float]]) -> None:
        super().__init__(len(probabilities), len(probabilities))
        self.probabilities = torch.tensor(probabilities, dtype=torch.float64)

    def log_probs(self, h: Tensor) -> Tensor:
        return (h.double() @ self.probabilities).log()


def markov(*probabilities: list[float]) -> Parts:
    """Return the model; row i has the probabilities after token i."""
    n = len(probabilities)
    return Parts(Markov(n), lambda tokens: nn.functional.one_hot(tokens, n).double(), Given([*probabilities]))


ZERO = torch.zeros(1, 1, dtype=torch.long)


def test_the_length_penalty():
    """Tokens until the end, 4: log P = ln ½ + ln ¼ + ln ½ + ln ½."""
    made = markov([0, 0.5, 0.5, 0, 0], [0.25, 0, 0, 0.75, 0], [0, 0, 0, 0, 1], [0, 0, 0, 0, 1], [0, 0, 0, 0, 1])
    found = beam_search(*made, ZERO, 6, beam=4, end=4, length_penalty=0.6, n_best=4)
    assert found.tokens[0, 0].tolist() == [2, 4, 4, 4, 4, 4]
    assert found.lengths.tolist() == [[2, 3, 4, 5]]
    log_p = [math.log(p) for p in (0.5, 0.375, 0.0625, 0.046875)]
    assert found.log_probs[0].tolist() == pytest.approx(log_p)
    penalties = ((7 / 6) ** 0.6, (8 / 6) ** 0.6, 1.5**0.6, (10 / 6) ** 0.6)
    assert found.scores[0].tolist() == pytest.approx([p / q for p, q in zip(log_p, penalties, strict=True)])


def test_what_has_ended_is_never_lost():
    """At the second step both live hypotheses, of 0.35, are likelier than the one that has ended, of 0.3."""
    made = markov([0, 0.7, 0, 0.3], [0, 0.5, 0.5, 0], [0, 0.5, 0.5, 0], [0.25, 0.25, 0.25, 0.25])
    found = beam_search(*made, ZERO, 9, beam=2, end=3, length_penalty=0)
    assert found.tokens[0, 0].tolist() == [3] * 9
    assert found.scores.item() == pytest.approx(math.log(0.3))


def test_the_search_stops_as_soon_as_nothing_better_can_come():
    """To end has p = 0.6 at every step, so after t steps a live hypothesis can at best reach t ln 0.4 / lp(max_len)."""
    made = markov([0.4, 0.6], [0.5, 0.5])
    for max_len, steps in ((2, 1), (20, 3), (60, 7)):
        reached = [t * math.log(0.4) / ((5 + max_len) / 6) for t in (steps - 1, steps)]
        assert reached[0] > math.log(0.6) >= reached[1]
        made.backbone.steps = 0
        beam_search(*made, ZERO, max_len, beam=9, end=1, length_penalty=1.0)
        assert made.backbone.steps == steps


def test_all_prompts_stop_before_the_search_does():
    """The second prompt goes on for longer; the first one's result is that of its own end."""
    made = markov([0.1, 0, 0.9], [0.01, 0.98, 0.01], [0, 0, 1])
    found = beam_search(*made, torch.tensor([[0], [1]]), 30, beam=2, end=2, n_best=1)
    assert made.backbone.steps == 30
    assert found.lengths.tolist() == [[1], [30]]


@pytest.mark.parametrize("end", [1, 2])
def test_ties_are_the_same_alone_and_beside_others(end: int):
    """After 0 comes the end or another token before a sure end: both of ½, so the first that ends stops the search."""
    sure = [0.0, float(end == 1), float(end == 2), 0.0]
    made = markov([0, 0.5, 0.5, 0], sure, sure, [0, 0.01, 0, 0.99])
    search = partial(beam_search, *made, max_len=12, beam=2, end=end, length_penalty=0)
    assert search(ZERO).lengths.item() == 1
    together = search(torch.tensor([[0], [3]]))
    assert together.lengths.tolist() == [[1], [12]]


def test_where_there_are_fewer_than_are_asked_for():
    made = markov([0, 0.75, 0.25], [0, 0, 1], [0, 0, 1])
    found = beam_search(*made, ZERO, 3, beam=5, end=2, length_penalty=0, n_best=4)
    assert found.tokens.tolist() == [[[1, 2, 2], [2, 2, 2], [2, 2, 2], [2, 2, 2]]]
    assert found.lengths.tolist() == [[2, 1, 0, 0]]
    assert found.scores[0].tolist() == pytest.approx([math.log(0.75), math.log(0.25), -math.inf, -math.inf])
    assert torch.equal(found.scores, found.log_probs)


def test_long_sums_are_exact():
    """2,000 tokens of p = 0.7 in float32: sums in float32 would be off by 10⁻⁵ of the sum."""
    made = markov([0.7, 0.3], [0.5, 0.5])
    log_p = torch.tensor([[0.7, 0.3], [0.5, 0.5]]).log()
    made.head.log_probs = lambda h: h.float() @ log_p  # type: ignore[method-assign]
    found = beam_search(*made, ZERO, 2000, beam=1, length_penalty=0)
    assert found.log_probs.item() == pytest.approx(2000 * log_p[0, 0].item(), rel=1e-12)


def test_a_gpu_is_asked_less_often_and_finds_the_same(monkeypatch: pytest.MonkeyPatch):
    made = markov([0.1, 0.9], [0.5, 0.5])
    search = partial(beam_search, *made, ZERO, 30, beam=2, end=1, n_best=2)
    expected = search()
    monkeypatch.setattr(module, "reads_values", lambda tensor: False)
    made.backbone.steps = 0
    for a, b in zip(search(), expected, strict=True):
        assert torch.equal(a, b)
    assert made.backbone.steps == 8


def test_the_prompt_is_read_once_for_all_hypotheses():
    made, seen = parts("linear"), []
    made.backbone.register_forward_pre_hook(lambda module, args: seen.append(tuple(args[0].shape[:2])))
    found = beam_search(*made, torch.zeros(2, 7, dtype=torch.long), 4, beam=3)
    assert seen == [(2, 7), (6, 1), (6, 1), (6, 1)]
    assert not found.scores.requires_grad


# ------------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"beam": 0}, "beam=0"),
        ({"n_best": 0}, "n_best=0"),
        ({"n_best": 4}, "n_best=4 must be from 1 to beam=3"),
        ({"length_penalty": -0.1}, "length_penalty=-0.1"),
        ({"length_penalty": math.nan}, "length_penalty=nan"),
        ({"length_penalty": math.inf}, "length_penalty=inf"),
        ({"length_norm": "wu"}, "length_norm='wu' is not one of gnmt, average"),
        ({"max_len": 0}, "max_len=0"),
        ({"end": 3}, r"end=3 .* 0 … 2"),
        ({"end": -1}, "end=-1"),
        ({"backbone": Transformer(8, 2, 1, causal=False)}, "Transformer has causal=False"),
        ({"state": torch.zeros(5)}, "2 rows and the state 5"),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_bad_arguments_are_named(options: dict, words: str):
    made = markov([0.5, 0.25, 0.25], [0.5, 0.25, 0.25], [0.5, 0.25, 0.25])
    arguments = {**made._asdict(), "prompt": torch.zeros(2, 1, dtype=torch.long), "max_len": 2, "beam": 3}
    with pytest.raises(ValueError, match=words):
        beam_search(**{**arguments, **options})


@pytest.mark.parametrize("name", ["softmax", pytest.param("xl", marks=pytest.mark.exhaustive)])
def test_compiled_steps_find_the_same(name: str, interpreted: list[Path], monkeypatch: pytest.MonkeyPatch):
    """In states that each step reorders, with a step that is traced once."""
    made, prompt = parts(name, vocabulary=5, seed=2), torch.tensor([[1, 3], [0, 4]])
    traced, program = [], compiled.program
    monkeypatch.setattr(compiled, "program", lambda *arguments: traced.append(program(*arguments)) or traced[-1])
    how: dict[str, Any] = {"beam": 3, "end": END, "n_best": 2}
    found = beam_search(*made, prompt, 8, compile=True, **how)
    assert len(traced) == 1
    expected = beam_search(*made, prompt, 8, compile=False, **how)
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.lengths, expected.lengths)
    torch.testing.assert_close(found.log_probs, expected.log_probs)
    if name == "softmax":
        beam_search(*made, prompt, 11, compile=True, **how)
    assert len(interpreted) == 1  # for all lengths
