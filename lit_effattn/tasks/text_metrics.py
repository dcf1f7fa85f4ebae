"""BLEU and chrF by sacrebleu, F1 and ROUGE-L by torchmetrics, from sums over batches and processes."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torchmetrics.functional.text import rouge_score, squad

from lit_effattn.tasks.metrics import Float64Metric, Mean

if TYPE_CHECKING:
    from sacrebleu.metrics.base import Metric as SacreBleuMetric


def _check_texts(references: Sequence[Sequence[str]]) -> None:
    """Raise ValueError unless every text has a list of reference texts."""
    for i, of_one in enumerate(references):
        if isinstance(of_one, str) or not len(of_one):
            raise ValueError(f"references[{i}]={of_one!r} must be a list of texts, at least one for each hypothesis")


class _CorpusScore(Float64Metric):
    """A score of sacrebleu: a function of statistics that are added over all sentences.

    The statistics are integers, and sacrebleu's own formula is applied to their sums. So the score does not depend on
    how the sentences are divided into batches or among processes.

    Args:
        scorer: Extracts the statistics, and computes the score from their sums.
        n_statistics: Number of statistics.
    """

    higher_is_better = True
    statistics: Tensor
    fewest_references: Tensor
    most_references: Tensor

    def __init__(self, scorer: SacreBleuMetric, n_statistics: int) -> None:
        super().__init__()
        self._scorer = scorer
        self._n_references: int | None = None
        self.add_state("statistics", torch.zeros(n_statistics, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("fewest_references", torch.tensor(math.inf, dtype=torch.float64), dist_reduce_fx="min")
        self.add_state("most_references", torch.tensor(0, dtype=torch.float64), dist_reduce_fx="max")

    def update(self, hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> None:
        """Add sentences.

        Args:
            hypotheses: Detokenised texts.
            references: The references of each, at least one; their number may vary.

        Raises:
            ValueError: If a sentence has no reference, or a text instead of a list of texts, or if the numbers of
                hypotheses and references differ.
        """
        _check_texts(references)
        if len(hypotheses) != len(references):
            raise ValueError(f"{len(hypotheses)} hypotheses have {len(references)} lists of references; give one each")
        if not hypotheses:
            return
        streams = list(zip_longest(*references))  # the first references of all sentences, the second ones, …
        by_sentence = self._scorer._extract_corpus_statistics(hypotheses, streams)
        self.statistics += torch.tensor(by_sentence, dtype=torch.float64, device=self.device).sum(0)
        counts = torch.tensor([len(of_one) for of_one in references], dtype=torch.float64, device=self.device)
        self.fewest_references = torch.minimum(self.fewest_references, counts.min())
        self.most_references = torch.maximum(self.most_references, counts.max())

    def compute(self) -> Tensor:
        """Return the score, from 0 to 100."""
        most = int(self.most_references)
        self._n_references = (most if most == self.fewest_references else -1) if most else None
        score: Any = self._scorer._compute_score_from_stats([int(n) for n in self.statistics.tolist()])
        return torch.tensor(score.score, dtype=torch.float64, device=self.device)

    def signature(self) -> str:
        """Return sacrebleu's signature of the score that `compute` returned last: its options and version.

        Raises:
            ValueError: If nothing was computed yet, so the number of references is not known.
        """
        if self._n_references is None:
            raise ValueError("the signature names the number of references, which is not known before `compute`")
        self._scorer.num_refs = self._n_references  # as in sacrebleu's `corpus_score`
        return str(self._scorer.get_signature())


class Bleu(_CorpusScore):
    """BLEU of a corpus, by sacrebleu (Post 2018).

        BLEU = 100 · min(1, exp(1 − r / c)) · exp(Σₙ ln pₙ / 4),  n = 1 … 4      Papineni et al. 2002, section 2.3

    pₙ is the fraction of the hypotheses' n-grams that are in a reference, c the hypotheses' length in tokens, r that of
    the references nearest in length.

    Raises:
        ValueError: If sacrebleu is not installed.

    Examples:
        >>> metric = Bleu()
        >>> metric.update(["the cat sat on the mat"], [["the cat sat on a mat", "a cat sat on the mat"]])
        >>> round(float(metric.compute()), 1)
        95.5
        >>> metric.signature().partition("|version")[0]
        'nrefs:2|case:mixed|eff:no|tok:13a|smooth:exp'
    """

    def __init__(self) -> None:
        scorer = _sacrebleu().BLEU()
        super().__init__(scorer, n_statistics=2 + 2 * scorer.max_ngram_order)


class Chrf(_CorpusScore):
    """chrF of a corpus, by sacrebleu (Post 2018).

        chrF = 100 · (1 + β²) P R / (β² P + R),  β = 2                            Popović 2015, equation 1

    P and R are the precision and the recall of n-grams of characters, each averaged over n = 1 … 6. Of several
    references of a sentence the one with the highest chrF counts.

    Raises:
        ValueError: If sacrebleu is not installed.

    Examples:
        >>> metric = Chrf()
        >>> metric.update(["the cat sat on the mat"], [["the cat sat on a mat"]])
        >>> round(float(metric.compute()), 1)
        72.1
    """

    def __init__(self) -> None:
        scorer = _sacrebleu().CHRF()
        super().__init__(scorer, n_statistics=3 * scorer.order)


class _MeanScore(Mean):
    """The mean over all texts of a score of one text."""

    higher_is_better = True

    @staticmethod
    @abstractmethod
    def of_one(hypothesis: str, references: list[str]) -> Tensor:
        """Return the score of a text, from 0 to 100."""

    def update(self, hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> None:  # type: ignore[override]
        """Add texts, each with a list of reference texts."""
        _check_texts(references)
        for hypothesis, of_one in zip(hypotheses, references, strict=True):
            super().update(self.of_one(hypothesis, list(of_one)).to(self.device))


class WordF1(_MeanScore):
    """F1 of the words that a text and its reference share, by torchmetrics: the mean over all texts.

        F1 = 100 · 2 P R / (P + R),  P = shared / words of the text,  R = shared / words of the reference

    Texts become lower case, and lose punctuation and the words a, an and the (Rajpurkar et al. 2016, section 6.1; the
    same in Dinan et al. 2019). Of several references the best counts.

    Examples:
        >>> metric = WordF1()
        >>> metric.update(["The cat sat."], [["a cat sat down"]])
        >>> round(float(metric.compute()), 1)
        80.0
    """

    @staticmethod
    def of_one(hypothesis: str, references: list[str]) -> Tensor:
        """Return F1 of a text."""
        answers: dict[str, list[str] | list[int]] = {"answer_start": [0] * len(references), "text": references}
        return squad({"prediction_text": hypothesis, "id": "0"}, {"answers": answers, "id": "0"})["f1"]


class RougeL(_MeanScore):
    """ROUGE-L by torchmetrics, without stemming: the mean over all texts.

        ROUGE-L = 100 · 2 P R / (P + R),  P = LCS / words of the text,  R = LCS / words of the reference

    LCS is the number of words in the longest common subsequence (Lin 2004, section 3.1, with β = 1). Words are runs of
    a … z and 0 … 9, in lower case. Of several references the best counts.

    Examples:
        >>> metric = RougeL()
        >>> metric.update(["sat the cat"], [["the cat sat"]])
        >>> round(float(metric.compute()), 1)
        66.7
    """

    @staticmethod
    def of_one(hypothesis: str, references: list[str]) -> Tensor:
        """Return ROUGE-L of a text."""
        return 100 * rouge_score([hypothesis], [references], rouge_keys="rougeL")["rougeL_fmeasure"]


def _sacrebleu() -> Any:
    """Import `sacrebleu.metrics`, which is slow.

    Its methods `_extract_corpus_statistics` and `_compute_score_from_stats` are the same in versions 2.0 to 2.6, whose
    own tests of significance use them.
    """
    try:
        from sacrebleu import metrics
    except ImportError:
        raise ValueError("BLEU and chrF need the package sacrebleu: pip install 'lit-effattn[translation]'") from None
    return metrics
