import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from lit_effattn import LSTM, EncoderDecoder, Transformer
from lit_effattn.attention import (
    LinearAttention,
    LinearCrossAttention,
    PerformerCrossAttention,
    SoftmaxAttention,
    SoftmaxCrossAttention,
)
from lit_effattn.attention.positions import LearnedPositions
from lit_effattn.generation import compiled as compiling
from lit_effattn.generation import sampling as generation
from lit_effattn.generation.beam import beam_search
from lit_effattn.generation.sampling import Sampling, draw, generate, generate_each
from lit_effattn.nn.heads import CategoricalHead, Head
from lit_effattn.sequence import SequenceModule
from tests.laws.cases import CAUSAL, Case
from tests.laws.tools import assert_same, copied
from tests.support.cases import of_kinds

BACKBONES = {
    "softmax": SoftmaxAttention,
    "window": partial(SoftmaxAttention, window=3),
    "linear": partial(LinearAttention, chunk_size=4),
}


# --------------------------------------------------------------------------------------------------------------- draw


def counts(p, n: int, **options) -> list[int]:
    """Draw with the uniforms (i + ½) / n: level l then comes up n · p(l) times, exactly where that is whole."""
    uniform = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    log_probs = torch.as_tensor(p, dtype=torch.float64).log().expand(n, -1)
    return draw(log_probs, uniform, **options).bincount(minlength=log_probs.size(1)).tolist()


HALVES = [0.125, 0.5, 0.125, 0.25]  # exact in binary: the sums are 0.5, 0.75, 0.875, 1
FALLING = [0.5, 0.25, 0.125, 0.125]
COUNTS: list[tuple[list[float], dict[str, Any], list[int]]] = [
    ([0.1, 0.2, 0.3, 0.4], {}, [100, 200, 300, 400]),
    ([0.4, 0.0, 0.1, 0.5], {}, [400, 0, 100, 500]),
    # T = ½ squares the probabilities, T = 2 takes their roots.
    ([0.1, 0.2, 0.7], {"temperature": 0.5}, [100, 400, 4900]),
    ([1 / 14, 4 / 14, 9 / 14], {"temperature": 2.0}, [1000, 2000, 3000]),
    ([0.1, 0.4, 0.2, 0.3], {"top_k": 2}, [0, 400, 0, 300]),
    ([0.1, 0.4, 0.2, 0.3], {"top_k": 3}, [0, 400, 200, 300]),
    ([0.1, 0.4, 0.2, 0.3], {"top_k": 1}, [0, 10, 0, 0]),
    ([0.1, 0.4, 0.2, 0.3], {"top_k": 99}, [100, 400, 200, 300]),
    # Of equally likely levels the lowest are kept, so that no more than k are.
    ([0.25] * 4, {"top_k": 2}, [50, 50, 0, 0]),
    ([0.2, 0.2, 0.4, 0.2], {"top_k": 2}, [200, 0, 400, 0]),
    (HALVES, {"top_p": 0.51}, [0, 400, 0, 200]),
    (HALVES, {"top_p": 0.75}, [0, 400, 0, 200]),
    (HALVES, {"top_p": 0.76}, [100, 400, 0, 200]),
    (HALVES, {"top_p": 1.0}, [100, 400, 100, 200]),
    *((HALVES, {"top_p": top_p}, [0, 10, 0, 0]) for top_p in (1e-12, 0.3, 0.5)),
    ([0.25] * 4, {"top_p": 1e-12}, [10, 0, 0, 0]),
    # The temperature first; top_p is a share of what top_k left.
    (FALLING, {"top_k": 3, "top_p": 0.8}, [200, 100, 0, 0]),  # 4/7 and 6/7 of what is left
    (FALLING, {"top_k": 4, "top_p": 0.8}, [400, 200, 100, 0]),
    (FALLING, {"temperature": 0.5, "top_p": 0.8}, [400, 100, 0, 0]),  # 16 : 4 : 1 : 1
    (FALLING, {"temperature": 0.5, "top_k": 2, "top_p": 0.9}, [400, 100, 0, 0]),
]


