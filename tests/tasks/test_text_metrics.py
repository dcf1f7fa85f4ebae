import copy
import doctest
import random
import re
import sys
from collections import Counter
from collections.abc import Callable

import pytest
import sacrebleu
import torch
from sacrebleu.metrics import BLEU, CHRF

from lit_effattn.tasks import text_metrics
from lit_effattn.tasks.text_metrics import Bleu, Chrf, RougeL, WordF1

KINDS: dict[str, tuple[Callable, Callable]] = {"bleu": (Bleu, BLEU), "chrf": (Chrf, CHRF)}


def corpus(n: int, most: int, seed: int = 0) -> tuple[list[str], list[list[str]]]:
    """Make sentences with one to `most` references, which are the sentence with some words changed."""
    rng = random.Random(seed)
    words = ["The", "the", "a", "cat,", "dog", "sat", "on", "mat.", "(under)", "it's", "3.5", "%"]

    def changed(sentence: list[str]) -> str:
        return " ".join(rng.choice(words) if rng.random() < 0.3 else word for word in sentence)

    sentences = [[rng.choice(words) for _ in range(rng.randint(0, 14))] for _ in range(n)]
    return (
        [" ".join(sentence) for sentence in sentences],
        [[changed(sentence) for _ in range(rng.randint(1, most))] for sentence in sentences],
    )


def streams(references: list[list[str]]) -> list[list[str | None]]:
    """Put references into the form of sacrebleu: the first ones of all sentences, the second ones, …"""
    most = max(map(len, references))
    return [[of_one[i] if i < len(of_one) else None for of_one in references] for i in range(most)]


@pytest.mark.parametrize("kind", KINDS)
def test_batches_score_as_all_texts_at_once(kind: str):
    ours, theirs = (make() for make in KINDS[kind])
    hypotheses, references = corpus(50, 3)
    for start, end in ((0, 1), (1, 30), (30, 30), (30, 50)):
        ours.update(hypotheses[start:end], references[start:end])
    expected = theirs.corpus_score(hypotheses, streams(references)).score
    assert ours.compute().item() == expected
    assert 5 < expected < 95
    assert ours.signature() == str(theirs.get_signature())
    assert ours.higher_is_better is True


def test_the_defaults_are_those_of_the_corpus_functions():
    hypotheses, references = corpus(20, 2)
    assert Bleu()(hypotheses, references).item() == sacrebleu.corpus_bleu(hypotheses, streams(references)).score
    assert Chrf()(hypotheses, references).item() == sacrebleu.corpus_chrf(hypotheses, streams(references)).score


@pytest.mark.parametrize("kind", KINDS)
def test_processes_add_their_statistics(kind: str):
    """What torchmetrics does in DDP: gather every state, then reduce it as declared. One process has no sentence."""
    make, theirs = KINDS[kind]
    hypotheses, references = corpus(12, 1)
    references[-1].append("A second one.")
    ranks = [make() for _ in range(3)]
    ranks[0].update(hypotheses[:9], references[:9])
    ranks[1].update(hypotheses[9:], references[9:])
    metric = ranks[0]
    gathered = {id(getattr(metric, name)): [getattr(rank, name) for rank in ranks] for name in metric._defaults}
    metric.distributed_available_fn = lambda: True
    metric.dist_sync_fn = lambda state, group: gathered[id(state)]
    scorer = theirs()
    assert metric.compute().item() == scorer.corpus_score(hypotheses, streams(references)).score
    assert metric.signature() == str(scorer.get_signature())
    assert "nrefs:var" in metric.signature()


def test_counts_stay_exact_when_the_model_becomes_half_precision():
    metric = torch.nn.ModuleDict({"bleu": Bleu()}).to(torch.bfloat16)["bleu"]
    hypotheses, references = corpus(300, 1)
    for _ in range(4):
        metric.update(hypotheses, references)
    expected = sacrebleu.corpus_bleu(hypotheses * 4, streams(references * 4)).score
    assert metric.compute().item() == expected
    assert copy.deepcopy(metric).compute().item() == expected


def test_the_signature_outlives_a_reset():
    """Lightning resets metrics before the command prints the signature."""
    metric = Bleu()
    with pytest.raises(ValueError, match="not known before `compute`"):
        metric.signature()
    metric(["a b c d e"], [["a b c d e"]])
    assert metric.compute().item() == pytest.approx(100)
    metric.reset()
    assert metric.signature().startswith("nrefs:1|")
    metric.update(["x"], [["a b c d e", "y"]])
    assert metric.compute().item() == 0
    assert metric.signature().startswith("nrefs:2|")


@pytest.mark.parametrize(
    ("hypotheses", "references", "words"),
    [
        (["a", "b"], [["a"], []], r"references\[1\]=\[\] must be a list of texts"),
        (["abc"], ["abc"], r"references\[0\]='abc' must be a list of texts"),
        (["a", "b"], [["a"]], "2 hypotheses have 1 lists"),
    ],
)
def test_texts_without_references_are_rejected(hypotheses: list, references: list, words: str):
    with pytest.raises(ValueError, match=words):
        Bleu().update(hypotheses, references)


@pytest.mark.parametrize("kind", [Bleu, Chrf])
def test_without_the_package_the_extra_is_named(kind: type, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(ValueError, match=r"pip install 'lit-effattn\[translation\]'"):
        kind()


def test_the_examples_of_the_docstrings():
    result = doctest.testmod(text_metrics)
    assert result.attempted >= 7
    assert result.failed == 0


def words_of(text: str) -> list[str]:
    return re.findall("[a-z0-9]+", text.lower())


def f1(shared: int, a: int, b: int) -> float:
    return 2 * shared / (a + b) if shared else 0.0


def subsequence(a: list[str], b: list[str]) -> int:
    """Length of the longest common subsequence, by its recursion."""
    if not a or not b:
        return 0
    if a[-1] == b[-1]:
        return 1 + subsequence(a[:-1], b[:-1])
    return max(subsequence(a[:-1], b), subsequence(a, b[:-1]))


def word_f1(text: str, reference: str) -> float:
    a, b = (
        [w for w in words_of(t.replace("'", "").replace(".", "")) if w not in ("a", "the")] for t in (text, reference)
    )
    return f1(sum((Counter(a) & Counter(b)).values()), len(a), len(b)) if a and b else float(a == b)


def rouge_l(text: str, reference: str) -> float:
    a, b = words_of(text), words_of(reference)
    return f1(subsequence(a, b), len(a), len(b))


@pytest.mark.parametrize(("kind", "definition"), [(WordF1, word_f1), (RougeL, rouge_l)])
def test_word_scores_are_means_over_texts_in_any_batches(kind: Callable, definition: Callable):
    hypotheses, references = corpus(20, 3)
    hypotheses = [" ".join(text.split()[:5]) for text in hypotheses]
    expected = [max(definition(h, r) for r in of_one) for h, of_one in zip(hypotheses, references, strict=True)]
    metric = kind()
    for start, end in ((0, 1), (1, 1), (1, 20)):
        metric.update(hypotheses[start:end], references[start:end])
    assert metric.compute().item() == pytest.approx(100 * sum(expected) / 20, rel=1e-6)
    assert 20 < metric.compute() < 95
    with pytest.raises(ValueError, match=r"references\[0\]='x' must be a list of texts"):
        metric.update(["x"], ["x"])
