import itertools
import math

import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, DistributedSampler

from lit_effattn.datamodules import (
    LabelledImages,
    LabelledTexts,
    ResumableLoader,
    SequencePairs,
    ShardedBatches,
    TextStream,
)

COMBINATIONS = list(itertools.product((1, 2, 3, 7, 8, 9, 31, 64), (1, 2, 3, 8, 100), (1, 2, 3, 4)))


def sampler(
    n_samples, batch_size, *, num_replicas=1, rank=0, shuffle=True, seed=0, variants=1, drop_last=True, epoch=0
):
    made = ShardedBatches(
        n_samples,
        batch_size,
        num_replicas=num_replicas,
        rank=rank,
        shuffle=shuffle,
        seed=seed,
        variants=variants,
        drop_last=drop_last,
    )
    made.set_epoch(epoch)
    return made


def ranks(n_samples, batch_size, world, **options):
    return [list(sampler(n_samples, batch_size, num_replicas=world, rank=r, **options)) for r in range(world)]


def flat(nested):
    return [index for batches in nested for batch in batches for index in batch]


@pytest.mark.parametrize("shuffle", [False, True])
def test_evaluation_sees_every_sample_once_in_equally_many_batches(shuffle):
    for n, batch_size, world in COMBINATIONS:
        if n < world:
            continue
        shards = ranks(n, batch_size, world, shuffle=shuffle, drop_last=False)
        assert sorted(flat(shards)) == list(range(n))
        assert world > 1 or len(shards[0]) == math.ceil(n / batch_size)
        assert len({len(batches) for batches in shards}) == 1
        assert len(shards[0]) == len(sampler(n, batch_size, num_replicas=world, drop_last=False))
        for batches in shards:
            sizes = [len(batch) for batch in batches]
            assert min(sizes) >= 1
            assert max(sizes) - min(sizes) <= 1
            short_rank = math.ceil(math.ceil(n / world) / batch_size) > n // world
            assert max(sizes) <= batch_size + short_rank


