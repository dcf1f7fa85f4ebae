import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

from lit_effattn import LSTM, SpeechRecognizer, Transformer
from lit_effattn.attention import (
    LinearAttention,
    LSHAttention,
    PerformerAttention,
    ShawAttention,
    SoftmaxAttention,
    SparseAttention,
    TransformerXLAttention,
)
from lit_effattn.callbacks import FeatureRedraw
from lit_effattn.datamodules.speech.utterances import SpeechBatch
from lit_effattn.nn.front_ends import ConvSubsampling, FrameStacking
from lit_effattn.tasks.ctc import Decoder, ctc_nll
from tests.callbacks.tiny import trainer

PHONES = ("aa", "b", "sil", "ch", "q")
FOLDED = ("ah", "b", "", "sh", "")
MELS = 6


def transformer(attention: Any, causal: bool = False, **options: Any) -> Transformer:
    return Transformer(8, 2, 2, attention=attention, causal=causal, init="pytorch", **options)


BACKBONES = {
    "softmax": lambda: transformer(SoftmaxAttention),
    "shaw": lambda: transformer(partial(ShawAttention, max_distance=3), positions=None),
    "xl": lambda: transformer(TransformerXLAttention, positions=None),
    "linear": lambda: transformer(LinearAttention),
    "performer": lambda: transformer(PerformerAttention),
    "lsh": lambda: transformer(partial(LSHAttention, n_hashes=2, n_buckets=4, chunk_size=4)),
    "sparse": lambda: transformer(partial(SparseAttention, stride=3)),
    "bilstm": lambda: LSTM(8, 2, causal=False),
    "causal linear": lambda: transformer(partial(LinearAttention, chunk_size=4), causal=True),
    "lstm": lambda: LSTM(8, 2),
}
STACKING = partial(FrameStacking, factor=3)
FRONT_ENDS = {"none": None, "stacking": STACKING, "convolutions": partial(ConvSubsampling, factor=4, channels=2)}


def model(backbone: str = "linear", phones: tuple[str, ...] = PHONES, **options: Any) -> SpeechRecognizer:
    """Return a small model far from uniform, always the same, in float64 and without dropout."""
    torch.manual_seed(5)
    made = SpeechRecognizer(BACKBONES[backbone](), MELS, phones, **options)
    with torch.no_grad():
        made.output.weight.mul_(4)
    return made.double().eval()


def speech(
    lengths: tuple[int, ...] = (23, 12, 17), phone_lengths: tuple[int, ...] = (3, 4, 2), seed: int = 0
) -> SpeechBatch:
    """Return utterances of several lengths."""
    generator = torch.Generator().manual_seed(seed)
    b, t, u = len(lengths), max(lengths), max(phone_lengths)
    n, m = torch.tensor(lengths), torch.tensor(phone_lengths)
    features = torch.randn(b, t, MELS, generator=generator, dtype=torch.float64)
    features[torch.arange(t) >= n[:, None]] = 0
    phones = torch.randint(1, len(PHONES) + 1, (b, u), generator=generator)
    phones[torch.arange(u) >= m[:, None]] = 0
    return SpeechBatch(features, n, phones, m, [f"utterance-{i}" for i in range(b)])


def row(batch: SpeechBatch, i: int) -> SpeechBatch:
    """Return one utterance by itself, without padding."""
    n, m = int(batch.lengths[i]), int(batch.phone_lengths[i])
    rows = slice(i, i + 1)
    return SpeechBatch(
        batch.features[rows, :n], batch.lengths[rows], batch.phones[rows, :m], batch.phone_lengths[rows], [batch.ids[i]]
    )


class Fixed(Decoder):
    """Says what it was told to, in turn."""

    def __init__(self, *labels: list[int]) -> None:
        self.labels = list(labels)

    def __call__(self, log_probs: Tensor, lengths: Tensor, phones: tuple[str, ...]) -> list[list[int]]:
        return [self.labels.pop(0) for _ in lengths]


