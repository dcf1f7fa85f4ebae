import itertools
import math
import sys

import pytest
import torch

from lit_effattn.ops.lsh import (
    NOWHERE,
    Chunks,
    attend_in_chunks,
    earlier_slots,
    hash_buckets,
    ranked_chunks,
    recent_of,
    sorted_chunks,
)
from tests.support.kernels import assert_second_derivative_is_refused, check_operators
from tests.support.tensor_sizes import Made, largest_in_training

B, H, R = 2, 2, 3
HEADS_AND_ROUNDS = list(itertools.product(range(B), range(H), range(R)))


def random_buckets(n: int, n_buckets: int, lengths: list[int]) -> torch.Tensor:
    buckets = torch.randint(n_buckets, (B, H, R, n))
    for row, length in enumerate(lengths):
        buckets[row, ..., length:] = n_buckets  # padding
    return buckets


# ------------------------------------------------------------------------------------------------------------ hashing


def test_without_columns_all_fall_together():
    assert torch.equal(hash_buckets(torch.randn(1, H, 5, 4), torch.empty(R, H, 4, 0)), torch.zeros(1, H, R, 5).long())


def test_near_vectors_fall_together_more_often():
    x = torch.nn.functional.normalize(torch.randn(1, 1, 2000, 16), dim=-1)
    together = []
    for noise in (0.1, 1.0, 100.0):
        other = x + noise * torch.randn_like(x) / 4
        rotations = torch.randn(1, 1, 16, 4)
        together.append((hash_buckets(x, rotations) == hash_buckets(other, rotations)).float().mean().item())
    assert together[0] > 0.85
    assert together[0] > together[1] + 0.2 > together[2] + 0.4
    assert together[2] == pytest.approx(1 / 8, abs=0.05)


# ------------------------------------------------------------------------------------------------------------- chunks


