"""CTC against its definition: sums and maxima over every alignment there is."""

import copy
import math
from collections.abc import Iterable
from itertools import groupby, pairwise, product, takewhile
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lit_effattn.tasks import ctc
from lit_effattn.tasks.ctc import (
    BeamDecoder,
    Decoder,
    GreedyDecoder,
    LabelStream,
    StreamedLabel,
    align,
    ctc_nll,
    frames_needed,
)

PHONES = ("b", "a", "c")  # not in alphabetical order
V = len(PHONES) + 1


def drawn(*shape: int, seed: int = 0, spread: float = 1.5) -> Tensor:
    """Return log-probabilities (…, V) in float64."""
    generator = torch.Generator().manual_seed(seed)
    return (spread * torch.randn(*shape, V, generator=generator, dtype=torch.float64)).log_softmax(-1)


def collapsed(path: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(label for label, _ in groupby(path) if label != 0)


def by_sequence(log_probs: Tensor) -> dict[tuple[int, ...], list[tuple[float, tuple[int, ...]]]]:
    """All paths of (T, V), with ln p of each, under the labels that they stand for."""
    found: dict[tuple[int, ...], list[tuple[float, tuple[int, ...]]]] = {}
    for path in product(range(V), repeat=len(log_probs)):
        score = sum(log_probs[t, label].item() for t, label in enumerate(path))
        found.setdefault(collapsed(path), []).append((score, path))
    return found


def likelihoods(log_probs: Tensor) -> dict[tuple[int, ...], float]:
    """ln p(y|x) of every y."""
    return {y: math.log(sum(math.exp(s) for s, _ in paths)) for y, paths in by_sequence(log_probs).items()}


def padded(sequences: list[tuple[int, ...]], fill: int = 0) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([len(y) for y in sequences])
    rows = [[*y, *[fill] * (int(lengths.max()) - len(y))] for y in sequences]
    return torch.tensor(rows, dtype=torch.long).view(len(rows), -1), lengths


def test_the_loss_is_the_sum_over_all_alignments():
    """Of every sequence that five frames allow, and in a row that ends before the batch does."""
    log_probs = drawn(5)
    expected = likelihoods(log_probs)
    beyond = torch.full((2, V), math.nan, dtype=torch.float64)
    batch, lengths = torch.cat([log_probs, beyond]).expand(len(expected), -1, -1), torch.full((len(expected),), 5)
    assert () in expected
    for fill in (0, 2):
        nats, possible = ctc_nll(batch, lengths, *padded(list(expected), fill))
        assert possible.all()
        torch.testing.assert_close(nats, -torch.tensor([*expected.values()], dtype=torch.float64))
        assert sum(math.exp(-n) for n in nats.tolist()) == pytest.approx(1)


def test_it_tells_exactly_what_is_impossible():
    sequences = [y for n in range(5) for y in product(range(1, V), repeat=n)]
    for frames in (1, 2, 3, 4):
        log_probs = drawn(frames)
        there = likelihoods(log_probs)
        batch = log_probs.expand(len(sequences), -1, -1).clone().requires_grad_()
        nats, possible = ctc_nll(batch, torch.full((len(sequences),), frames), *padded(sequences))
        assert possible.tolist() == [y in there for y in sequences]
        assert nats.detach().isfinite().all()
        assert (nats[~possible] == 0).all()
        (gradient,) = torch.autograd.grad(nats.sum(), batch)
        assert gradient.isfinite().all()
        assert (gradient[~possible] == 0).all()
        assert (gradient[possible] != 0).any((1, 2)).all()


def test_no_frames_and_no_labels():
    labels = torch.tensor([[1, 1, 2, 2, 2], [1, 2, 2, 2, 2], [3, 3, 3, 3, 3], [1, 1, 1, 1, 1]])
    assert frames_needed(labels, torch.tensor([5, 2, 3, 0])).tolist() == [8, 2, 5, 0]  # repeats in the padding: none
    nats, possible = ctc_nll(drawn(2, 3), torch.tensor([0, 0]), torch.tensor([[1], [1]]), torch.tensor([0, 1]))
    assert possible.tolist() == [True, False]
    assert nats.tolist() == [0, 0]
    nats, possible = ctc_nll(
        drawn(2, 3), torch.tensor([3, 3]), torch.empty(2, 0, dtype=torch.long), torch.tensor([0, 0])
    )
    assert nats.tolist() == pytest.approx([-drawn(2, 3)[row, :, 0].sum().item() for row in range(2)])


def test_the_gradient_is_that_of_the_definition():
    torch.manual_seed(0)
    logits = torch.randn(2, 4, V, dtype=torch.float64, requires_grad=True)
    labels, label_lengths = padded([(1, 1), (3, 2)])
    lengths = torch.tensor([4, 3])
    nats, _ = ctc_nll(logits.log_softmax(-1), lengths, labels, label_lengths)
    total = torch.zeros((), dtype=torch.float64)
    for row, (y, n) in enumerate((((1, 1), 4), ((3, 2), 3))):
        p = logits[row, :n].softmax(-1)
        paths = [path for path in product(range(V), repeat=n) if collapsed(path) == y]
        total = total - torch.stack([p[torch.arange(n), list(path)].prod() for path in paths]).sum().log()
    (found,), (expected,) = (torch.autograd.grad(loss, logits) for loss in (nats.sum(), total))
    torch.testing.assert_close(found, expected)


def test_greedy_is_the_likeliest_path_collapsed():
    log_probs = drawn(20, 5)
    lengths = torch.tensor([5, 4, 3, 1, 0] * 4)
    found = GreedyDecoder()(log_probs, lengths, PHONES)
    for row, n in enumerate(lengths.tolist()):
        paths = [path for paths in by_sequence(log_probs[row, :n]).values() for path in paths]
        assert tuple(found[row]) == collapsed(max(paths)[1])


def test_the_alignment_is_the_likeliest():
    log_probs = drawn(6, seed=3).float()
    for y, paths in by_sequence(log_probs).items():
        _, path = max(paths)
        found = [0] * 6
        spans = align(log_probs, list(y))
        assert [span.token for span in spans] == list(y)
        for span in spans:
            found[span.start : span.end] = [span.token] * (span.end - span.start)
            mean = log_probs[span.start : span.end, span.token].exp().mean().item()
            assert span.score == pytest.approx(mean, abs=1e-6)
        assert tuple(found) == path


UNIGRAMS = {"a": (-0.5, -0.3), "b": (-0.6, -0.2), "c": (-0.9, -0.1), "<s>": (-99.0, -0.3), "</s>": (-4.0, 0.0)}
BIGRAMS = {("a", "b"): -0.1, ("b", "a"): -2.0, ("<s>", "c"): -0.2, ("c", "</s>"): -1.5}


@pytest.fixture
def arpa(tmp_path: Path) -> str:
    """An n-gram model of phones, log10 probabilities and back-off weights."""
    lines = ["\\data\\", f"ngram 1={len(UNIGRAMS) + 1}", f"ngram 2={len(BIGRAMS)}", "", "\\1-grams:", "-3\t<unk>"]
    lines += [f"{p}\t{word}\t{backoff}" for word, (p, backoff) in UNIGRAMS.items()]
    lines += ["", "\\2-grams:", *(f"{p}\t{' '.join(words)}" for words, p in BIGRAMS.items()), "", "\\end\\", ""]
    path = tmp_path / "phones.arpa"
    path.write_text("\n".join(lines))
    return str(path)


def language_model(y: tuple[int, ...]) -> float:
    """ln p of labels and their end."""
    words = ["<s>", *(PHONES[label - 1] for label in y), "</s>"]
    log10 = 0.0
    for before, word in pairwise(words):
        log10 += BIGRAMS.get((before, word), UNIGRAMS[before][1] + UNIGRAMS[word][0])
    return log10 * math.log(10)


def test_a_wide_beam_finds_the_likeliest_sequence(arpa: str):
    pytest.importorskip("flashlight")
    log_probs, lengths = drawn(12, 5, seed=2), torch.tensor([5, 4, 3, 5] * 3)
    for lm, lm_weight in ((None, 0.0), (arpa, 0.7)):
        decoder = BeamDecoder(2000) if lm is None else BeamDecoder(2000, lm=lm, lm_weight=lm_weight)
        found = decoder(log_probs, lengths, PHONES)
        expected = []
        for row, n in enumerate(lengths.tolist()):
            scores = {y: s + lm_weight * language_model(y) for y, s in likelihoods(log_probs[row, :n]).items()}
            expected.append(list(max(scores, key=scores.__getitem__)))
        assert found == expected
        assert found != GreedyDecoder()(log_probs, lengths, PHONES)  # else nothing was shown


def test_the_language_model_decides_by_the_phones_names(arpa: str):
    pytest.importorskip("flashlight")
    decoder = BeamDecoder(lm=arpa, lm_weight=100.0)
    log_probs = drawn(1, 4, spread=0.1)
    for phones in (PHONES, ("c", "b", "a"), PHONES):  # one decoder for one model after another
        decoder = copy.deepcopy(decoder)
        scores = {}
        for y in likelihoods(log_probs[0]):
            scores[y] = language_model(tuple(PHONES.index(phones[label - 1]) + 1 for label in y))
        (found,) = decoder(log_probs, torch.tensor([4]), phones)
        assert scores[tuple(found)] == pytest.approx(max(scores.values()))


def streamed(stream: LabelStream, log_probs: Tensor, sizes: Iterable[int]) -> list[list[StreamedLabel]]:
    """What a stream returns for pieces of these sizes, which end with the frames, and for its end."""
    pieces = [*log_probs.float().split(list(sizes)), log_probs[:0].float()]
    return [stream(piece, last=i == len(pieces) - 1) for i, piece in enumerate(pieces)]


def test_a_greedy_stream_gives_each_label_at_its_first_frame():
    path = torch.tensor([0, 2, 2, 0, 2, 1, 1, 3])
    log_probs = torch.full((8, V), 0.1).scatter(1, path[:, None], 0.7).log()
    labels = streamed(GreedyDecoder().stream(PHONES), log_probs, [2, 0, 2, 3, 1])
    rounded = [[(label, frame, round(score, 6)) for label, frame, score in piece] for piece in labels]
    assert rounded == [[(2, 1, 0.7)], [], [], [(2, 4, 0.7), (1, 5, 0.7)], [(3, 7, 0.7)], []]


def test_a_beam_stream_returns_what_all_hypotheses_share(arpa: str):
    """After each frame, the labels that the hypotheses of a search over the frames so far begin with; and the rest."""
    pytest.importorskip("flashlight")
    log_probs = drawn(60, seed=3, spread=2.5).float()
    log_probs[20:30] = torch.tensor([0.97, 0.01, 0.01, 0.01]).log()  # silence
    for beam_size, options in ((1, {}), (4, {"lm": arpa, "lm_weight": 0.7}), (20, {}), (20, {"lm": arpa})):
        decoder = BeamDecoder(beam_size, **options)
        pieces = streamed(decoder.stream(PHONES), log_probs, [1] * 60)
        search = decoder._make(PHONES)
        search.nbest = 1000
        known: list[int] = []
        for t, labels in enumerate(pieces[:-1], 1):
            hypotheses = [h.tokens.tolist() for h in search(log_probs[None, :t].contiguous(), torch.tensor([t]))[0]]
            known += [label.label for label in labels]
            shared = takewhile(lambda labels: len(set(labels)) == 1, zip(*hypotheses, strict=False))
            assert known == [labels[0] for labels in shared]
            assert all(label.score == log_probs[label.frame, label.label].exp() for label in labels)
        known += [label.label for label in pieces[-1]]
        assert [known] == decoder(log_probs[None], torch.tensor([60]), PHONES)
        frames = [label.frame for piece in pieces for label in piece]
        assert frames == sorted(set(frames))
        assert beam_size == 1 or len(known) > len(pieces[-1]) > 0  # else nothing was shown


def test_a_beam_stream_reads_many_frames_at_once():
    pytest.importorskip("flashlight")
    log_probs, decoder = drawn(1500, seed=3, spread=2.5).float(), BeamDecoder(4)
    labels = decoder.stream(PHONES)(log_probs, last=True)
    assert [[label.label for label in labels]] == decoder(log_probs[None], torch.tensor([1500]), PHONES)


def test_a_beam_stream_forgets_what_is_decided(monkeypatch: pytest.MonkeyPatch):
    """Alternatives that silence leaves open are decided after so many frames, and the search goes on."""
    pytest.importorskip("flashlight")
    monkeypatch.setattr(ctc, "UNDECIDED", 30)
    log_probs = torch.full((140, V), 1e-6)
    for first in range(0, 140, 35):
        log_probs[first : first + 2] = torch.tensor([0.02, 0.9, 0.06, 0.02])
    log_probs[:, 0] = 1 - log_probs[:, 1:].sum(-1)
    stream = BeamDecoder(8).stream(PHONES)
    kept, known = [], []
    for frame in log_probs.log():
        known += stream(frame[None])
        kept.append(len(stream._log_probs))
    known += stream(log_probs[:0], last=True)
    assert max(kept) == 30
    assert stream._search.get_all_final_hypothesis()[0].tokens == [0]
    assert {label.frame for label in known} == {0, 35, 70, 105}
    monkeypatch.undo()
    (whole,) = BeamDecoder(8)(log_probs.log()[None], torch.tensor([140]), PHONES)
    assert [label.label for label in known] == whole


def test_what_decoders_refuse(monkeypatch: pytest.MonkeyPatch):
    class Other(Decoder):
        def __call__(self, log_probs: Tensor, lengths: Tensor, phones: tuple[str, ...]) -> list[list[int]]:
            raise AssertionError

    with pytest.raises(ValueError, match="Other can't decode a stream; choose GreedyDecoder or BeamDecoder"):
        Other().stream(PHONES)
    pytest.importorskip("flashlight")
    with pytest.raises(ValueError, match="beam_size=0"):
        BeamDecoder(0)
    with pytest.raises(FileNotFoundError, match="lm=nowhere"):
        BeamDecoder(lm="nowhere")
    monkeypatch.setattr("lit_effattn.tasks.ctc.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"lit-effattn\[beam\]"):
        BeamDecoder()
