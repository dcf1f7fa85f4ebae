from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from lit_effattn import EncoderDecoder, Transformer
from lit_effattn.attention import LinearAttention, LinearCrossAttention
from lit_effattn.datamodules.text.tokenizers import CharacterTokenizer, WordTokenizer
from lit_effattn.tasks import SequenceToSequence, TrainedPronouncer, pronouncer


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    """A model that knows small letters and whose outputs are not all alike."""
    torch.manual_seed(1)
    backbone = EncoderDecoder(
        Transformer(8, 2, 2, attention=LinearAttention, causal=False, init="pytorch"),
        Transformer(8, 2, 1, attention=LinearAttention, cross_attention=LinearCrossAttention, init="pytorch"),
    )
    letters, phones = CharacterTokenizer("abcdef"), WordTokenizer(["AA", "B", "K", "<unk>"])
    model = SequenceToSequence(
        backbone, letters.n_tokens, phones.n_tokens, letters.to_json(), phones.to_json(), metrics=[]
    )
    with torch.no_grad():
        model.head.proj.weight.mul_(6)
        model.head.proj.bias[phones.start] -= 4
    trainer = pl.Trainer(default_root_dir=tmp_path, accelerator="cpu", logger=False, enable_progress_bar=False)
    trainer.strategy.connect(model)
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    return str(tmp_path / "model.ckpt")


def test_each_word_has_the_phones_of_the_best_output(checkpoint: str, monkeypatch: pytest.MonkeyPatch):
    """Whatever the words beside it. Capitals are read as small letters, words of other letters have no phones."""
    monkeypatch.setattr(pronouncer, "_WORDS_AT_ONCE", 2)
    words = ["FADE", "bad", "x1", "DEAFBEAD", "A", "face"]
    found = TrainedPronouncer(checkpoint).pronounce(words)
    model = SequenceToSequence.load_from_checkpoint(checkpoint).eval()
    expected = {}
    for word in ("FADE", "bad", "DEAFBEAD", "A", "face"):
        text = model.texts(model.search(model.encode(word.lower())[None]))[0][0]
        if text:
            expected[word] = tuple(text.split())
    assert len(set(expected.values())) > 1
    assert found == expected


def test_a_checkpoint_that_is_not_there_is_named():
    with pytest.raises(FileNotFoundError, match="nowhere"):
        TrainedPronouncer("nowhere.ckpt").pronounce(["a"])
