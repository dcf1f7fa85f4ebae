"""Responses that a language model writes within its stream, and their scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lit_effattn import sequence
from lit_effattn.checks import at_least, one_of
from lit_effattn.datamodules.common.tokens import Response, TokenBatch
from lit_effattn.datamodules.text.tokenizers import Tokenizer
from lit_effattn.generation.beam import beam_search
from lit_effattn.nn.heads import Head
from lit_effattn.sequence import SequenceModule, State
from lit_effattn.tasks.metrics import ExactMatch
from lit_effattn.tasks.text_metrics import RougeL, WordF1

ResponseMetric = Literal["f1", "rouge_l", "exact_match"]

METRICS: dict[str, Any] = {"f1": WordF1, "rouge_l": RougeL, "exact_match": ExactMatch}


class Responses:
    """Writes the responses of a batch by beam search, each after the reference tokens before it.

    Args:
        metrics: Metrics of the responses' words: names of `METRICS`.
        beam: Number of hypotheses of the search; 1 is greedy.
        max_len: Maximum number of tokens of a response, the end token included.

    Raises:
        ValueError: If an option is out of range.
    """

    def __init__(self, metrics: Sequence[str], *, beam: int, max_len: int) -> None:
        for name in metrics:
            one_of(METRICS, response_metrics=name)
        at_least(1, beam=beam, max_response_len=max_len)
        self.metrics = tuple(metrics)
        self.beam = beam
        self.max_len = max_len

    def scores(self) -> nn.ModuleDict:
        """Return new metrics by name."""
        return nn.ModuleDict({name: METRICS[name]() for name in self.metrics})

    @torch.no_grad()
    def write(
        self,
        batch: TokenBatch,
        memory: State | None,
        *,
        backbone: SequenceModule,
        embed: Callable[[Tensor], Tensor],
        head: Head,
        text: Tokenizer,
    ) -> list[tuple[Response, str]]:
        """Return each reference response that begins in a batch, and the model's text in its place.

        Args:
            batch: Inputs and reference responses.
            memory: The state before the batch; None: empty.
            backbone: See `beam.beam_search`.
            embed: See `beam.beam_search`.
            head: See `beam.beam_search`.
            text: Decodes tokens; its `start` ends a response.
        """
        references = [(row, response) for row, of_row in enumerate(batch.responses or ()) for response in of_row]
        if memory is None:
            memory = backbone.initial_state(len(batch.inputs), device=batch.inputs.device)
        written = []
        for first in range(0, len(references), len(batch.inputs)):  # as many rows at once as the batch has
            group = references[first : first + len(batch.inputs)]
            rows = torch.tensor([row for row, _ in group], device=batch.inputs.device)
            positions = torch.tensor([response.position for _, response in group], device=batch.inputs.device)
            state, inputs = sequence.select(memory, rows), batch.inputs[rows]  # (R, N)
            if before := max(response.position for _, response in group):
                _, state = backbone(embed(inputs[:, :before]), state, positions)
            prompt = inputs.gather(1, positions[:, None])  # (R, N) -> (R, 1)
            how: Any = {"beam": self.beam, "end": text.start, "compile": False}  # few steps for a number of rows
            hypotheses = beam_search(backbone, embed, head, prompt, self.max_len, state=state, **how)
            best, lengths = hypotheses.tokens[:, 0].cpu(), hypotheses.lengths[:, 0].tolist()
            for (_, response), tokens, length in zip(group, best, lengths, strict=True):
                written.append((response, text.decode(tokens[:length].numpy())))
        return written


def score_texts(scores: nn.ModuleDict, written: Sequence[tuple[Response, str]]) -> None:
    """Add pairs of a reference response and the model's text to metrics."""
    hypotheses, references = [text for _, text in written], [[response.text] for response, _ in written]
    metrics: dict[str, Any] = dict(scores.items())
    for name, metric in metrics.items():
        if name == "exact_match":
            metric.update([text.split() for text in hypotheses], [[text.split() for text in of] for of in references])
        else:
            metric.update(hypotheses, references)
