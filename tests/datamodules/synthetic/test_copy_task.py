import pickle

import pytest
import torch

from lit_effattn.datamodules import CopyTask
from lit_effattn.datamodules.common.tokens import IGNORE


def batches(data: CopyTask, split: str, epoch: int = 0) -> list:
    loader = getattr(data, f"{split}_dataloader")()
    loader.sampler.set_epoch(epoch)
    return list(loader)


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_every_sequence_is_a_word_twice(split: str):
    data = CopyTask(max_len=21, batch_size=16, n_train=64, n_val=40, n_test=40, n_symbols=7)
    lengths, symbols = set(), set()
    for batch in batches(data, split):
        for inputs, targets, length in zip(batch.inputs, batch.targets, batch.lengths, strict=True):
            m = (int(length) - 1) // 2
            word = inputs[1 : m + 1].tolist()
            assert inputs[:length].tolist() == [0, *word, 0, *word[:-1]]
            # The last symbol of the second word is only a target: it is the one that follows the last input.
            assert targets.tolist() == [IGNORE] * (m + 1) + word + [IGNORE] * (len(inputs) - 2 * m - 1)
            lengths.add(2 * m + 2)
            symbols |= set(word)
    assert symbols == set(range(1, 8))
    assert min(lengths) == 4
    assert max(lengths) == 20  # of 21 tokens, an even number


def test_words_of_one_length_need_no_padding():
    data = CopyTask(max_len=128, min_len=128, batch_size=8, n_val=8)
    (batch,) = batches(data, "val")
    assert batch.inputs.shape == (8, 127)
    assert batch.lengths.tolist() == [127] * 8


def test_epochs_and_seeds_draw_new_sequences_and_splits_share_none():
    data, other = CopyTask(max_len=64, n_train=64, n_val=64), CopyTask(max_len=64, n_train=64, n_val=64, seed=1)

    def drawn(data, split, epoch=0):
        return {tuple(row.tolist()) for batch in batches(data, split, epoch) for row in batch.targets if len(row) > 20}

    assert drawn(data, "train") == drawn(data, "train")
    groups = [drawn(data, "train"), drawn(data, "train", 1), drawn(other, "train"), drawn(data, "val")]
    groups.append(drawn(data, "test"))
    for i, a in enumerate(groups):
        for b in groups[:i]:
            assert len({r for r in a & b if sum(t != IGNORE for t in r) > 8}) == 0
    assert drawn(data, "val") == drawn(other, "val")


def test_what_the_model_is_told():
    data = CopyTask(n_symbols=5)
    assert (data.vocab_size, data.unit, data.tokenizer) == (6, "token", None)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_len", 3),
        ("min_len", 3),
        ("min_len", 200),
        ("n_symbols", 1),
        ("batch_size", 0),
        ("eval_batch_size", 0),
        ("n_train", 0),
        ("seed", -1),
    ],
)
def test_wrong_options_are_named(option: str, value: int):
    with pytest.raises(ValueError, match=f"{option}={value}"):
        CopyTask(**{option: value})


def test_workers_draw_the_same():
    data = CopyTask(max_len=16, batch_size=4, n_train=16, num_workers=1)
    alone = CopyTask(max_len=16, batch_size=4, n_train=16)
    for a, b in zip(batches(data, "train"), batches(alone, "train"), strict=True):
        assert torch.equal(a.inputs, b.inputs)
    assert pickle.loads(pickle.dumps(data.sequences("val")))[[3]].inputs.shape[0] == 1
