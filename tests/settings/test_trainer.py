"""`Trainer.generate`, which gets what the command has parsed; the models are not trained."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lit_effattn import Transformer
from lit_effattn.attention import LinearAttention
from lit_effattn.checkpoints.loading import OtherModelError
from lit_effattn.datamodules import PixelSequences
from lit_effattn.datamodules.text.tokenizers import CharacterTokenizer, WordTokenizer
from lit_effattn.nn.adaptive import AdaptiveEmbedding, AdaptiveHead
from lit_effattn.settings.trainer import Trainer
from lit_effattn.tasks import LanguageModel, PixelModel, samples

N_DIMS = 64


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def trainer() -> Trainer:
    return Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, default_root_dir="run")


def backbone() -> Transformer:
    torch.manual_seed(0)
    return Transformer(16, 2, 2, attention=LinearAttention)


def digits() -> PixelModel:
    return PixelModel(backbone(), (8, 8, 1), 17).eval()


def writer(tokenizer: Any = None, **options: Any) -> LanguageModel:
    tokenizer = tokenizer or CharacterTokenizer("abcdefghà ")
    return LanguageModel(backbone(), tokenizer.n_tokens, tokenizer=tokenizer.to_json(), embedding_std=1.0, **options)


def test_images_go_on_from_a_saved_state():
    def drawn(output: str, **options: Any) -> np.ndarray:
        trainer().generate(model, PixelSequences("digits"), seed=2, output=output, **options)
        return np.load(f"{output}/samples.npy").reshape(3, 64)

    model = digits()
    whole = drawn("whole", n=3)
    half = drawn("half", n=3, n_tokens=30, save_state="s.state")
    more = drawn("more", state="s.state", n_tokens=2)
    for levels, n in ((half, 30), (more, 32)):
        assert np.array_equal(levels[:, :n], whole[:, :n])
        assert (levels[:, n:] == -1).all()
    assert np.array_equal(drawn("rest", state="s.state"), whole)
    at_once = drawn("at_once", n=3, complete=0.25)
    drawn("begun", n=3, complete=0.25, n_tokens=7, save_state="s.state")
    assert np.array_equal(drawn("completed", state="s.state"), at_once)


def test_without_a_number_as_many_images_are_completed_as_there_are(monkeypatch):
    monkeypatch.setattr(samples, "N_IMAGES", 200)
    trainer().generate(digits(), PixelSequences("digits"), complete=0.05, output="out")
    assert len(np.load("out/samples.npy")) == 180


def test_images_that_cannot_be_drawn():
    model, data = digits(), PixelSequences("digits")
    Path("other.state").write_text("x")
    trainer().generate(model, n=3, n_tokens=55, save_state="s.state")
    options: dict[str, Any]
    for options, words in (
        ({"n": 0}, "--n 0: draw at least one sample"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"beam": 2}, "--beam 2: PixelModel has no such option"),
        ({"complete": 1.0}, "--complete 1.0: the fraction to erase"),
        ({"complete": 0.5, "n": 181}, "--n 181: there are only 180 test images"),
        ({"output": "run"}, "--output run exists and is not an empty folder"),
        ({"n_tokens": 65}, "--n_tokens 65 must be at most 64"),
        ({"n_tokens": 0}, "--n_tokens 0 must be at least 1"),
        ({"save_state": "t.state"}, "whole images can't go on; give --n_tokens below 64"),
        ({"n_tokens": 1, "save_state": "other.state"}, "other.state exists and is not a saved state"),
        ({"state": "other.state"}, "other.state can't be read as a state"),
        ({"state": "s.state", "n": 2}, "--n 2: s.state has 3 samples; leave --n out"),
        ({"state": "s.state", "complete": 0.5}, "--state and --complete were both given"),
        ({"state": "s.state", "n_tokens": 10}, "--n_tokens 10 must be at most 9"),
    ):
        with pytest.raises((ValueError, OSError), match=words):
            trainer().generate(model, data, **options)
    assert len([*Path("run/generated").iterdir()]) == 1


def test_a_checkpoint_of_another_model_is_refused():
    saved, other = trainer(), PixelModel(Transformer(16, 2, 3, attention=LinearAttention), (8, 8, 1), 17)
    saved.strategy.connect(other)
    saved.save_checkpoint("other.ckpt")
    with pytest.raises(OtherModelError, match=r"blocks\.2\.attention.*absent here"):
        trainer().generate(digits(), n=1, ckpt_path="other.ckpt")


def test_a_prompt_may_be_a_file():
    Path("begin.txt").write_text("bad à", encoding="utf-8")
    trainer().generate(writer(), prompt_file="begin.txt", n_tokens=5, output="out")
    assert Path("out/samples.txt").read_text(encoding="utf-8").startswith("--- 0\nbad à")


def test_the_likeliest_is_the_likeliest_however_it_is_asked_for():
    model, texts = writer(), set()
    for i, how in enumerate(({"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-9})):
        trainer().generate(model, prompt="a b", n_tokens=15, output=f"out{i}", **how)  # type: ignore[arg-type]
        texts.add(Path(f"out{i}/samples.txt").read_text(encoding="utf-8"))
    assert len(texts) == 1
    trainer().generate(model, prompt="a b", n_tokens=15, output="drawn")
    assert Path("drawn/samples.txt").read_text(encoding="utf-8") not in texts


def test_adaptive_embedding_and_softmax_come_from_the_checkpoint_alone():
    bands = {"cutoffs": [6, 12], "div_value": 2}
    words = WordTokenizer(["<unk>", "<eos>", *(f"w{i}" for i in range(20))])
    parts = {"embedding": partial(AdaptiveEmbedding, **bands), "head": partial(AdaptiveHead, **bands)}
    model = writer(words, tie=True, **parts)
    saving = trainer()
    saving.strategy.connect(model)
    saving.save_checkpoint("model.ckpt")
    again = LanguageModel.load_from_checkpoint("model.ckpt")
    assert type(again.embedding) is AdaptiveEmbedding
    assert type(again.head) is AdaptiveHead
    for i, each in enumerate((model, again)):
        trainer().generate(each, prompt="w3 w13", n_tokens=4, output=f"out{i}")
    first, second = (Path(f"out{i}/samples.txt").read_text() for i in range(2))
    assert first == second