def test_frequencies_are_the_probabilities():
    for p, options, expected in COUNTS:
        assert counts(p, sum(expected), **options) == expected, (p, options)


def test_every_row_has_its_own_distribution():
    log_probs = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.25, 0.25, 0.5]]).log()
    assert draw(log_probs, torch.tensor([0.9, 0.1, 0.45])).tolist() == [0, 1, 1]


def test_no_temperature_takes_the_likeliest():
    log_probs = torch.tensor([[0.3, 0.4, 0.3], [0.5, 0.2, 0.3]]).log()
    for u in (0.0, 0.5, 1 - 2**-53):
        uniform = torch.full((2,), u, dtype=torch.float64)
        for temperature in (0, 1e-4, 1e-40, 1e-310):
            assert draw(log_probs, uniform, temperature=temperature).tolist() == [1, 0]


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 1.0}, {"top_k": 5, "top_p": 0.9}, {"temperature": 2}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_has_no_probability_is_never_drawn(options: dict, dtype: torch.dtype):
    """Neither before the first level that has some, nor after the last, whatever the rounding of the sums."""
    n, levels = 500, 300
    p = torch.rand(n, levels, dtype=dtype)
    p[torch.rand(n, levels) < 0.7] = 0
    p[:, :5] = p[:, -5:] = 0
    p /= p.sum(-1, keepdim=True)
    for u in (0.0, 2**-53, 0.5, 1 - 2**-24, 1 - 2**-53):
        level = draw(p.log(), torch.full((n,), u, dtype=torch.float64), **options)
        assert (p.gather(-1, level[:, None]) > 0).all(), u


def test_draw_leaves_its_input_alone():
    log_probs = torch.randn(3, 6, dtype=torch.float64).log_softmax(-1)
    before = log_probs.clone()
    draw(log_probs, torch.rand(3), top_k=2, top_p=0.5)
    assert torch.equal(log_probs, before)


# ----------------------------------------------------------------------------------------------------------- generate


def parts(name: str = "softmax", vocabulary: int = 5, seed: int = 1):
    """Return a backbone, an embedding and a head whose distributions are far from uniform."""
    torch.manual_seed(seed)
    backbone = Transformer(8, 2, 2, attention=BACKBONES[name], init="pytorch").double().eval()
    embed = nn.Embedding(vocabulary, 8).double()
    head = CategoricalHead(8, vocabulary).double()
    with torch.no_grad():
        head.proj.weight.mul_(5)
    return backbone, embed, head


def naive(backbone: SequenceModule, embed, head: Head, prompt, n: int, uniform, **options):
    """Ancestral sampling as it is defined: the whole prefix again at every step, without any state."""
    tokens = prompt
    for t in range(n):
        y, _ = backbone(embed(tokens))
        level = draw(head.log_probs(y)[:, -1], uniform[:, t], **options)
        tokens = torch.cat([tokens, level[:, None]], 1)
    return tokens[:, prompt.size(1) :]


def streams(monkeypatch: pytest.MonkeyPatch, uniform: torch.Tensor) -> None:
    """Let `generate` draw from the rows of `uniform`."""
    monkeypatch.setattr("lit_effattn.generation.sampling._random_stream", lambda seed, row, n: uniform[row, :n])


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_k": 3}, {"top_p": 0.8}, {"temperature": 0}])
@pytest.mark.parametrize("n_prompt", [1, 6])
@pytest.mark.parametrize("name", BACKBONES)
@torch.no_grad()
def test_the_state_changes_nothing(name: str, n_prompt: int, options: dict, monkeypatch: pytest.MonkeyPatch):
    """`generate` draws what the definition draws, which computes the whole prefix again at every step."""
    backbone, embed, head = parts(name)
    uniform = torch.rand(3, 11, dtype=torch.float64)
    prompt = torch.randint(5, (3, n_prompt))
    streams(monkeypatch, uniform)
    drawn = generate(backbone, embed, head, prompt, 11, **options)
    assert drawn.shape == (3, 11)
    assert drawn.dtype == torch.long
    assert torch.equal(drawn, naive(backbone, embed, head, prompt, 11, uniform, **options))