def test_padded_equals_alone():
    """An utterance's probabilities, and so its loss, do not depend on its batch-mates."""
    batch = speech((23, 5, 12, 1, 17), (3, 1, 2, 0, 2))
    noise = torch.where(batch.features == 0, torch.nan, batch.features)
    for backbone, front_end in [
        *((name, "convolutions") for name in BACKBONES),
        ("linear", "none"),
        ("lsh", "stacking"),
    ]:
        made = model(backbone, front_end=FRONT_ENDS[front_end])
        with torch.no_grad():
            together, lengths = made(batch._replace(features=noise))
            for i in range(5):
                alone, (n,) = made(row(batch, i))
                assert n == lengths[i] == alone.size(1) == math.ceil(batch.lengths[i] / made.front_end.factor)
                torch.testing.assert_close(together[i, :n], alone[0])


def looking_ahead(backbone: str, **options: Any) -> SpeechRecognizer:
    """Return a model that looks 3 frames ahead, with weights as after training."""
    made = model(backbone, look_ahead=3, **options)
    torch.nn.init.normal_(made.backbone.convolution.weight)
    return made


@pytest.mark.parametrize("backbone", ["causal linear", "lstm"])
def test_look_ahead(backbone: str):
    """Of 17 frames, one feature vector each: the output of frame 5 sees frame 8, not frame 9; the last sees the end.

    A new model does not look ahead. The weights are those of Amodei et al. 2015, section 3.7, over the frames and three
    of zeros; each row as if it were alone.
    """
    batch, made = row(speech((17, 1, 1)), 0), model(backbone, look_ahead=3)
    with torch.no_grad():
        expected = made.log_probs(made.backbone.module(made.front_end(batch.features, batch.lengths)[0])[0])
        torch.testing.assert_close(made(batch)[0], expected)
        made = looking_ahead(backbone)
        before = made(batch)[0][0]
        for changed in (8, 9, 16):
            features = batch.features.clone()
            features[:, changed] += 1
            moved = (made(batch._replace(features=features))[0][0] - before).abs().amax(-1)  # (17,)
            assert (moved[: changed - 3] == 0).all()
            assert (moved[changed - 3 :] > 1e-4).all()
        batch, made = speech((23, 5, 12, 1, 17), (3, 1, 2, 0, 2)), looking_ahead(backbone, front_end=STACKING)
        w = made.backbone.convolution.weight.flip(0)  # (4, E), that of the frame itself first
        log_probs, lengths = made(batch)
        for i, n in enumerate([8, 2, 4, 1, 6]):
            x, _ = made.front_end(row(batch, i).features, batch.lengths[i : i + 1])
            h = made.backbone.module(torch.cat([x, x.new_zeros(1, 3, 8)], 1))[0][0]
            r = torch.stack([sum(w[j] * h[t + j] for j in range(4)) for t in range(n)])
            assert lengths[i] == n
            torch.testing.assert_close(log_probs[i, :n], made.log_probs(r))


def test_training_minimises_nats_a_phone():
    """Label smoothing mixes in uniform alignments."""
    made, batch = model().train(), speech()
    plain = made.training_step(batch).item()
    assert plain == pytest.approx(sum(made_loss(made, row(batch, i)) for i in range(3)) / 9)
    made = model(label_smoothing=0.3).train()
    log_probs, lengths = made(batch)
    uniform = -sum(log_probs[i, :n].sum().item() for i, n in enumerate(lengths.tolist())) / (len(PHONES) + 1)
    assert made.training_step(batch).item() == pytest.approx(0.7 * plain + 0.3 * uniform / 9)


def made_loss(made: SpeechRecognizer, utterance: SpeechBatch) -> float:
    """−ln p of one utterance, with torch's own loss for one sequence."""
    log_probs, lengths = made(utterance)
    loss = torch.nn.functional.ctc_loss(
        log_probs[0], utterance.phones[0], lengths, utterance.phone_lengths, reduction="sum"
    )
    return loss.item()


