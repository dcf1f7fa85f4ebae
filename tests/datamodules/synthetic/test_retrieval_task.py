import pytest
import torch

from lit_effattn import EncoderDecoder, Transformer
from lit_effattn.attention import LinearAttention, LinearCrossAttention
from lit_effattn.datamodules import RetrievalTask
from lit_effattn.tasks import SequenceToSequence
from tests.callbacks.tiny import trainer
from tests.datamodules.synthetic.test_base import batches

SMALL = {"n_needles": 3, "n_symbols": 5, "n_fillers": 2, "batch_size": 4, "n_train": 16, "n_val": 16, "n_test": 16}


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_targets_list_the_needles_of_the_source(split: str):
    data = RetrievalTask(30, **SMALL)
    found, seen = batches(data, split), []
    for batch in found:
        assert batch.source.shape == (4, 31)
        assert batch.source_lengths.tolist() == [31] * 4
        assert batch.lengths.tolist() == [4] * 4
        for row in range(4):
            source, needles = batch.source[row].tolist(), [t for t in batch.source[row].tolist() if t < 5]
            assert len(needles) == 3
            assert all(5 <= t < 7 for t in source[:-1] if t not in needles)
            assert batch.targets[row].tolist() == [*needles, 5]
            assert batch.inputs[row].tolist() == [5, *needles]
            assert source[-1] == 7
            assert batch.sources[row].split() == [str(t) for t in source[:-1]]
            assert batch.references[row] == [" ".join(map(str, needles))]
        seen += batch.indices.tolist()
    if split != "train":
        assert seen == list(range(16))


def test_needles_are_anywhere_and_any_symbol():
    data = RetrievalTask(6, **{**SMALL, "n_test": 3000, "batch_size": 3000})
    (batch,) = batches(data, "test")
    where = (batch.source[:, :-1] < 5).double().mean(0)
    assert where.tolist() == pytest.approx([0.5] * 6, abs=0.05)  # 3 of 6
    for t in range(3):
        share = batch.targets[:, t].bincount(minlength=6) / 3000
        assert share.tolist() == pytest.approx([0.2] * 5 + [0], abs=0.04)
    fillers = batch.source[batch.source >= 5].bincount()[5:7]
    assert (fillers / fillers.sum()).tolist() == pytest.approx([0.5, 0.5], abs=0.03)


def test_a_source_may_be_all_needles():
    data = RetrievalTask(3, **SMALL)
    made = list(batches(data, "val"))
    assert made
    assert all(torch.equal(b.source[:, :-1], b.targets[:, :-1]) for b in made)


def test_a_model_is_trained_and_scored_without_tokenizers(tmp_path):
    data = RetrievalTask(8, **SMALL)
    encoder = Transformer(8, 2, 1, attention=LinearAttention, causal=False)
    decoder = Transformer(8, 2, 1, attention=LinearAttention, cross_attention=LinearCrossAttention)
    sizes = data.source_vocab_size, data.target_vocab_size, data.source_tokenizer, data.target_tokenizer
    model = SequenceToSequence(EncoderDecoder(encoder, decoder), *sizes, beam=1, max_output_len=5)
    run = trainer(tmp_path, [], max_epochs=1)
    run.fit(model, data)
    (result,) = run.test(model, data, verbose=False)
    assert result["test/sequences"] == 16
    assert 0 <= result["test/exact_match"] <= 1
    assert 0 < result["test/error_rate"] <= 5 / 3