def test_seeds():
    made = parts(vocabulary=7)
    prompt = torch.zeros(4, 1, dtype=torch.long)
    torch.manual_seed(11)
    one = generate(*made, prompt, 20, seed=1)
    torch.manual_seed(12)  # the global generator has no say
    before = torch.get_rng_state()
    assert torch.equal(generate(*made, prompt, 20, seed=1), one)
    assert torch.equal(torch.get_rng_state(), before)  # and is left alone
    assert not torch.equal(generate(*made, prompt, 20, seed=2), one)
    assert len({tuple(row.tolist()) for row in one}) == 4  # equal prompts, different rows


def test_no_two_streams_are_alike():
    """Not even those of neighbouring seeds and rows: row 1 of seed 0 is not row 0 of seed 1."""
    from lit_effattn.generation.sampling import _random_stream

    drawn = {tuple(_random_stream(seed, row, 2).tolist()) for seed in range(-2, 30) for row in range(64)}
    assert len(drawn) == 32 * 64
    uniform = torch.stack([_random_stream(0, row, 50) for row in range(200)])
    assert uniform.min() >= 0
    assert uniform.max() < 1
    assert uniform.mean().item() == pytest.approx(0.5, abs=0.01)  # standard error 0.003
    assert torch.corrcoef(uniform.T).fill_diagonal_(0).abs().max() < 0.4  # of 200 independent rows: about 0.25


def test_pairs_come_as_often_as_the_model_says():
    """Chi-square of 4,000 drawn pairs against the exact joint p(a) p(b | a) of a vocabulary of 3."""
    backbone, embed, head = parts(vocabulary=3)
    with torch.no_grad():
        head.proj.weight.mul_(0.3)
    n = 4000
    drawn = generate(backbone, embed, head, torch.zeros(n, 1, dtype=torch.long), 2, seed=3)
    seen = (3 * drawn[:, 0] + drawn[:, 1]).bincount(minlength=9).double()
    pairs = torch.tensor([[0, a, b] for a, b in product(range(3), repeat=2)])
    with torch.no_grad():
        table = head.log_probs(backbone(embed(pairs[:, :2]))[0])  # (9, 2, 3)
    expected = n * table.gather(-1, pairs[:, 1:, None])[..., 0].sum(1).exp()
    assert expected.sum().item() == pytest.approx(n)
    assert expected.min() > 15
    chi_square = ((seen - expected) ** 2 / expected).sum().item()
    assert chi_square < 26.1  # 8 degrees of freedom: exceeded once in a thousand
    product_of_marginals = expected.view(3, 3).sum(1, keepdim=True) * expected.view(3, 3).sum(0) / n
    assert ((expected.view(3, 3) - product_of_marginals) ** 2 / product_of_marginals).sum() > 100  # b depends on a


def test_progress_sees_every_step():
    steps: list[int] = []
    generate(*parts(), torch.zeros(1, 2, dtype=torch.long), 4, progress=lambda of: steps.extend(of) or of)
    assert steps == [0, 1, 2, 3]


# ---------------------------------------------------------------------------------------------------- a first state

