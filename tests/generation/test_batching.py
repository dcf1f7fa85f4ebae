"""Many prompts in one batch: each gets what it gets alone."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_effattn import Transformer
from lit_effattn.generation import PrefixCache, generate_each, sampling
from lit_effattn.tasks import LanguageModel
from tests.tasks.test_kept_states import KINDS, V, made

COMMON = [7] * 40


def prompts(n: int, longest: int = 30) -> list[torch.Tensor]:
    """Random prompts, of which half begin with 1 to 40 common tokens, and some are the same."""
    draw = random.Random(0)
    result = [[draw.randrange(V) for _ in range(draw.randint(1, longest))] for _ in range(n)]
    begun = [COMMON[: draw.randint(1, 40)] * draw.randrange(2) + p for p in result]
    return [torch.tensor(p) for p in [*begun[: n - 2], begun[0], begun[0]]]


def alone(
    model: LanguageModel, prompt: torch.Tensor, n_tokens: int, place: int, n: int = 1, **options: Any
) -> torch.Tensor:
    """What `generate` draws in n rows from the random streams of prompt number `place`."""
    with pytest.MonkeyPatch.context() as patch:
        own = sampling._random_stream
        patch.setattr(sampling, "_random_stream", lambda seed, row, length: own(seed, place * n + row, length))
        return model.sample(prompt.expand(n, -1), n_tokens, **options)


def assert_as_alone(model: LanguageModel, given: list[torch.Tensor], limits: list[int], **options: Any) -> None:
    result = model.sample_each(given, limits, **options)
    for i, (prompt, limit, drawn) in enumerate(zip(given, limits, result, strict=True)):
        assert torch.equal(drawn, alone(model, prompt, limit, i, options.get("n", 1), seed=options.get("seed", 0)))
    assert len({int(drawn[0, 0]) for drawn in result}) > 2


@pytest.mark.parametrize(
    "kind",
    [
        *("LinearAttention", "TransformerXLAttention"),
        *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in ("SoftmaxAttention", "LSTM")),
    ],
)
def test_200_prompts_get_what_each_gets_alone(kind: str):
    draw, cache = random.Random(1), PrefixCache()
    assert_as_alone(
        made(kind), prompts(200), [draw.randint(1, 6) for _ in range(200)], batch_size=16, cache=cache, seed=2
    )
    assert (cache.nbytes > 0) == (kind != "TransformerXLAttention")  # it sees all of a call


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_and_several_samples(kind: str):
    """A cache is used again with more room, and is too small for some states at last."""
    model, cache = made(kind), PrefixCache()
    given = [torch.tensor([*COMMON, *p.tolist()]) for p in prompts(8, 5)]
    for limits in ([4, 1, 2, 5, 3, 6, 1, 2], [9] * 8):
        assert_as_alone(model, given, limits, batch_size=5, n=2, cache=cache, seed=1)
    state = model.backbone.initial_state(1, max_len=cache.max_len)
    small = PrefixCache(sum(t.nbytes for t in torch.utils._pytree.tree_leaves(state)))
    assert_as_alone(model, given, [3] * 8, batch_size=3, cache=small)


def test_a_shared_prefix_is_read_once():
    model, read = made(), list[int]()

    def embed(tokens: torch.Tensor) -> torch.Tensor:
        read.append(tokens.numel())
        return model._embed(tokens)

    given = [torch.tensor([*COMMON, i, 3]) for i in range(10)]
    how: dict[str, Any] = {"batch_size": 10, "progress": iter}
    parts = (model.backbone, embed, model.head, given, 4)
    cache = PrefixCache()
    first = generate_each(*parts, cache=cache, **how)
    assert read == [40, 20, 10, 10, 10]
    read.clear()
    again = generate_each(*parts, cache=cache, **how)
    assert read == [20, 10, 10, 10]
    read.clear()
    without = generate_each(*parts, cache=PrefixCache(0), **how)
    assert read == [420, 10, 10, 10]
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(first, again, without, strict=True))


@pytest.mark.parametrize("kind", ["SoftmaxAttention", "LinearAttention"])
def test_a_cache_serves_longer_prompts_later(kind: str):
    """Its states have room for the prompts of their own call alone."""
    model, cache = made(kind), PrefixCache()
    short = [torch.tensor([*[3] * 120, i, 1]) for i in range(6)]
    long = [torch.tensor([*[3] * 120, *[4] * 120, i, 1]) for i in range(6)]
    for given in (short, long):
        expected = model.sample_each(given, 3)
        assert all(map(torch.equal, model.sample_each(given, 3, cache=cache), expected))


def test_rows_end_and_others_take_their_places():
    model, rows = made("SoftmaxAttention"), list[int]()

    def embed(tokens: torch.Tensor) -> torch.Tensor:
        if tokens.size(1) == 1:
            rows.append(len(tokens))
        return model._embed(tokens)

    given = [torch.tensor([1, i]) for i in range(6)]
    done: list[int] = []

    def progress(steps: Any) -> Any:
        for i in steps:
            yield i
            done.append(i)

    limits = [5, 2, 2, 2, 2, 3]
    drawn = generate_each(model.backbone, embed, model.head, given, limits, batch_size=2, progress=progress)
    assert [len(d[0]) for d in drawn] == limits
    assert rows == [2] * 4 + [1] * 2
    assert done == [*range(6)]


def test_what_is_refused():
    model = made()
    given = [torch.tensor([1, 2])]
    for options, message in (
        ({"batch_size": 0}, "batch_size=0"),
        ({"n": 0}, "n=0"),
    ):
        with pytest.raises(ValueError, match=message):
            model.sample_each(given, 3, **options)
    with pytest.raises(ValueError, match="n_tokens has 2 numbers for 1 prompts"):
        model.sample_each(given, [1, 2])
    with pytest.raises(ValueError, match="n_tokens=0"):
        model.sample_each(given, 0)
    with pytest.raises(ValueError, match=r"a prompt has shape \(0,\)"):
        model.sample_each([given[0][:0]], 1)
    with pytest.raises(ValueError, match="token"):
        model.sample_each([given[0] + V], 1)
    backbone = Transformer(16, 2, 1, causal=False)
    with pytest.raises(ValueError, match="causal=False"):
        generate_each(backbone, model._embed, model.head, given, 1)
    assert model.sample_each([], 5) == []


@pytest.mark.parametrize("kind", ["SoftmaxAttention", "LSTM"])
def test_compiled_steps_draw_the_same(kind: str, interpreted: list[Path]):
    """While rows begin and end. The fewer rows at the end are not worth a program."""
    model, given, limits = made(kind), prompts(7, 5), [4, 2, 5, 3, 6, 1, 9]
    options: dict[str, Any] = {"batch_size": 3, "seed": 1}
    drawn = model.sample_each(given, limits, compile=True, **options)
    for one, other in zip(drawn, model.sample_each(given, limits, compile=False, **options), strict=True):
        assert torch.equal(one, other)
    assert len(interpreted) == 1
