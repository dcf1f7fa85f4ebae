import doctest
import math

import pytest
import torch

from lit_effattn.tasks import metrics
from lit_effattn.tasks.metrics import Accuracy, BitsPerDim, ErrorRate, ExactMatch, Mean, NatsPerUnit, Perplexity


def test_sums_are_divided_once():
    """Where batches are uneven, the mean of their means is another number."""
    batches = [torch.rand(8, 4), torch.rand(1, 4) + 5, torch.rand(3, 2) * 9]
    metric = BitsPerDim()
    for batch in batches:
        metric.update(batch)
    everything = [value for batch in batches for value in batch.double().flatten().tolist()]
    expected = sum(everything) / len(everything) / math.log(2)
    assert metric.compute().item() == pytest.approx(expected, rel=1e-12)
    mean_of_means = sum(batch.mean().item() for batch in batches) / len(batches) / math.log(2)
    assert abs(mean_of_means - expected) > 0.5


def test_calling_it_adds_too():
    """`metric(batch)` returns the batch's figure and keeps the whole."""
    metric = BitsPerDim()
    assert metric(torch.full((4,), math.log(2))).item() == pytest.approx(1)
    assert metric(torch.full((12,), 3 * math.log(2))).item() == pytest.approx(3)
    assert metric.compute().item() == pytest.approx((4 * 1 + 12 * 3) / 16)


def test_small_numbers_are_not_lost_in_large_sums():
    """A float32 sum of 2²⁴ + 1 + 1 + … stays at 2²⁴."""
    metric = BitsPerDim()
    metric.update(torch.tensor([2.0**24]))
    for _ in range(1000):
        metric.update(torch.tensor([1.0]))
    assert metric.total.item() == 2**24 + 1000
    assert metric.compute().dtype == torch.float64
    within = BitsPerDim()  # within one batch as well
    within.update(torch.tensor([2.0**24, *[1.0] * 1000]))
    assert within.total.item() == 2**24 + 1000


@pytest.mark.parametrize("cast", [lambda m: m.bfloat16(), lambda m: m.half(), lambda m: m.to(torch.bfloat16)])
def test_a_model_cast_to_half_precision_keeps_exact_sums(cast):
    model = cast(torch.nn.ModuleDict({"val": BitsPerDim()}))
    metric = model["val"]
    metric.update(torch.full((5000,), 1.0, dtype=torch.bfloat16))
    metric.update(torch.ones(1, dtype=torch.bfloat16))
    assert metric.total.item() == metric.count.item() == 5001
    metric.reset()
    metric.update(torch.full((5001,), 1.0))
    assert metric.total.item() == 5001


def test_the_states_are_sums_over_processes():
    """What torchmetrics does in DDP: gather every state, then reduce it as declared."""
    ranks = [BitsPerDim(), BitsPerDim()]
    ranks[0].update(torch.full((6,), math.log(2)))
    ranks[1].update(torch.full((2,), 5 * math.log(2)))
    metric = BitsPerDim()
    metric.update(torch.zeros(1))
    metric.distributed_available_fn = lambda: True
    metric.dist_sync_fn = lambda state, group: [getattr(rank, name_of(metric, state)) for rank in ranks]
    assert metric.compute().item() == pytest.approx((6 * 1 + 2 * 5) / 8)


def name_of(metric: BitsPerDim, state: torch.Tensor) -> str:
    return next(name for name in ("total", "count") if getattr(metric, name) is state)


def test_no_graph_is_kept():
    metric = BitsPerDim()
    metric.update(torch.ones(3, requires_grad=True) * 2)
    assert not metric.total.requires_grad


FIGURES = {BitsPerDim: lambda mean: mean / math.log(2), Perplexity: math.exp, Mean: lambda mean: mean}