CROSS = {"softmax": SoftmaxCrossAttention, "window": PerformerCrossAttention, "linear": LinearCrossAttention}
SOURCES = torch.randn(3, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
SOURCE_LENGTHS = torch.tensor([6, 1, 4])


def translator(name: str, vocabulary: int = 7):
    """Return an encoder and decoder between an embedding and a head."""
    torch.manual_seed(2)
    encoder = Transformer(4, 2, 1, attention=LinearAttention, causal=False, init="pytorch")
    options = {"attention": BACKBONES[name], "cross_attention": CROSS[name], "d_source": 4, "init": "pytorch"}
    return around(EncoderDecoder(encoder, Transformer(8, 2, 2, **options)).double().eval(), vocabulary)


def remembered(backbone: EncoderDecoder, max_len: int | None, rows: slice = slice(None)):
    with torch.no_grad():
        return backbone.remember(SOURCES[rows], SOURCE_LENGTHS[rows], max_len=max_len)


# None: the state grows by itself. 2 and 5 are too few positions, so the state is grown, before or after the prompt.
@pytest.mark.parametrize("max_len", [None, 2, 5, 14])
@pytest.mark.parametrize("name", CROSS)
@torch.no_grad()
def test_each_row_writes_from_its_own_source(name: str, max_len: int | None, monkeypatch: pytest.MonkeyPatch):
    """What the definition draws, which encodes the source and reads the whole prefix again at every step."""
    backbone, embed, head = translator(name)
    uniform, prompt = torch.rand(3, 9, dtype=torch.float64), torch.randint(7, (3, 4))
    streams(monkeypatch, uniform)
    expected = prompt
    for t in range(9):
        y, _ = backbone(embed(expected), remembered(backbone, None))
        expected = torch.cat([expected, draw(head.log_probs(y)[:, -1], uniform[:, t])[:, None]], 1)
    state = remembered(backbone, max_len)
    before = copied(state)
    assert torch.equal(generate(backbone, embed, head, prompt, 9, state=state), expected[:, 4:])
    assert_same(state, before)
    streams(monkeypatch, uniform[1:])
    alone = generate(backbone, embed, head, prompt[1:2], 9, state=remembered(backbone, max_len, slice(1, 2)))
    assert torch.equal(alone[0], expected[1, 4:])


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("max_len", [6, 7, 40])
@pytest.mark.parametrize("name", [*BACKBONES, "lstm"])
def test_going_on_from_what_was_read(name: str, max_len: int, compiled: bool, monkeypatch: pytest.MonkeyPatch):
    """As if that were a part of the prompt, for rows at different positions, in states that are full or have room."""
    uncompiled(monkeypatch, least_room=4)
    made = around(LSTM(8, 2).double()) if name == "lstm" else parts(name, vocabulary=7)
    prompt, lengths = torch.randint(7, (2, 8)), torch.tensor([6, 3])
    with torch.no_grad():
        _, state = made[0](made[1](prompt[:, :6]), made[0].initial_state(2, max_len=max_len), lengths)
    before = copied(state)
    drawn = generate(*made, prompt[:, 6:], 11, state=state, temperature=0, compile=compiled)
    assert_same(state, before)
    for i, n in enumerate(lengths):
        whole = torch.cat([prompt[i : i + 1, :n], prompt[i : i + 1, 6:]], 1)
        assert torch.equal(drawn[i : i + 1], generate(*made, whole, 11, temperature=0))


def test_a_state_that_grows_is_not_compiled(monkeypatch: pytest.MonkeyPatch):
    uncompiled(monkeypatch, least_room=4)
    made, prompt = translator("softmax"), torch.zeros(3, 1, dtype=torch.long)
    with torch.no_grad():
        _, begun = made[0](made[1](prompt), remembered(made[0], None))
    for state in (remembered(made[0], None), begun):
        with pytest.raises(ValueError, match="compile=True: the given state was made without max_len"):
            generate(*made, prompt, 3, state=state, compile=True)


# ------------------------------------------------------------------------------------------------------- compiled


def uncompiled(monkeypatch: pytest.MonkeyPatch, least_room: int) -> None:
    """Take the steps as they are, in states that begin with little room and double it."""

    def program(step, tokens, state):
        return compiling.Program(torch.no_grad()(step), [[None] * t.dim() for t in state])

    monkeypatch.setattr(compiling, "program", program)
    monkeypatch.setattr(compiling, "check_inductor", lambda asked, device: None)
    monkeypatch.setattr(generation, "LEAST_ROOM", least_room)
    monkeypatch.setattr(generation, "room_for", lambda n, total, few: max(least_room, 2 ** math.ceil(math.log2(n))))


def by_torch_compile(monkeypatch: pytest.MonkeyPatch, backend: Any) -> None:
    """Compile steps as on other devices than the CPU."""
    monkeypatch.setattr(generation, "_on_cpu", lambda device: False)
    monkeypatch.setattr(generation, "BACKEND", backend)


def around(backbone: SequenceModule, vocabulary: int = 7):
    """Return `backbone` between an embedding and a head whose distributions are far from uniform."""
    torch.manual_seed(2)
    embed, head = nn.Embedding(vocabulary, backbone.d_input).double(), CategoricalHead(backbone.d_model, vocabulary)
    with torch.no_grad():
        head.proj.weight.mul_(5)
    return backbone, embed, head.double()


@pytest.mark.parametrize("case", of_kinds(CAUSAL))
def test_a_second_call_goes_on_where_the_first_stopped(case: Case, monkeypatch: pytest.MonkeyPatch):
    """As often as one likes, and with the draws of a single call."""
    uncompiled(monkeypatch, least_room=4)
    made = around(case.build())
    prompt, kept = torch.randint(7, (2, 3)), []
    whole = generate(*made, prompt, 12)
    for compiled in (True, False):
        kept.clear()
        first = generate(*made, prompt, 5, keep=kept.append, compile=compiled)
        assert torch.equal(first, whole[:, :5])
        before = copied(kept[0].state)
        for _ in range(2):
            assert torch.equal(generate(*made, prompt[:, :0], 7, kept=kept[0], compile=compiled), whole[:, 5:])
            assert_same(kept[0].state, before)
    with pytest.raises(ValueError, match="kept has 2 rows, and state was given too"):
        generate(*made, prompt, 1, kept=kept[0], state=kept[0].state)


def test_compiled_tokens_are_the_same(monkeypatch: pytest.MonkeyPatch):
    """One graph without breaks, or it would be refused; what each kind makes of it, the laws say."""
    by_torch_compile(monkeypatch, "aot_eager")
    made = around(Transformer(8, 2, 3, attention=list(BACKBONES.values()), init="pytorch").double().eval())
    prompt, options = torch.randint(7, (2, 3)), {"top_k": 3, "temperature": 0.9, "seed": 3}
    assert torch.equal(generate(*made, prompt, 8, compile=True, **options), generate(*made, prompt, 8, **options))


def test_compiled_tokens_from_a_source_are_the_same(monkeypatch: pytest.MonkeyPatch):
    """The first state is grown before the first compiled step; a step copies the source nowhere."""
    copies = []

    def backend(graph, inputs):
        copies.append(sum(node.target == "copy_" for node in graph.graph.nodes))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    by_torch_compile(monkeypatch, backend)
    made, prompt = translator("softmax"), torch.randint(7, (3, 1))
    expected = generate(*made, prompt, 6, state=remembered(made[0], None), temperature=0)
    state = remembered(made[0], 2)
    before = copied(state)
    assert torch.equal(generate(*made, prompt, 6, state=state, temperature=0, compile=True), expected)
    assert_same(state, before)
    # The tokens, and the number of positions in the stack and in its two layers. PyTorch 2.11 copies each of the four
    # caches to itself as well.
    assert copies == [8 if torch.__version__.startswith("2.11.") else 4]


def test_it_is_compiled_once_for_a_number_of_rows(monkeypatch: pytest.MonkeyPatch):
    """Not for each call, length, seed or value of a parameter; a state whose size has a bound never again."""
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    by_torch_compile(monkeypatch, backend)
    monkeypatch.setattr(generation, "LEAST_ROOM", 16)
    backbone, embed, head = parts("linear")
    for n_tokens, seed in ((4, 0), (9, 1), (70, 2)):
        generate(backbone, embed, head, torch.zeros(2, 1, dtype=torch.long), n_tokens, seed=seed, compile=True)
    with torch.no_grad():
        head.proj.weight.mul_(-1)
    prompt = torch.zeros(2, 3, dtype=torch.long)
    after = generate(backbone, embed, head, prompt, 9, compile=True)
    assert len(compiled) == 1
    assert torch.equal(after, generate(backbone, embed, head, prompt, 9))
    generate(backbone, embed, head, prompt[:1], 9, compile=True)
    assert len(compiled) == 2


def test_rooms_are_few():
    """Powers of 2, but no more than is ever needed, rounded up to 64."""
    rooms = [generation.room_for(n, 785, few=True) for n in range(1, 786)]
    assert sorted(set(rooms)) == [256, 512, 832]
    assert all(room >= n for n, room in enumerate(rooms, 1))
    assert generation.room_for(1, 20, few=True) == 64
    assert (rooms[255], rooms[256]) == (256, 512)


@pytest.mark.parametrize("n_prompt", [1, 3])
def test_a_recorded_step_is_taken_once_for_each_token(n_prompt: int, monkeypatch: pytest.MonkeyPatch):
    """What is done around a graph on CUDA, with a graph that runs Python: recording it runs nothing."""
    events = []

    class Graph:
        def replay(self):
            events.append("replay")
            self.run()

    def recorded(run, device):
        run()
        events.append("record")
        graph = Graph()
        graph.run = run
        return graph.replay

    uncompiled(monkeypatch, least_room=4)
    monkeypatch.setattr(generation, "check_inductor", lambda asked, device: None)
    monkeypatch.setattr(generation, "_recorded", recorded)
    monkeypatch.setattr(generation, "_on_cpu", lambda device: False)
    monkeypatch.setattr(generation, "_on_cuda", lambda device: True)
    monkeypatch.setattr(generation, "_program", lambda backend: generation._advance)
    made, prompt = parts(), torch.zeros(2, n_prompt, dtype=torch.long)
    assert torch.equal(generate(*made, prompt, 9, compile=True), generate(*made, prompt, 9))
    assert events.count("record") == {1: 3, 3: 3}[n_prompt]  # rooms of 4, 8 and 16 positions
    assert events.count("record") + events.count("replay") == {1: 9, 3: 8}[n_prompt]


def test_a_step_is_recorded_on_the_stream_that_compiled_it(monkeypatch: pytest.MonkeyPatch):
    """Of the model's device: torch's own stream for recording is of whichever device recorded first."""
    entered: list[object] = []

    @contextmanager
    def within(thing: object, **options: object) -> Iterator[None]:
        entered.append(options.get("stream", thing))
        yield
        entered.pop()

    class Stream:
        def __init__(self) -> None:
            assert entered == [torch.device("cuda:1")]

        def wait_stream(self, other: object) -> None:
            pass

    class Graph:
        replay = "replay"

    for name, fake in {
        "device": within,
        "stream": within,
        "graph": within,
        "Stream": Stream,
        "CUDAGraph": Graph,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Mock())
    ran_on: list[object] = []
    assert generation._recorded(lambda: ran_on.append(entered[-1]), torch.device("cuda:1")) == "replay"
    first, second = ran_on
    assert isinstance(first, Stream)
    assert second is first


def test_on_tokens_may_keep_what_it_is_shown(monkeypatch: pytest.MonkeyPatch):
    """The next step overwrites its own tokens, not these."""
    uncompiled(monkeypatch, least_room=64)
    shown: list[torch.Tensor] = []
    drawn = generate(*parts(), torch.zeros(3, 1, dtype=torch.long), 6, compile=True, on_tokens=shown.append)
    assert torch.equal(torch.stack(shown, 1), drawn)


# ------------------------------------------------------------------------------------------------- what is refused


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match=r"compile=True needs a C\+\+ compiler on the CPU"):
        generate(*parts(), torch.zeros(1, 1, dtype=torch.long), 1, compile=True)


