import pytest

from lit_effattn.datamodules import CopyTask
from lit_effattn.datamodules.common.tokens import IGNORE
from tests.datamodules.synthetic.test_base import batches


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
    assert CopyTask(9, min_len=7).words == (3, 3)


def test_words_of_one_length_need_no_padding():
    data = CopyTask(max_len=128, min_len=128, batch_size=8, n_val=8)
    (batch,) = batches(data, "val")
    assert batch.inputs.shape == (8, 127)
    assert batch.lengths.tolist() == [127] * 8