def test_sorted_chunks_one_position_after_the_other():
    for lengths, c in itertools.product([[13, 13], [13, 5], [0, 1]], [1, 3, 20]):
        buckets = random_buckets(13, 4, lengths)
        chunks = sorted_chunks(buckets, 4, c)
        for b, h, r in HEADS_AND_ROUNDS:
            row = buckets[b, h, r].tolist()
            order = sorted(range(13), key=lambda i: (row[i], i))
            for i in range(13):
                there = i < lengths[b]
                slot = order.index(i)
                assert chunks.slots[b, h, r, i] == (slot if there else chunks.n_chunks * c)
                assert chunks.places[b, h, i, r] == (slot // c * 4 + row[i] if there else NOWHERE)


def test_ranked_chunks_one_position_after_the_other():
    for lengths, c, begun in itertools.product([[13, 13], [13, 5], [0, 1]], [1, 3, 20], [False, True]):
        buckets = random_buckets(13, 4, lengths)
        before = torch.randint(8, (B, H, R, 4)) if begun else None
        chunks, ranks, first, counts = ranked_chunks(buckets, 4, c, before)
        for b, h, r in HEADS_AND_ROUNDS:
            row = buckets[b, h, r].tolist()
            count = [0] * 4 if before is None else before[b, h, r].tolist()
            taken = set()
            for i in range(13):
                slot = int(chunks.slots[b, h, r, i])
                if i >= lengths[b]:
                    assert chunks.places[b, h, i, r] == NOWHERE
                    assert slot == chunks.n_chunks * c
                    continue
                bucket = row[i]
                assert ranks[b, h, r, i] == count[bucket]
                assert chunks.places[b, h, i, r] == count[bucket] // c * 4 + bucket
                assert slot % c == count[bucket] % c
                start = 0 if before is None else int(before[b, h, r, bucket]) // c - 1
                assert slot // c == first[b, h, r, bucket] // c + count[bucket] // c - start
                assert slot // c < chunks.n_chunks
                taken.add(slot)
                count[bucket] += 1
            assert len(taken) == lengths[b], "two positions in one slot"
            assert counts[b, h, r].tolist() == count


@pytest.mark.parametrize("c", [1, 3])
def test_the_newest_of_a_bucket(c: int):
    for count in range(5 * c):
        ring = [-7] * (2 * c)
        for rank in range(count):
            ring[rank % (2 * c)] = 100 + rank
        recent = recent_of(torch.tensor(ring), torch.tensor(count))
        seen = {int(p): int(r) for p, r, s in zip(*recent, strict=True) if s}
        assert seen == {100 + r: r for r in range(count) if r // c >= count // c - 1}
        slots = earlier_slots(recent, torch.tensor(count), torch.tensor(4 * c))
        assert sorted(slots[slots >= 0].tolist()) == [
            4 * c + r - (count // c - 1) * c for r in range(count) if r // c >= count // c - 1
        ]


# ---------------------------------------------------------------------------------------------------------- attention


def by_definition(x: torch.Tensor, v: torch.Tensor, places: torch.Tensor, n_buckets: int, causal: bool) -> torch.Tensor:
    """Softmax attention to the union of what the rounds see, from the places of all pairs of positions."""
    difference = places[:, :, :, None] - places[:, :, None]  # (B, H, N, N, R)
    sees = ((difference == 0) | (difference == n_buckets)).any(-1)
    sees = sees.tril() if causal else sees
    others = sees & ~torch.eye(x.size(2), dtype=torch.bool)
    sees = torch.where(others.any(-1, keepdim=True), others, sees)
    scores = x @ (x / x.norm(dim=-1, keepdim=True)).transpose(-1, -2) / math.sqrt(x.size(-1))
    return scores.masked_fill(~sees, -torch.inf).softmax(-1) @ v


def cut(buckets: torch.Tensor, n_buckets: int, c: int, causal: bool) -> Chunks:
    return ranked_chunks(buckets, n_buckets, c)[0] if causal else sorted_chunks(buckets, n_buckets, c)


def random_case(n: int, d: int, n_buckets: int, c: int, causal: bool, lengths: list[int]) -> tuple[torch.Tensor, ...]:
    x, v = (torch.randn(B, H, n, d, dtype=torch.float64, requires_grad=True) for _ in range(2))
    return x, v, cut(random_buckets(n, n_buckets, lengths), n_buckets, c, causal)


@pytest.mark.parametrize(
    ("n", "c", "at_once"),
    [
        (60, 3, 2**17),
        (200, 32, 2**17),
        (200, 64, 2**13),  # blocks of half a chunk, two or more at once
        (300, 96, 1),  # blocks of a third, one at a time
        (500, 128, 2**17),  # of a quarter
    ],
)
def test_output_and_gradients_equal_the_definition(monkeypatch, n: int, c: int, at_once: int):
    for plain, causal in itertools.product([False, True], [False, True]):
        monkeypatch.setattr(sys.modules[attend_in_chunks.__module__], "_SCORES", at_once)
        n_buckets = 2
        x, v, chunks = random_case(n, 4, n_buckets, c, causal, [n, n - 17])
        weights = torch.randn_like(v)
        weights[1, :, n - 17 :] = 0  # padding
        out = attend_in_chunks(x, v, chunks.places, chunks, n_buckets, c, causal=causal, plain=plain)
        assert out.isfinite().all()
        expected = by_definition(x, v, chunks.places, n_buckets, causal).masked_fill(weights == 0, 0)
        torch.testing.assert_close(out.masked_fill(weights == 0, 0), expected)
        found, wanted = (torch.autograd.grad(y, (x, v), weights) for y in (out, expected))
        torch.testing.assert_close(found, wanted)


def test_by_hand_float32_is_near():
    """Where all rounds see nothing, and where of two keys that are seen one has all the weight."""
    for scale in [1e-3, 1e3]:
        x, v, chunks = random_case(200, 8, 2, 64, True, [200, 200])
        x = (scale * x).detach().requires_grad_()
        expected = attend_in_chunks(x, v, chunks.places, chunks, 2, 64, causal=True, plain=True)
        wanted = torch.autograd.grad(expected.square().sum(), (x, v))
        x, v = (t.detach().float().requires_grad_() for t in (x, v))
        out = attend_in_chunks(x, v, chunks.places, chunks, 2, 64, causal=True)
        assert out.dtype == torch.float32
        for a, b in zip((out, *torch.autograd.grad(out.square().sum(), (x, v))), (expected, *wanted), strict=True):
            assert (a - b).norm() <= 1e-4 * b.norm()


def test_by_hand_what_is_alone_asks_nothing():
    """Its score with itself is no product, so it has exactly no gradient."""
    x, v, chunks = random_case(1, 64, 2, 4, True, [1, 1])
    out = attend_in_chunks(x, v, chunks.places, chunks, 2, 4, causal=True)
    assert not torch.autograd.grad(out, x, torch.randn_like(out))[0].any()


def test_the_operators_are_what_torch_expects():
    """Shapes, layouts and aliases are those announced to torch.compile."""
    x, v, chunks = random_case(7, 4, 2, 2, True, [7, 5])
    x = x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    grid, before = torch.zeros(B, H, R, chunks.n_chunks, 2, dtype=torch.long), torch.zeros(B, dtype=torch.long)
    places = torch.zeros_like(chunks.places)
    arguments = x, v, places, grid, chunks.slots, before, 2, True
    check_operators("lsh", arguments, lambda given, out: (out[0], *given[:4], given[5], *out, *given[6:]))


def test_a_second_derivative_is_refused_and_named():
    x, v, chunks = random_case(6, 4, 2, 2, True, [6, 6])
    assert_second_derivative_is_refused(
        lambda x, v: attend_in_chunks(x, v, chunks.places, chunks, 2, 2, causal=True)[None],
        (x, v),
        "plain=True has one",
    )


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("causal", [True, False])
def test_nothing_of_size_n_squared_is_made(plain: bool, causal: bool):
    n, c, n_buckets, d = 2048, 16, 128, 8
    x, v = (torch.randn(1, 1, n, d) for _ in range(2))
    buckets = hash_buckets(x, torch.randn(1, 1, d, n_buckets // 2))
    chunks = cut(buckets, n_buckets, c, causal)

    def attend(x, v):
        return attend_in_chunks(x, v, chunks.places, chunks, n_buckets, c, causal=causal, plain=plain)

    assert chunks.n_chunks <= n // c + n_buckets
    assert largest_in_training(attend, x, v) <= 2 * n * 2 * c < n * n // 10


def test_by_hand_little_is_made_beside_outputs_and_gradients(monkeypatch):
    """No scores of all chunks, nor vectors of all slots."""
    monkeypatch.setattr(sys.modules[attend_in_chunks.__module__], "_SCORES", 2**11 // torch.get_num_threads())
    n, c, n_buckets, d = 2048, 32, 64, 8
    x, v = (torch.randn(1, 1, n, d, requires_grad=True) for _ in range(2))
    chunks = cut(hash_buckets(x, torch.randn(R, 1, d, n_buckets // 2)), n_buckets, c, True)
    with Made() as made:
        out = attend_in_chunks(x, v, chunks.places, chunks, n_buckets, c, causal=True)
        torch.autograd.grad(out, (x, v), torch.rand_like(out))
    of_slots = R * chunks.n_chunks * c + R
    assert made.large(of_slots) == [] or max(made.sizes) <= (chunks.n_chunks * c + 1) * d
    assert max(made.sizes) < R * n * c // 4