def test_a_kind_that_cannot_be_compiled_is_named(monkeypatch: pytest.MonkeyPatch):
    class Looking(LinearAttention):
        def attend(self, q, k, v, state, lengths):
            assert q.sum().item() < 1e9
            torch._dynamo.graph_break()
            return super().attend(q, k, v, state, lengths)

    by_torch_compile(monkeypatch, "eager")
    made = around(Transformer(8, 2, 1, attention=Looking).double().eval())
    with pytest.raises(ValueError, match=r"a step of Transformer \(Looking\) can't be compiled; leave compile out"):
        generate(*made, torch.zeros(1, 1, dtype=torch.long), 1, compile=True)


def test_a_backbone_that_sees_the_future_is_refused():
    _, embed, head = parts()
    backbone = Transformer(8, 2, 1, causal=False)
    with pytest.raises(ValueError, match=r"Transformer has causal=False"):
        generate(backbone, embed, head, torch.zeros(1, 1, dtype=torch.long), 1)


NO_DISTRIBUTIONS = {"temperature": (-0.5, math.nan, math.inf), "top_k": (0, -3), "top_p": (0.0, -0.1, 1.5, math.nan)}


@pytest.mark.parametrize("option", NO_DISTRIBUTIONS)
def test_settings_that_make_no_distribution_are_refused(option: str):
    for value in NO_DISTRIBUTIONS[option]:
        with pytest.raises(ValueError, match=f"{option}={value}"):
            generate(*parts(), torch.zeros(1, 1, dtype=torch.long), 1, **{option: value})
        with pytest.raises(ValueError, match=f"{option}={value}"):
            Sampling(**{option: value})


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_log_probabilities_that_are_nan_are_refused(temperature: float):
    made, prompt = parts(), torch.zeros(1, 1, dtype=torch.long)
    with torch.no_grad():
        made[1].weight[0, 0] = math.nan
    for draws in (
        lambda: generate(*made, prompt, 3, temperature=temperature),
        lambda: beam_search(*made, prompt, 3, beam=2),
    ):
        with pytest.raises(ValueError, match="log-probabilities are NaN: its weights or its inputs are not finite"):
            draws()


