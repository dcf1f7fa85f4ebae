import itertools
import math

import pytest
import torch

from lit_effattn.ops.sparse import fixed_attention, strided_attention, summary_positions
from tests.support.tensor_sizes import Largest, largest_in_training

B, H, D, D_V = 2, 3, 4, 5
SETS = [(True, True), (True, False), (False, True)]
BOTH = pytest.mark.parametrize(("local", "distant"), SETS, ids=["merged", "local", "distant"])


def strided_set(i: int, n: int, stride: int, local: bool, distant: bool, causal: bool) -> list[int]:
    """Section 4.3's sets, with a local one of `stride` keys."""
    near = {j for j in range(n) if abs(i - j) < stride} if local else set()
    far = {j for j in range(n) if (i - j) % stride == 0} if distant else set()
    return sorted(j for j in near | far if j <= i or not causal)


def fixed_set(i: int, n: int, stride: int, columns: list[int], local: bool, distant: bool, causal: bool) -> list[int]:
    near = {j for j in range(n) if j // stride == i // stride} if local else set()
    far = {j for j in range(n) if j % stride in columns} | {i} if distant else set()
    return sorted(j for j in near | far if j <= i or not causal)


def by_hand(q, k, v, sets):
    """One query after the other: the softmax over the keys in `sets[h][i]`."""
    y = torch.empty(*q.shape[:3], v.size(-1), dtype=q.dtype)
    for h in range(q.size(1)):
        for i in range(q.size(2)):
            seen = sets[h % len(sets)][i]
            weights = torch.softmax(torch.einsum("bd,bjd->bj", q[:, h, i], k[:, h, seen]) / math.sqrt(D), -1)
            y[:, h, i] = torch.einsum("bj,bjd->bd", weights, v[:, h, seen])
    return y


def random(n: int, m: int | None = None):
    q = 2 * torch.randn(B, H, n, D, dtype=torch.float64)
    k, v = (2 * torch.randn(B, H, m or n, d, dtype=torch.float64) for d in (D, D_V))
    return q, k, v


COLUMNS = [(1, [[0]]), (5, [[4]]), (5, [[3, 4]]), (6, [[4, 5], [2, 3], [0, 1]]), (30, [[28, 29]]), (3, [[0, 1, 2]])]


@BOTH
@pytest.mark.parametrize("causal", [True, False])
def test_each_pattern_equals_its_sets(causal: bool, local: bool, distant: bool):
    options = {"local": local, "distant": distant, "causal": causal}
    for n in (1, 4, 5, 6, 23):
        q, k, v = random(n)
        for stride in (1, 2, 5, 30):
            sets = [[strided_set(i, n, stride, local, distant, causal) for i in range(n)]]
            torch.testing.assert_close(strided_attention(q, k, v, stride, **options), by_hand(q, k, v, sets))
        for stride, columns in COLUMNS:
            sets = [[fixed_set(i, n, stride, c, local, distant, causal) for i in range(n)] for c in columns]
            y = fixed_attention(q, k, v, stride, torch.tensor(columns), **options)
            torch.testing.assert_close(y, by_hand(q, k, v, sets))


STARTS = [0, 3, 4, 7, 12]


@BOTH
@pytest.mark.parametrize("spare", [0, 3])
def test_strided_goes_on_from_where_each_row_stands(spare: int, local: bool, distant: bool):
    for n, pair in itertools.product((1, 4, 9), zip(STARTS, reversed(STARTS), strict=True)):
        m = max(STARTS) + n + spare
        q, k, v = random(m)
        sets = [[strided_set(i, m, 4, local, distant, True) for i in range(m)]]
        expected = by_hand(q, k, v, sets)
        start = torch.tensor(pair)
        some = torch.stack([q[b, :, s : s + n] for b, s in enumerate(pair)])
        for b, s in enumerate(pair):  # nothing of meaning
            k[b, :, s + n :], v[b, :, s + n :] = 1e6, 1e6
        y = strided_attention(some, k, v, 4, local=local, distant=distant, start=start)
        torch.testing.assert_close(y, torch.stack([expected[b, :, s : s + n] for b, s in enumerate(pair)]))


@BOTH
@pytest.mark.parametrize("columns", [[[2, 3]], [[3], [2], [1]]], ids=["shared", "distinct"])
def test_fixed_goes_on_from_where_each_row_stands(columns: list, local: bool, distant: bool):
    for n, pair in itertools.product((1, 4, 9), zip(STARTS, reversed(STARTS), strict=True)):
        m = max(STARTS) + n
        room = summary_positions(torch.tensor(columns), 4, -(-m // 4))
        q, k, v = random(m)
        sets = [[fixed_set(i, m, 4, c, local, distant, True) for i in range(m)] for c in columns]
        expected = by_hand(q, k, v, sets)
        block = [torch.full((B, H, 4, t.size(-1)), 1e6, dtype=t.dtype) for t in (k, v)]
        summary = [torch.full((B, H, room.size(1), t.size(-1)), 1e6, dtype=t.dtype) for t in (k, v)]
        for b, s in enumerate(pair):
            for stored, t in zip(block, (k, v), strict=True):
                for p in range(s - s % 4, s):
                    stored[b, :, p % 4] = t[b, :, p]
            for stored, t in zip(summary, (k, v), strict=True):
                for h in range(H):
                    for slot, p in enumerate(room[h % len(room)].tolist()):
                        if p < s + n:
                            stored[b, h, slot] = t[b, h, p]
        parts = [torch.stack([t[b, :, s : s + n] for b, s in enumerate(pair)]) for t in (q, k, v, expected)]
        y = fixed_attention(
            *parts[:3],
            4,
            torch.tensor(columns),
            local=local,
            distant=distant,
            start=torch.tensor(pair),
            block=tuple(block),
            summary=tuple(summary),
        )
        torch.testing.assert_close(y, parts[3])


@BOTH
def test_what_is_not_there_is_not_seen(local: bool, distant: bool):
    for pattern in ["strided", "fixed"]:
        n, lengths = 11, [6, 0]
        q, k, v = random(n)
        if pattern == "strided":
            sets = [[strided_set(i, lengths[0], 4, local, distant, False) for i in range(lengths[0])]]
        else:
            sets = [[fixed_set(i, lengths[0], 4, [2, 3], local, distant, False) for i in range(lengths[0])]]
        expected = by_hand(q[:1, :, :6], k[:1], v[:1], sets)
        k[0, :, 6:], v[0, :, 6:] = 1e6, 1e6
        options = {"local": local, "distant": distant, "causal": False, "lengths": torch.tensor(lengths)}
        if pattern == "strided":
            y = strided_attention(q, k, v, 4, **options)
        else:
            y = fixed_attention(q, k, v, 4, torch.tensor([[2, 3]]), **options)
        torch.testing.assert_close(y[:1, :, :6], expected)
        assert y.isfinite().all()


def test_scores_of_any_size():
    """Far apart in the two sets, and beyond what exp can take."""
    n = 17
    for scale in (1e2, 1e4):
        q, k, v = random(n)
        k = k * scale
        sets = [[strided_set(i, n, 4, True, True, True) for i in range(n)]]
        torch.testing.assert_close(strided_attention(q, k, v, 4), by_hand(q, k, v, sets))
        sets = [[fixed_set(i, n, 4, [3], False, True, True) for i in range(n)]]
        y = fixed_attention(q, k, v, 4, torch.tensor([[3]]), local=False)
        torch.testing.assert_close(y, by_hand(q, k, v, sets))


@BOTH
def test_gradients(local: bool, distant: bool):
    q, k, v = (t[:1, :1].requires_grad_() for t in random(7))
    options = {"local": local, "distant": distant}
    columns = torch.tensor([[1, 2]])
    assert torch.autograd.gradcheck(lambda *a: strided_attention(*a, 3, **options), (q, k, v))
    assert torch.autograd.gradcheck(lambda *a: fixed_attention(*a, 3, columns, **options), (q, k, v))


@BOTH
@pytest.mark.parametrize(("pattern", "n"), [("strided", 1), ("fixed", 1), ("fixed", 4000)])
def test_dropout_drops_and_keeps_the_mean(n: int, pattern: str, local: bool, distant: bool):
    """Of a single step too, over many rows."""
    rows = 4000 // n
    q = torch.zeros(rows, 1, n, 1)
    k, v = torch.zeros(rows, 1, 40 if n == 1 else n, 1), torch.ones(rows, 1, 40 if n == 1 else n, 1)
    start = torch.full((rows,), 17) if n == 1 else None

    def attend(dropout: float):
        options = {"local": local, "distant": distant, "dropout": dropout, "start": start}
        if pattern == "strided":
            return strided_attention(q, k, v, 40 if n > 1 else 8, **options)
        if n == 1:
            options["block"], options["summary"] = (k[:, :, :8], v[:, :, :8]), (k[:, :, :10], v[:, :, :10])
        return fixed_attention(q, k[:, :, :n], v[:, :, :n], 40 if n > 1 else 8, torch.tensor([[6, 7]]), **options)

    y = attend(0.5)
    assert y.std() > 0.05
    assert y.mean().item() == pytest.approx(1, abs=0.05)
    torch.testing.assert_close(attend(0.0), torch.ones_like(y))


@pytest.mark.parametrize(
    ("local", "distant", "causal"), [(True, True, True), (True, True, False), (True, False, True), (False, True, True)]
)
def test_nothing_of_size_n_squared_is_made(causal: bool, local: bool, distant: bool):
    n, stride, d = 1024, 32, 8
    options = {"local": local, "distant": distant, "causal": causal}
    q, k, v = (torch.rand(1, 1, n, d) for _ in range(3))
    most = n * 3 * stride * d  # a window's keys, copied
    assert largest_in_training(lambda *a: strided_attention(*a, stride, **options), q, k, v) <= most < n * n
    columns = torch.tensor([[30, 31]])
    assert largest_in_training(lambda *a: fixed_attention(*a, stride, columns, **options), q, k, v) <= n * 2 * stride


def test_going_on_makes_nothing_of_size_n_squared():
    n, stride, d = 512, 16, 8
    start = torch.tensor([512, 500])
    q, k, v = (torch.rand(2, 1, m, d) for m in (n, 2 * n, 2 * n))
    most = largest_in_training(lambda *a: strided_attention(*a, stride, start=start), q, k, v)
    assert most < n * 2 * n / 4


def test_one_step_gathers_what_it_sees():
    m, stride, d = 4096, 64, 8
    q, k, v = (torch.rand(1, 1, n, d) for n in (1, m, m))
    with torch.no_grad(), Largest() as largest:
        strided_attention(q, k, v, stride, start=torch.tensor([4000]))
    assert largest.elements <= 2 * stride * d