def test_impossible_utterances_have_no_loss():
    """The middle one's 12 frames become 3, which have no room for its 4 phones."""
    batch = speech()
    others = SpeechBatch(*(field[[0, 2]] for field in batch[:4]), ids=["0", "2"])
    for label_smoothing in (0.0, 0.1):
        made = model(front_end=FRONT_ENDS["convolutions"], label_smoothing=label_smoothing).train()
        loss, expected = made.training_step(batch), made.training_step(others)
        assert loss.item() == pytest.approx(expected.item())
        found, wanted = (torch.autograd.grad(x, list(made.parameters())) for x in (loss, expected))
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b)
        nothing = made.training_step(row(batch, 1))
        assert nothing.item() == 0
        gradients = torch.autograd.grad(nothing, list(made.parameters()))  # of all parameters, for DDP waits for them
        assert all((g == 0).all() for g in gradients)


def test_the_loss_is_float32_under_autocast():
    made = model().float()
    batch = speech()
    batch = batch._replace(features=batch.features.float())
    exact, _ = made(batch)
    with torch.autocast("cpu", torch.bfloat16):
        log_probs, lengths = made(batch)
        nats, _ = ctc_nll(log_probs, lengths, batch.phones, batch.phone_lengths)
    assert log_probs.dtype == nats.dtype == torch.float32
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(3, 23))
    torch.testing.assert_close(log_probs, exact, atol=0.2, rtol=0.05)


def test_the_scores_by_hand(tmp_path: Path):
    """Labels are 1 aa → ah, 2 b, 3 sil → nothing, 4 ch → sh, 5 q → nothing."""
    first, second = speech((9, 6, 7), (4, 2, 0)), speech((2, 8), (3, 3), seed=1)
    first.phones[:] = torch.tensor([[1, 2, 3, 4], [2, 5, 0, 0], [0, 0, 0, 0]])
    second.phones[:] = torch.tensor([[1, 1, 2], [4, 5, 1]])
    labels = (
        [1, 5, 2, 4, 4],  # ah b sh sh for ah b sh: 1 edit of 3
        [3],  # nothing for b: 1 of 1
        [1],  # ah for nothing: 1 of 0
        [1, 2, 1],  # ah b ah for ah ah b: 2 of 3; it is impossible, too
        [4, 1],  # sh ah for sh ah: 0 of 2
    )
    made = model(folded=FOLDED, decoder=Fixed(*labels))
    nats = [made_loss(made, row(batch, i)) for batch, i in ((first, 0), (first, 1), (first, 2), (second, 1))]
    (results,) = trainer(tmp_path, []).test(made, DataLoader([first, second], batch_size=None), verbose=False)
    assert results["test/per"] == pytest.approx(5 / 9)
    assert results["test/loss"] == pytest.approx(sum(nats) / 9)  # 4 + 2 + 0 + 3 phones, unfolded
    assert results["test/utterances"] == 5
    assert results["test/impossible"] == 1
    assert made.monitor == "val/per"


def peaks(path: list[int], sharp: float = 9.0) -> Tensor:
    """Log-probabilities (1, T, V) that are high along a path."""
    one_hot = torch.nn.functional.one_hot(torch.tensor([path]), len(PHONES) + 1)
    return (sharp * one_hot.double()).log_softmax(-1)