@pytest.mark.parametrize("shape", [(1, 0), (0, 1), (3,)])
def test_a_prompt_has_rows_and_tokens(shape: tuple[int, ...]):
    made, prompt = parts(), torch.zeros(shape, dtype=torch.long)
    for draws in (lambda: generate(*made, prompt, 3), lambda: beam_search(*made, prompt, 3, beam=2)):
        with pytest.raises(ValueError, match=re.escape(f"prompt has shape {shape}; expected (batch, length)")):
            draws()


def test_each_row_of_a_prompt_has_tokens_and_a_stream():
    made, prompt = parts(), torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(ValueError, match=r"lengths is \[3, 0\]; each row of prompt has at least one token"):
        generate(*made, prompt, 1, lengths=torch.tensor([3, 0]))
    with pytest.raises(ValueError, match="streams has 1 numbers for 2 rows"):
        generate(*made, prompt, 1, streams=[5])


def test_a_number_of_tokens_is_not_negative():
    made, prompt = parts(), torch.zeros(1, 1, dtype=torch.long)
    assert generate(*made, prompt, 0).shape == (1, 0)
    with pytest.raises(ValueError, match="n_tokens=-1 must be at least 0"):
        generate(*made, prompt, -1)


def test_one_value_is_the_same_as_its_fields_as_keywords():
    made, prompt = parts(), torch.zeros(3, 1, dtype=torch.long)
    fields: Any = {"temperature": 1.5, "top_k": 4, "top_p": 0.9, "seed": 5}
    expected = generate(*made, prompt, 20, **fields)
    assert torch.equal(generate(*made, prompt, 20, sampling=Sampling(**fields)), expected)
    assert torch.equal(generate(*made, prompt, 20, sampling=Sampling(1.5, 4, 0.9), seed=5), expected)
    for name, other in {"temperature": 0.5, "top_k": 1, "top_p": 0.1, "seed": 6}.items():
        changed = generate(*made, prompt, 20, sampling=Sampling(**fields), **{name: other})
        assert not torch.equal(changed, expected)
        assert torch.equal(changed, generate(*made, prompt, 20, **{**fields, name: other}))


