import itertools

import numpy as np
import pytest
import torch

from lit_effattn.datamodules import LengthBatches
from lit_effattn.datamodules.common.length_batches import _buckets
from tests.support.cases import pairwise


def lengths(n, seed=0, most=400):
    return np.random.default_rng(seed).integers(1, most + 1, n)


def batches_of(of, size=1000, *, most=64, world=1, rank=0, shuffle=True, seed=0, epoch=0, packed=False):
    made = LengthBatches(
        of, size, max_samples=most, num_replicas=world, rank=rank, shuffle=shuffle, seed=seed, packed=packed
    )
    made.set_epoch(epoch)
    assert len(made) == len(list(made))
    return list(made)


def ranks(of, size=1000, *, world, **options):
    return [batches_of(of, size, world=world, rank=rank, **options) for rank in range(world)]


def flat(nested):
    return [i for batches in nested for batch in batches for i in batch]


CASES = pairwise(
    {"n": (1, 2, 3, 7, 50, 333), "world": (1, 2, 3, 4), "size": (1, 400, 1000, 100_000), "most": (1, 5, 64)}
)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_sample_comes_once_an_epoch_in_equally_many_batches_of_at_most_the_size(shuffle, packed):
    for n, world, size, most in map(dict.values, CASES):
        if n < world:
            continue
        of = lengths(n, seed=n)
        counts = set()
        for epoch in range(2):
            shards = ranks(of, size, most=most, world=world, shuffle=shuffle, epoch=epoch, packed=packed)
            assert sorted(i - n * epoch * shuffle for i in flat(shards)) == list(range(n))
            assert min(len(batch) for batches in shards for batch in batches) >= 1
            counts |= {len(batches) for batches in shards}
            made = [of[np.array(batch) % n] for batches in shards for batch in batches]
            positions = [batch.sum() if packed else len(batch) * batch.max() for batch in made]
            larger = sum(
                len(batch) > 1 and (size_ > size or len(batch) > most)
                for batch, size_ in zip(made, positions, strict=True)
            )
            assert larger == 0 if world == 1 else larger < world
        assert len(counts) == 1  # on every process, in every epoch


def test_batches_are_of_like_length_and_well_filled():
    of = lengths(5000, most=800)
    batches = batches_of(of, 8000)
    padded = sum(len(batch) * of[batch].max() for batch in batches)
    assert of.sum() / padded > 0.9
    assert padded / len(batches) / 8000 > 0.85  # of what fits


def test_packed_batches_are_filled_with_all_lengths():
    of = np.random.default_rng(0).lognormal(4, 1, 5000).astype(int).clip(1, 2000)
    sums, steps = [], []
    for epoch in range(2):
        batches = batches_of(of, 8000, most=9999, epoch=epoch, packed=True)
        sums.append([of[np.array(batch) % 5000].sum() for batch in batches])
        steps.append({tuple(sorted(i % 5000 for i in batch)) for batch in batches})
        assert np.median([np.ptp(of[np.array(batch) % 5000]) for batch in batches]) > of.mean()
    assert np.mean(sums) > 0.9 * 8000
    assert not steps[0] & steps[1]  # who is with whom is another in each epoch


def test_steps_do_not_depend_on_the_number_of_processes():
    of = np.random.default_rng(0).choice([25, 50, 100], 500)
    one = batches_of(of, 1600, most=32)
    four = ranks(of, 400, most=8, world=4)
    assert [set(batch) for batch in one] == [set(flat([shard])) for shard in zip(*four, strict=True)]
    sizes = [[len(batch) for batch in step] for step in zip(*four, strict=True)]
    assert all(max(step) - min(step) <= 1 for step in sizes)


@pytest.mark.parametrize("packed", [False, True])
def test_the_division_is_that_of_the_steps(packed):
    def division(size, world=1, rank=0):
        options = {"num_replicas": world, "rank": rank, "shuffle": True, "seed": 0, "packed": packed}
        made = LengthBatches(np.full(12, 10), size, max_samples=64, **options)
        return len(made), made.division

    assert division(40) == division(40) != division(50)
    assert division(40)[0] == division(50)[0] == 3
    assert division(20, 2) == division(20, 2, rank=1)
    assert packed or division(20, 2) == division(40)


def test_the_longest_of_a_bucket_is_at_most_a_tenth_longer():
    of = lengths(1000)
    buckets, longest = _buckets(of)
    for bucket in set(buckets):
        assert of[buckets == bucket].max() <= 1.1 * of[buckets == bucket].min()
    assert longest.tolist() == sorted((of[buckets == bucket].max() for bucket in buckets), reverse=True)


def test_order_is_a_function_of_seed_and_epoch():
    of = lengths(300)
    actual = {}
    for seed, epoch in itertools.product(range(4), range(4)):
        batches = batches_of(of, seed=seed, epoch=epoch)
        actual[seed, epoch] = tuple(tuple(i % 300 for i in batch) for batch in batches)
        assert batches == batches_of(of, seed=seed, epoch=epoch)
    assert len(set(actual.values())) == 16
    # Not only the order of the batches: who is with whom is another each time.
    assert len({frozenset(map(frozenset, batches)) for batches in actual.values()}) == 16


def test_an_epoch_is_neither_sorted_nor_always_in_the_same_order_of_lengths():
    of = lengths(1000)
    longest = [[of[np.array(batch) % 1000].max() for batch in batches_of(of, epoch=e)] for e in range(2)]
    assert longest[0] not in (sorted(longest[0]), sorted(longest[0], reverse=True), longest[1])


def test_evaluation_begins_with_the_longest():
    of = lengths(100)
    order = [i for batch in batches_of(of, shuffle=False, epoch=3) for i in batch]
    assert of[order].tolist() == sorted(of, reverse=True)


def test_global_random_state_is_left_alone():
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002  # the global one is what this is about
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    batches_of(lengths(50))
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()  # noqa: NPY002


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"max_samples": 0}, "max_samples=0"),
        ({"seed": -1}, "seed=-1"),
        ({"num_replicas": 6}, "5 samples .* 6 processes.*fewer processes"),
        ({"lengths": np.array([3, 0])}, "lengths has 0"),
    ],
)
def test_what_makes_no_sense_is_refused(options, message):
    given = {
        "lengths": lengths(5),
        "batch_size": 10,
        "max_samples": 2,
        "num_replicas": 1,
        "rank": 0,
        "shuffle": True,
        "seed": 0,
    }
    with pytest.raises(ValueError, match=message):
        LengthBatches(**(given | options))