def test_transcripts_say_what_when_and_how_surely(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    made = model(front_end=FRONT_ENDS["stacking"], frame_seconds=0.02)
    path = [0, 2, 2, 0, 2, 4]
    log_probs = torch.cat([peaks(path), peaks([0] * 6)])
    monkeypatch.setattr(made, "forward", lambda batch: (log_probs, torch.tensor([6, 5])))
    batch = speech((17, 15), (2, 0))
    batch.phones[0] = torch.tensor([5, 1])
    message = made.write_predictions([made.predict_step(batch, 0)], tmp_path)
    first, second = (json.loads(line) for line in (tmp_path / "transcripts.jsonl").read_text().splitlines())
    sure = round(math.exp(9) / (math.exp(9) + 5), 4)
    assert first == {
        "id": "utterance-0",
        "seconds": 0.34,
        "phones": [
            {"phone": "b", "start": 0.06, "end": 0.18, "confidence": sure},
            {"phone": "b", "start": 0.24, "end": 0.3, "confidence": sure},
            {"phone": "ch", "start": 0.3, "end": 0.34, "confidence": sure},  # ends with the utterance, not with 18 / 3
        ],
        "reference": ["q", "aa"],
        "picture": "utterance_1.png",
    }
    assert second == {"id": "utterance-1", "seconds": 0.3, "phones": [], "picture": "utterance_2.png"}
    assert "transcripts of 2 utterances: " in message
    for i in (1, 2):
        with Image.open(tmp_path / f"utterance_{i}.png") as picture:
            assert picture.width > 100


def test_pictures_are_of_the_first_batch_alone(tmp_path: Path):
    """Names that are not UTF-8 stay what they are."""
    made, named = model(), speech((9, 9), (1, 1))._replace(ids=["caf\udce9.wav", "ʃ.wav"])  # é in Latin-1
    predictions = [made.predict_step(speech((9,) * 6, (1,) * 6), 0), made.predict_step(named, 1)]
    made.write_predictions(predictions, tmp_path)
    written = (tmp_path / "transcripts.jsonl").read_text(encoding="utf-8")
    names = [json.loads(line)["id"] for line in written.splitlines()]
    assert sorted(names) == sorted([*named.ids, *(f"utterance-{i}" for i in range(6))])
    assert "ʃ" in written
    assert sorted(path.name for path in tmp_path.glob("*.png")) == [f"utterance_{i}.png" for i in (1, 2, 3, 4)]


def test_bad_options_are_named():
    for backbone, options, words in [
        ("linear", {"phones": ()}, "phones is empty"),
        ("linear", {"phones": ("a", "b", "a")}, "phones names a more than once"),
        ("linear", {"folded": ("a",)}, "folded has 1 entries for 5 phones"),
        ("linear", {"frame_seconds": 0.0}, "frame_seconds=0.0"),
        ("linear", {"label_smoothing": 1.0}, "label_smoothing=1.0"),
        ("linear", {"look_ahead": 2}, "look_ahead=2 does not apply to a backbone with causal=False"),
        ("lstm", {"look_ahead": -1}, "look_ahead=-1 must be at least 0"),
    ]:
        with pytest.raises(ValueError, match=words):
            model(backbone, **options)
    batch = speech()
    with pytest.raises(ValueError, match="width 5, but the model has n_mels=6"):
        model()(batch._replace(features=batch.features[..., :5]))
    for label in (0, 6):
        phones = batch.phones.clone()
        phones[1, 3] = label
        with pytest.raises(ValueError, match=f"label {label}, but the model has 5 phones"):
            model()(batch._replace(phones=phones))


def test_a_checkpoint_builds_the_model_and_refuses_other_phones(tmp_path: Path):
    torch.manual_seed(0)
    made = SpeechRecognizer(
        BACKBONES["performer"](), MELS, PHONES, FOLDED, front_end=partial(ConvSubsampling, channels=2)
    )
    batches = DataLoader([speech()._replace(features=speech().features.float())], batch_size=None)
    fit = trainer(tmp_path, [FeatureRedraw(1)], max_epochs=1)
    fit.fit(made, batches, batches)
    assert {"train/loss", "val/per", "val/loss", "val/utterances"} <= set(fit.callback_metrics)
    fit.save_checkpoint(tmp_path / "it.ckpt")
    again = SpeechRecognizer.load_from_checkpoint(tmp_path / "it.ckpt")
    assert (again.phones, again.folded, again.front_end.factor) == (PHONES, FOLDED, 4)
    for name, t in made.state_dict().items():
        assert torch.equal(again.state_dict()[name], t), name
    other = model("performer", phones=("aa", "b", "zh", "ch", "q"), front_end=partial(ConvSubsampling, channels=2))
    with pytest.raises(ValueError, match=r"phones differ: 5: 'sil', and 5: 'zh';"):
        other.on_load_checkpoint(torch.load(tmp_path / "it.ckpt", weights_only=True))