# ------------------------------------------------------------------------------------------------------- many prompts

PROMPTS = [torch.arange(n) * (i + 3) % 7 for i, n in enumerate((1, 9, 3, 1, 6))]
LIMITS = [4, 1, 6, 3, 6]


def each_alone(made: tuple, n: int, **options: Any) -> list[torch.Tensor]:
    """Sample j of prompt i is row i n + j of as many rows of that prompt."""
    return [
        generate(*made, prompt.expand((i + 1) * n, -1), limit, **options)[i * n :]
        for i, (prompt, limit) in enumerate(zip(PROMPTS, LIMITS, strict=True))
    ]


@pytest.mark.parametrize("case", of_kinds(CAUSAL))
def test_prompts_of_a_batch_get_what_each_gets_alone(case: Case):
    made = around(case.build())
    expected = each_alone(made, 2, seed=1)
    for batch_size in (3, 32):
        drawn = generate_each(*made, PROMPTS, LIMITS, n=2, batch_size=batch_size, seed=1)
        assert all(map(torch.equal, drawn, expected))
    assert len(torch.cat([t.flatten() for t in drawn]).unique()) > 1


def test_batches_are_small_and_of_similar_samples():
    backbone, embed, head = parts(vocabulary=7)
    shapes: list[tuple[int, int]] = []
    calls: list[int] = []

    def embedded(tokens: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(tokens.shape))
        return embed(tokens)

    generate_each(backbone, embedded, head, PROMPTS, LIMITS, batch_size=2, progress=lambda of: calls.extend(of) or of)
    assert shapes == [(2, 6), *[(2, 1)] * 5, (2, 1), *[(2, 1)] * 3, (1, 9)]
    assert len(calls) == 3