@pytest.mark.parametrize("kind", FIGURES)
def test_every_figure_by_hand(kind: type):
    """Uneven batches, only some positions scored."""
    metric = kind()
    nll = torch.tensor([[1.0, 2.0, 50.0], [4.0, 60.0, 70.0]])
    metric.update(nll[torch.tensor([[True, True, False], [True, False, False]])])
    metric.update(torch.tensor([9.0]))
    metric.update(torch.empty(0))  # nothing was scored
    assert metric.compute().item() == pytest.approx(FIGURES[kind]((1 + 2 + 4 + 9) / 4), rel=1e-12)
    assert metric.compute().dtype == torch.float64
    assert metric.higher_is_better is False


def test_accuracy_counts_what_is_right():
    metric = Accuracy()
    assert metric(torch.tensor([[True, False], [True, True]])).item() == 0.75
    assert metric(torch.tensor([False])).item() == 0
    assert metric.compute().item() == pytest.approx(3 / 5, rel=1e-15)
    assert metric.higher_is_better is True


VARIANTS = [  # a hypothesis, its references, and the edits and tokens that count
    ("t ah m", ["t ah m ey t ow", "t ah m"], 0, 3),
    ("t ah m", ["t ah m ey t ow"], 3, 6),
    ("r eh d", ["r iy d", "r eh d s"], 1, 3),  # equally near: the shorter one
    ("r eh d", ["r eh d s", "r iy d"], 1, 3),
    ("r iy", ["r eh d z", "r"], 1, 1),  # the nearest, though it has the higher rate
    ("", ["k ae t", ""], 0, 0),
    ("k ae t", [""], 3, 0),
    ("k ae t", ["k ae t"], 0, 3),
    ("k ah t", ["k ae t"], 1, 3),  # a substitution
    ("k t", ["k ae t"], 1, 3),  # a deletion
    ("k ae t s", ["k ae t"], 1, 3),  # an insertion
    ("ae t s k", ["k ae t s"], 2, 4),  # one deleted and inserted elsewhere
    ("", [""], 0, 0),
    ("k ae t s ih t", ["ae"], 5, 1),  # more errors than phones
    ("m n m m", ["n m n n m"], 2, 5),
]


def test_the_error_rate_by_hand():
    metric = ErrorRate()
    for hypothesis, references, edits, tokens in VARIANTS:
        before = metric.total.item(), metric.count.item()
        metric.update([hypothesis.split()], [[r.split() for r in references]])
        assert (metric.total.item() - before[0], metric.count.item() - before[1]) == (edits, tokens)
    assert metric.compute().item() == pytest.approx(21 / 38, rel=1e-15)
    whole = ErrorRate()
    hypotheses = [h.split() for h, *_ in VARIANTS]
    assert whole(hypotheses, [[r.split() for r in rs] for _, rs, *_ in VARIANTS]).item() == metric.compute().item()
    assert metric.higher_is_better is False


def test_whole_sequences_by_hand():
    metric = ExactMatch()
    for hypothesis, references, *_ in VARIANTS:
        metric.update([tuple(hypothesis.split())], [[r.split() for r in references]])
    assert metric.compute().item() == pytest.approx(4 / 15, rel=1e-15)
    assert metric.higher_is_better is True


@pytest.mark.parametrize("kind", [ErrorRate, ExactMatch])
def test_a_sequence_without_reference_is_refused(kind: type):
    metric = kind()
    with pytest.raises(ValueError, match=r"references\[1\] is empty"):
        metric.update([["a"], ["b"]], [[["a"]], []])
    assert metric.count == 0


def test_nats_per_unit_are_divided_once():
    one, other = NatsPerUnit(), NatsPerUnit()
    one.update(torch.tensor([4.0, 3.0]), torch.tensor([2, 0]))
    other.update(torch.tensor([8.0]), torch.tensor([7]))
    other.update(torch.empty(0), torch.empty(0, dtype=torch.long))
    one.merge_state(other)
    assert one.compute().item() == pytest.approx(15 / 9, rel=1e-15)


def test_the_examples_of_the_docstrings():
    result = doctest.testmod(metrics, extraglobs={"torch": torch, "math": math})
    assert result.attempted >= 21
    assert result.failed == 0