def test_training_batches_are_full_disjoint_and_as_many_as_fit():
    for n, batch_size, world in COMBINATIONS:
        if n < batch_size * world:
            continue
        shards = ranks(n, batch_size, world)
        assert {len(batches) for batches in shards} == {n // (batch_size * world)}
        assert {len(batch) for batches in shards for batch in batches} == {batch_size}
        assert len(set(flat(shards))) == len(flat(shards))
        assert set(flat(shards)) <= set(range(n))
        assert len(sampler(n, batch_size, num_replicas=world)) == n // (batch_size * world)


def test_global_batches_do_not_depend_on_the_number_of_processes():
    one = ranks(50, 12, 1)[0]
    four = ranks(50, 3, 4)
    for step, batch in enumerate(one):
        assert batch == [index for shard in four for index in shard[step]]


def test_order_is_a_function_of_seed_and_epoch():
    orders = {(s, e): tuple(flat([list(sampler(30, 5, seed=s, epoch=e))])) for s in range(4) for e in range(4)}
    assert len(set(orders.values())) == 16  # neither may stand in for the other
    again = sampler(30, 5, seed=2)
    for epoch in (3, 0, 3):
        again.set_epoch(epoch)
        assert tuple(flat([list(again)])) == orders[2, epoch]


def test_global_random_state_is_neither_read_nor_moved():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = list(sampler(30, 5, variants=2))
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    assert list(sampler(30, 5, variants=2)) == first


def test_variants_are_drawn_anew_each_epoch_for_each_sample():
    n, variants = 200, 3
    drawn = []
    for epoch in range(2):
        indices = flat(ranks(n, 10, 2, variants=variants, epoch=epoch))
        assert sorted(i % n for i in indices) == list(range(n))
        assert max(indices) < n * variants
        drawn.append({i % n: i // n for i in indices})
    for draw in drawn:
        assert all(40 < list(draw.values()).count(v) < 95 for v in range(variants))
    assert drawn[0] != drawn[1]


def test_unshuffled_order_is_the_data_sets():
    made = sampler(5, 2, shuffle=False, drop_last=False)
    assert list(made) == [[0, 1], [2, 3], [4]]
    assert isinstance(made, DistributedSampler)  # which Lightning keeps


def test_too_few_samples_are_refused():
    with pytest.raises(ValueError, match=r"n_samples=7 .*2 processes.*batch_size=4.*smaller batch_size"):
        sampler(7, 4, num_replicas=2)
    with pytest.raises(ValueError, match=r"n_samples=2 .*3 processes.*fewer processes"):
        sampler(2, 4, num_replicas=3, drop_last=False)
    for options in ({"batch_size": 0}, {"batch_size": 1, "seed": -1}, {"batch_size": 1, "variants": 0}):
        name, value = list(options.items())[-1]
        with pytest.raises(ValueError, match=f"{name}={value}"):
            sampler(5, **options)


class Echo(Dataset):
    def __getitem__(self, indices):
        return torch.tensor(indices)


def loader(num_workers=0, n_samples=26, batch_size=4):
    return ResumableLoader(
        Echo(),
        batch_size=None,
        sampler=sampler(n_samples, batch_size, variants=2),
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        generator=torch.Generator(),
    )


def stop(*loaders):
    for made in loaders:
        if made.num_workers:
            made._iterator._shutdown_workers()  # as Lightning does; at garbage collection it may wait for 10 s


def epoch_of(made, epoch):
    made.sampler.set_epoch(epoch)
    return [batch.tolist() for batch in made]


@pytest.mark.parametrize(("before", "after", "taken"), [(0, 0, 1), (0, 0, 6), (2, 0, 3), (0, 2, 3)])
def test_resumes_with_the_next_batch_whatever_the_workers(before, after, taken):
    whole = [epoch_of(loader(), epoch) for epoch in range(4)]
    first = loader(before)
    assert epoch_of(first, 0) == whole[0]
    first.sampler.set_epoch(2)
    batches = iter(first)
    assert [next(batches).tolist() for _ in range(taken)] == whole[2][:taken]
    state = first.state_dict()

    second = loader(after)
    second.load_state_dict(state)
    assert second.state_dict() == state  # a checkpoint before the next batch
    assert [batch.tolist() for batch in second] == whole[2][taken:]
    assert [batch.tolist() for batch in second] == whole[3]  # the next one follows without Lightning
    assert epoch_of(second, 2) == whole[2]
    stop(first, second)


def test_state_of_a_finished_epoch_is_void_in_the_next():
    first = loader()
    epoch_of(first, 0)
    first.sampler.set_epoch(1)  # Lightning may save between the epochs
    for resumed_at in (0, 1):
        second = loader()
        second.load_state_dict(first.state_dict())
        expected = [] if resumed_at == 0 else epoch_of(loader(), 1)
        assert epoch_of(second, resumed_at) == expected


def test_a_loop_of_ones_own_goes_on_with_the_epoch_after_a_whole_one():
    first, second = loader(), loader()
    epochs = [[batch.tolist() for batch in first] for _ in range(2)]
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    expected = epoch_of(loader(), 2)
    assert [batch.tolist() for batch in second] == expected
    assert expected not in epochs


def test_an_epoch_cut_short_is_void_in_the_next():
    first = loader()
    next(iter(first))  # limit_train_batches=1
    second = loader()
    second.load_state_dict(first.state_dict())
    assert epoch_of(second, 1) == epoch_of(loader(), 1)


def test_resuming_with_other_batches_is_refused():
    first = loader()
    next(iter(first))
    second = loader(batch_size=8)
    second.load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match=r"after 1 of 6 batches.* has 3 now.*batch_size"):
        next(iter(second))
    first, second = loader(batch_size=12), loader(batch_size=13)  # 2 batches of 26 items
    next(iter(first))
    second.load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match=r"after 1 of 2 batches.* has 2 now, of other items.*batch_size"):
        next(iter(second))
    first, second = loader(), loader()
    second.sampler.seed = 8
    with pytest.raises(ValueError, match=r"seed=8, but the interrupted run had 0: .* resume with the seed"):
        second.load_state_dict(first.state_dict())


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (TextStream, {"source": "files", "root": "train.tsv", "segment_len": 4, "batch_size": 2, "cache": "cache"}),
        (SequencePairs, {"corpus": "files", "root": ".", "batch_tokens": 50, "cache": "cache"}),
        (LabelledTexts, {"root": ".", "batch_tokens": 50}),
        (LabelledImages, {"dataset": "folder", "root": "images", "image_size": 8, "batch_size": 2}),
    ],
)
def test_resuming_with_other_data_is_refused(kind, options, tmp_path, monkeypatch):
    """The numbers of items and batches stay the same."""
    monkeypatch.chdir(tmp_path)

    def loader_after(change):
        for split in ("train", "val", "test"):
            texts = [f"text {i}\t{'ab'[i % 2]}\n" for i in range(9)]
            (tmp_path / f"{split}.tsv").write_text("".join([*texts, "taxt 9\tb\n" if change else "text 9\tb\n"]))
        for i in range(20):
            path = tmp_path / "images" / "ab"[i % 2] / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (80 if change else 8, 8), i).save(path)
        data = kind(**options)
        data.prepare_data()
        data.setup("fit")
        loader = data.train_dataloader()
        loader.state_dict()
        return loader

    first = loader_after(change=False)
    next(iter(first))
    loader_after(change=False).load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match=r"trained on other data: digest=\w+ and not \w+; .*--init_weights"):
        loader_after(change=True).load_state_dict(first.state_dict())


def test_iterating_leaves_the_global_random_state_alone():
    made = loader(num_workers=1)
    before = torch.get_rng_state()
    assert len(epoch_of(made, 0)) == len(made) == 6
    assert torch.equal(before, torch.get_rng_state())
    stop(made)