def test_no_row_of_a_batch_needs_more_positions_than_its_prompt_alone():
    _, embed, head = parts(vocabulary=7)
    positions = partial(LearnedPositions, max_len=11)  # 6 + 6 − 1; with 6 more tokens 9 would need 14
    made = Transformer(8, 2, 1, positions=positions, init="pytorch").double().eval(), embed, head
    assert all(map(torch.equal, generate_each(*made, PROMPTS, LIMITS), each_alone(made, 1)))


def test_a_smaller_batch_at_the_end_is_not_compiled(monkeypatch: pytest.MonkeyPatch):
    made, compiled = parts(vocabulary=7), []
    whole = generation.generate

    def generate(*args: Any, sampling: Sampling, **options: Any) -> torch.Tensor:
        compiled.append((len(args[3]), sampling.compile))
        return whole(*args, sampling=sampling, compile=False, **options)

    monkeypatch.setattr(generation, "generate", generate)
    for batch_size in (3, 32):
        generate_each(*made, PROMPTS, 4, batch_size=batch_size, compile=True)
    assert compiled == [(3, True), (2, False), (5, True)]


@pytest.mark.parametrize("name", BACKBONES)
@pytest.mark.parametrize("compiled", [False, True])
def test_padded_prompts_follow_what_was_drawn(name: str, compiled: bool, monkeypatch: pytest.MonkeyPatch):
    uncompiled(monkeypatch, 4)
    made, kept = parts(name), []
    rows, lengths = torch.tensor([[1, 2, 3], [4, 0, 0]]), torch.tensor([3, 1])
    generate(*made, rows, 4, lengths=lengths, keep=kept.append, compile=compiled)
    drawn = generate(*made, rows, 5, lengths=lengths, kept=kept[0], compile=compiled)
    for i, n in enumerate(lengths):
        own: list = []
        options: dict[str, Any] = {"streams": [i], "compile": False}
        generate(*made, rows[i : i + 1, :n], 4, keep=own.append, **options)
        assert torch.equal(generate(*made, rows[i : i + 1, :n], 5, kept=own[0], **options)[0], drawn[i])


def test_many_prompts_that_do_not_fit_are_refused():
    made, given = parts(), [torch.tensor([1, 2])]
    for prompts, n_tokens, options, message in (
        (given, 3, {"batch_size": 0}, "batch_size=0"),
        (given, 3, {"n": 0}, "n=0"),
        (given, [1, 2], {}, "n_tokens has 2 numbers for 1 prompts"),
        (given, 0, {}, "n_tokens=0"),
        ([given[0][:0]], 1, {}, r"a prompt has shape \(0,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            generate_each(*made, prompts, n_tokens, **options)
    assert generate_each(*made, [], 5) == []
