"""Behaviour that all synthetic tasks share: how sequences are drawn, loaded and checked."""

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from lit_effattn.datamodules import AssociativeRecall, CopyTask, DialogueTask, RetrievalTask, SortingTask, StateTracking

SMALL = {"batch_size": 4, "n_train": 16, "n_val": 16, "n_test": 16}
FACTS = {"n_facts": 9, "n_near": 2, "n_far": 2, "n_keys": 40}
TASKS: dict[str, Callable[..., Any]] = {
    "recall": lambda **o: AssociativeRecall(12, n_pairs=3, n_keys=9, n_values=9, **{"test_lengths": [12]} | o),
    "copy": lambda **o: CopyTask(32, min_len=32, **o),
    "dialogue": lambda **o: DialogueTask(20, **{"segment_len": None} | FACTS | o),
    "retrieval": lambda **o: RetrievalTask(40, n_needles=3, **o),
    "sorting": lambda **o: SortingTask(64, **{"segment_len": None} | o),
    "tracking": lambda **o: StateTracking("S3", length=12, **{"test_lengths": [12]} | o),
}
ALL = pytest.mark.parametrize("make", TASKS.values(), ids=TASKS)


def batches(data: Any, split: str, epoch: int = 0) -> list:
    loader = getattr(data, f"{split}_dataloader")()
    loader.sampler.set_epoch(epoch)
    return list(loader)


def drawn(data: Any, split: str, epoch: int = 0) -> set[tuple[int, ...]]:
    return {tuple(row.tolist()) for batch in batches(data, split, epoch) for row in batch[0]}


@ALL
def test_epochs_and_seeds_draw_new_sequences_and_splits_share_none(make):
    data, other = make(**SMALL), make(**SMALL, seed=1)
    assert drawn(data, "train") == drawn(data, "train")
    groups = [drawn(data, "train"), drawn(data, "train", 1), drawn(other, "train"), drawn(data, "val")]
    groups.append(drawn(data, "test"))
    assert len(set().union(*groups)) == 5 * 16
    assert drawn(data, "val") == drawn(other, "val")
    index = next(iter(data.val_dataloader().sampler))
    seeds = [make(**SMALL, seed=seed).sequences("train")[index][0] for seed in range(4)]
    same_index = [*seeds, data.sequences("val")[index][0], data.sequences("test")[index][0]]
    assert len({tuple(t.flatten().tolist()) for t in same_index}) == 6


def test_evaluation_reads_every_sequence_in_order():
    data = CopyTask(8, min_len=8, batch_size=4, n_test=6)
    sequences = data.sequences("test")[[0, 1, 2, 3, 4, 5]][0]
    for epoch in range(2):
        assert torch.equal(torch.cat([batch[0] for batch in batches(data, "test", epoch)]), sequences)


@ALL
def test_workers_can_have_the_sequences(make):
    data = make(**SMALL)
    sequences, item = data.sequences("val"), next(iter(data.val_dataloader().sampler))
    assert torch.equal(pickle.loads(pickle.dumps(sequences))[item][0], sequences[item][0])


def test_a_run_of_other_sequences_is_not_resumed():
    loader = CopyTask(8, batch_size=2, n_train=8).train_dataloader()
    next(iter(loader))
    CopyTask(8, batch_size=2, n_train=8, n_val=3).train_dataloader().load_state_dict(loader.state_dict())
    for options, words in (
        ({"max_len": 20}, r"words=\(1, 3\) and not \(1, 9\)"),
        ({"max_len": 8, "seed": 1}, "stream=3 and not 4"),
        ({"max_len": 8, "n_symbols": 3}, "n_symbols=10 and not 3"),
    ):
        other = CopyTask(**options, batch_size=2, n_train=8).train_dataloader()
        with pytest.raises(ValueError, match=f"trained on other data: {words}; resume with the same data"):
            other.load_state_dict(loader.state_dict())
    recall = AssociativeRecall(16, n_pairs=2, batch_size=2, n_train=8).train_dataloader()
    with pytest.raises(ValueError, match=r"trained on other data: .*lengths=None and not"):
        recall.load_state_dict(loader.state_dict())


def test_the_data_tell_the_model_the_size_of_the_vocabulary():
    for data, size in ((CopyTask(n_symbols=5), 6), (SortingTask(n_types=5), 6)):
        assert (data.vocab_size, data.unit, data.tokenizer) == (size, "token", None)
    pairs = RetrievalTask(n_symbols=5, n_fillers=2)
    assert (pairs.source_vocab_size, pairs.target_vocab_size, pairs.unit) == (8, 6, "token")
    assert pairs.source_tokenizer is pairs.target_tokenizer is None


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (
            CopyTask,
            {
                "batch_size": 0,
                "eval_batch_size": 0,
                "n_train": 0,
                "n_val": 0,
                "n_test": 0,
                "seed": -1,
                "num_workers": -1,
            }
            | {"max_len": 3, "min_len": 3, "n_symbols": 1},
        ),
        (CopyTask, {"min_len": 200}),
        (partial(CopyTask, 5), {"min_len": 5}),
        (AssociativeRecall, {"length": 31, "n_pairs": 0, "n_keys": 7, "n_values": 1, "power": 0.0}),
        (DialogueTask, {"n_keys": 4, "n_far": 0, "n_near": -1, "segment_len": 0, "distance": 0, "n_facts": 3}),
        (RetrievalTask, {"length": 3, "n_needles": 0, "n_symbols": 0, "n_fillers": 0}),
        (SortingTask, {"length": 0, "n_types": 1, "segment_len": 0}),
    ],
)
def test_wrong_options_are_named(kind: Callable[..., Any], options: dict[str, float]):
    for option, value in options.items():
        with pytest.raises(ValueError, match=f"^{option}={value} must be"):
            kind(**{option: value})
