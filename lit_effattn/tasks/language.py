"""Autoregressive models of token sequences: text, and the papers' synthetic tasks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torchmetrics import Metric

from lit_effattn.checks import one_of, probabilities
from lit_effattn.datamodules.common.tokens import IGNORE, Response, TokenBatch
from lit_effattn.datamodules.text.tokenizers import NumberTokenizer, Tokenizer
from lit_effattn.generation.beam import Hypotheses, beam_search
from lit_effattn.generation.sampling import generate, generate_each
from lit_effattn.nn.heads import CategoricalHead, HeadFactory
from lit_effattn.nn.packing import first_positions, packed
from lit_effattn.nn.sliding import SlidingWindow
from lit_effattn.sequence import SequenceModule, State, valid_lengths
from lit_effattn.tasks.auxiliary import FurtherPredictions, mean_of_scored
from lit_effattn.tasks.base import Objective, Task, check_backbone, check_fields, check_targets, check_tokens
from lit_effattn.tasks.metrics import Accuracy, BitsPerDim, BitsPerTextByte, Count, Perplexity, for_stages
from lit_effattn.tasks.options import TextOptions
from lit_effattn.tasks.predictions import of_positions, write_documents, write_items, write_responses
from lit_effattn.tasks.responses import ResponseMetric, Responses, score_texts
from lit_effattn.tasks.samples import write_texts

Unit = Literal["byte", "character", "token"]

_METRICS = {
    "byte": ("bits_per_byte", BitsPerDim),
    "character": ("bits_per_character", BitsPerDim),
    "token": ("perplexity", Perplexity),
}

_MEMORY_OPTIONS = ("mem_len", "clamp_len", "same_length")

EmbeddingFactory = Callable[[int, int], nn.Module]
"""Makes an embedding from the number of tokens and its width."""


Result = TypeVar("Result")


class LanguageModel(Task):
    """Models a sequence of tokens as the product of their conditionals.

        p(x) = Π_t p(x_t | x_1 … x_{t−1}),  bits/byte = −Σ_t log2 p(x_t | …) / T,  perplexity = exp(−Σ_t ln p / T)

    A batch is a `TokenBatch`; its targets define which tokens are scored. With the callback `MemoryCarry` each batch
    continues from the backbone's state after the previous one, so the context reaches beyond a segment.

    Args:
        backbone: Causal; mixes the sequence.
        vocab_size: Number of tokens. From the command: that of the data.
        unit: What a token is, which determines the metric: bits/byte, bits/character, or perplexity; with a byte-pair
            tokenizer bits/byte, too. From the command: that of the data.
        tokenizer: The tokenizer, as `Tokenizer.spec`; checkpoints contain it, so that `generate` needs no data. From
            the command: that of the data.
        head: Makes the distribution over the tokens. Default: CategoricalHead.
        embedding: Makes the embedding. Default: torch.nn.Embedding.
        tie: Whether head and embedding share one matrix (Press & Wolf 2017).
        embedding_std: Standard deviation of the initial embedding.
        embedding_scale: Factor of the embedding's output (√d_model in Vaswani et al. 2017, section 3.4).
        label_smoothing: Label smoothing of the training loss. Metrics have none.
        accuracy: Whether to report how often the likeliest token is correct.
        eval_mem_len: `mem_len` in evaluation, for kinds that can change it (`set_memory`). Default: as in training.
        eval_clamp_len: `clamp_len` in evaluation, likewise.
        eval_same_length: `same_length` in evaluation, likewise.
        eval_window: Evaluate with a window of this length that slides by one position, without memory (Al-Rfou et al.
            2018): see `SlidingWindow`. Each token costs a whole window. The window spans segments only with the
            callback `MemoryCarry`.
        test_lengths: Lengths of sequences for which `test` reports separate accuracies, such as `accuracy_64`, if
            `accuracy` is set. From the command: those of the data.
        intermediate_losses: In training every layer predicts from its output, with its own head. Layer l of n stops
            after l / (2 n) of the run: see `FurtherPredictions`. Needs a `Transformer`.
        n_targets: Number of next tokens that each position predicts in training, each with its own head. Metrics are of
            the next token alone.
        target_weight: Weight of the loss of each target after the first.
        response_metrics: Write the responses that the data mark, such as the turns of a dialogue, and score them with
            these metrics: "f1" and "rouge_l", from 0 to 100, by torchmetrics; "exact_match", the fraction of responses
            with the reference's words. `test` reports them, `predict` writes the responses to a file. Before a response
            the model reads the reference tokens.
        beam: Number of hypotheses of the search for a response; 1 is greedy.
        max_response_len: Maximum number of tokens of a response, the end token included.
        options: Arguments of `Task`: the optimiser and its schedule, and the weight of auxiliary losses.

    Raises:
        ValueError: If the backbone is not causal, or an option is out of range or does not apply to the backbone.
    """

    fixed_by_data = ("vocab_size", "unit", "tokenizer", "test_lengths")
    numbering = ("tokenizer", "vocab_size")
    generation = TextOptions

    def __init__(
        self,
        backbone: SequenceModule,
        vocab_size: int,
        unit: Unit = "token",
        tokenizer: str | None = None,
        head: HeadFactory | None = None,
        embedding: EmbeddingFactory | None = None,
        tie: bool = False,
        embedding_std: float = 0.02,
        embedding_scale: float = 1.0,
        label_smoothing: float = 0.0,
        accuracy: bool = False,
        eval_mem_len: int | None = None,
        eval_clamp_len: int | None = None,
        eval_same_length: bool | None = None,
        eval_window: int | None = None,
        test_lengths: tuple[int, ...] | None = None,
        intermediate_losses: bool = False,
        n_targets: int = 1,
        target_weight: float = 0.5,
        response_metrics: Sequence[ResponseMetric] = (),
        beam: int = 1,
        max_response_len: int = 64,
        **options: Any,
    ) -> None:
        check_backbone(backbone, causal=True)
        responses = Responses(response_metrics, beam=beam, max_len=max_response_len)
        super().__init__(**options)
        one_of(_METRICS, unit=unit)
        probabilities(label_smoothing=label_smoothing)
        self.vocab_size = vocab_size
        self.unit = unit
        self.tokenizer = tokenizer
        self.embedding = (embedding or nn.Embedding)(vocab_size, backbone.d_input)
        if isinstance(self.embedding, nn.Embedding):
            nn.init.normal_(self.embedding.weight, std=embedding_std)
        self.embedding_scale = embedding_scale
        self.backbone = backbone
        # Not as the argument's default: see `Task`.
        self.head = (head or CategoricalHead)(backbone.d_model, vocab_size)
        if tie:
            self.head.tie(self.embedding)
        self.further: FurtherPredictions | None = None
        self.intermediate_losses = intermediate_losses
        self._n_steps = math.inf
        if intermediate_losses and not hasattr(backbone, "layer_outputs"):
            raise ValueError(
                f"intermediate_losses=True needs a Transformer, not {type(backbone).__name__}, which has no "
                "`layer_outputs`; leave it out"
            )
        if intermediate_losses or n_targets != 1:
            self.further = FurtherPredictions(
                lambda: (head or CategoricalHead)(backbone.d_model, vocab_size),
                n_layers=len(backbone.blocks) if intermediate_losses else 1,  # type: ignore[arg-type]
                n_targets=n_targets,
                target_weight=target_weight,
            )
        self.label_smoothing = label_smoothing
        self.metric_name, kind = _METRICS[unit]
        self.monitor = f"val/{self.metric_name}"
        self._token_bytes: Tensor | None = None  # see `token_bytes`
        of_tokens: dict[str, Callable[[], Metric]] = {self.metric_name: kind, f"{unit}s": Count}
        of_tokens |= {"bits_per_byte": BitsPerTextByte} if unit == "token" else {}
        self.scores = for_stages(of_tokens | ({"accuracy": Accuracy} if accuracy else {}))
        lengths = test_lengths if accuracy else None
        self.accuracy_by_length = nn.ModuleDict({str(n): Accuracy() for n in lengths or ()})
        if response_metrics and eval_window is not None:
            raise ValueError(
                f"response_metrics={list(response_metrics)} and eval_window={eval_window}: responses are written from "
                "a memory, which a sliding window does not have; leave out one of them"
            )
        self._responses = responses
        self.response_scores = responses.scores()
        options = {"mem_len": eval_mem_len, "clamp_len": eval_clamp_len, "same_length": eval_same_length}
        self._eval_memory = {name: value for name, value in options.items() if value is not None}
        self._with_memory: list[Any] = [m for m in backbone.modules() if callable(getattr(m, "set_memory", None))]
        self._training_memory: list[list[dict[str, Any]]] = []  # a stack: the options before each nested evaluation
        for name, value in self._eval_memory.items():
            if not any(hasattr(module, name) for module in self._with_memory):
                raise ValueError(
                    f"eval_{name}={value}, but no module in the backbone has a `{name}` that can be changed"
                )
        self._sliding = None if eval_window is None else [SlidingWindow(backbone, eval_window)]  # not as a submodule

    @property
    def active_backbone(self) -> SequenceModule:
        """The backbone, in evaluation with `eval_window` as a `SlidingWindow`."""
        return self.backbone if self.training or self._sliding is None else self._sliding[0].eval()

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.embedding_scale * self.embedding(tokens)

    def hidden(self, batch: TokenBatch, memory: State | None = None) -> tuple[Tensor, State]:
        """Return the backbone's output (B, N, d_model), continuing from `memory`, and its state after the batch.

        If rows hold several sequences and `memory` is None, the state has the auxiliary losses alone.
        """
        x = self._embed(batch.inputs)
        if batch.starts is None:
            return self.active_backbone(x, memory, batch.lengths)
        return packed(self.active_backbone, x, batch.starts, memory, batch.lengths, keep_state=memory is not None)

    def forward(self, batch: TokenBatch, memory: State | None = None) -> Tensor:
        """Return −log p in nats of every target, continuing from `memory`, 0 where it is not scored: (B, N).

        Raises:
            ValueError: If a token is outside the vocabulary.
        """
        self.check_batch(batch)
        return self._nll(self.hidden(batch, memory)[0], batch.targets)

    def _nll(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return self.head.nll(hidden, targets.clamp(min=0)).masked_fill(targets == IGNORE, 0)

    def objective(self, batch: TokenBatch, memory: State | None = None) -> Objective:
        """Return the mean over the batch's targets, in nats, with auxiliary losses, and the state after the batch."""
        outputs, state = self._outputs(batch, memory)
        losses = self.head.loss(outputs[-1], batch.targets.clamp(min=0), self.label_smoothing)
        loss, n_scored = mean_of_scored(losses, batch.targets)
        figures = {"train/loss": loss.detach()}
        if self.further is not None:
            further = self.further(outputs, batch.targets, self.label_smoothing)
            loss, figures["train/auxiliary_loss/FurtherPredictions"] = loss + further, further.detach()
        n_sequences = None if batch.starts is None else first_positions(batch.starts, batch.lengths).sum()
        return self.with_auxiliary(loss, figures, state, n_scored=n_scored, n_sequences=n_sequences)

    def _outputs(self, batch: TokenBatch, memory: State | None) -> tuple[list[Tensor], State]:
        """Return the outputs (B, N, d_model) from which training predicts, the last layer's last, and the state."""
        if self.further is not None and batch.starts is not None:
            raise ValueError(
                "n_targets and intermediate_losses do not support several sequences in a row (data.documents packed, "
                "data.packed); use padded rows, such as data.documents apart"
            )
        if self.intermediate_losses:
            return self.backbone.layer_outputs(self._embed(batch.inputs), memory, batch.lengths)  # type: ignore[operator]
        hidden, state = self.hidden(batch, memory)
        return [hidden], state

    def on_train_start(self) -> None:
        """Read the number of steps of the run, which determines when intermediate losses stop."""
        super().on_train_start()
        if self.further is not None:
            n_steps = self.trainer.estimated_stepping_batches  # -1: unknown
            self._n_steps = n_steps if n_steps > 0 else math.inf

    def on_train_batch_start(self, batch: TokenBatch, batch_idx: int) -> None:
        """Stop intermediate losses at their fraction of the run."""
        if self.further is not None:
            self.further.follow(self.trainer.global_step, self._n_steps)
        self._check_carried(batch, batch_idx)

    def _check_carried(self, batch: TokenBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Warn at the second batch if the backbone's memory is not carried to it."""
        fresh = getattr(batch, "fresh", None)
        if batch_idx == 1 and self._with_memory and not self.carries and fresh is not None and not fresh.all():
            rank_zero_warn(
                f"the batches continue each other, but {type(self._with_memory[0]).__name__} begins each with an empty "
                "memory, since no callback MemoryCarry carries it"
            )

    on_validation_batch_start = on_test_batch_start = on_predict_batch_start = _check_carried

    def training_step(self, batch: TokenBatch) -> Tensor:
        """Return the loss of `objective`. Responses are removed: compiled code would be compiled again for others."""
        return super().training_step(batch._replace(responses=None) if getattr(batch, "responses", None) else batch)

    def part_of(self, batch: TokenBatch, rank: int, size: int) -> TokenBatch:
        """Return the positions of `batch` that process `rank` of `size` computes: see `strategies.SequenceParallel`.

        Raises:
            ValueError: If an option needs whole sequences, or there are fewer positions than processes.
        """
        for name, is_set in (
            ("n_targets", self.further is not None and self.further.n_targets > 1),
            ("eval_window", self._sliding is not None),
            ("test_lengths", bool(self.accuracy_by_length)),
            ("response_metrics", bool(self._responses.metrics)),
            ("data.documents packed", batch.starts is not None),
            ("the callback Compile", self._objective is not type(self).objective),
        ):
            if is_set:
                raise ValueError(f"SequenceParallel: {name} needs whole sequences; leave it out")
        self.check_batch(batch)
        n = batch.inputs.size(1)
        if n < size:
            raise ValueError(f"SequenceParallel: size={size}, but sequences have {n} positions; use fewer processes")
        begin, end = rank * n // size, (rank + 1) * n // size
        lengths = None if batch.lengths is None else (batch.lengths - begin).clamp(0, end - begin)
        return TokenBatch(batch.inputs[:, begin:end], batch.targets[:, begin:end], lengths, batch.fresh)

    def predict_step(self, batch: TokenBatch) -> dict[str, Any] | list[tuple[Response, str]]:
        """Return the number of targets of each row, and their mean −log2 p, (B,) each.

        If the batch has offsets, return −ln p of each target, and where it is: see `of_positions`. With
        `response_metrics`, return the responses that begin in the batch, each with the model's text.
        """
        self.check_batch(batch)
        before = self.memory
        hidden, state = self.hidden(batch, before)
        self.keep(state)
        if self._responses.metrics:
            return self._written(batch, before)
        scored = batch.targets != IGNORE
        count, nats = scored.sum(1), self._nll(hidden, batch.targets)
        if batch.offsets is not None:
            return of_positions(scored, batch.offsets, nats=nats[scored])
        bits = nats.sum(1) / count.clamp(min=1) / torch.log(torch.tensor(2.0))
        return {"targets": count, "bits_per_target": bits}

    def evaluate(self, stage: str, batch: TokenBatch, memory: State | None = None) -> tuple[dict[str, Any], State]:
        """Score a batch, continuing from `memory`: see `Task.evaluate`. In test, write and score responses."""
        self._check_window(batch, memory)
        hidden, state = self.hidden(batch, memory)
        if stage == "test" and self._responses.metrics:
            score_texts(self.response_scores, self._written(batch, memory))
        return self.score(stage, batch, hidden), state

    def score(self, stage: str, batch: TokenBatch, hidden: Tensor | None = None) -> dict[str, Any]:
        """Update the metrics: see `Task.score`.

        Args:
            stage: "val" or "test".
            batch: Inputs and targets.
            hidden: The backbone's output (B, N, d_model). Default: computed without a memory.
        """
        hidden = self.hidden(batch)[0] if hidden is None else hidden
        scored = batch.targets != IGNORE
        hidden, targets = hidden[scored], batch.targets[scored]
        scores: Any = self.scores[stage]
        metrics = {self.metric_name: scores[self.metric_name]}
        nll = self.head.nll(hidden, targets)
        scores[self.metric_name](nll)
        if (sizes := self.token_bytes) is not None:
            metrics["bits_per_byte"] = scores["bits_per_byte"]
            scores["bits_per_byte"](nll, sizes.to(targets.device)[targets])
        if stage == "test":
            metrics[f"{self.unit}s"] = scores[f"{self.unit}s"]
            scores[f"{self.unit}s"](nll)
            metrics |= dict(self.response_scores.items())
        if "accuracy" in scores:
            metrics["accuracy"] = scores["accuracy"]
            correct = self.head.log_probs(hidden).argmax(-1) == targets
            scores["accuracy"](correct)
            if stage == "test":
                metrics |= self._score_by_length(batch, scored, correct)
        return metrics

    def _check_window(self, batch: TokenBatch, memory: State | None) -> None:
        """Warn if no position lies beyond the window, which then has no effect."""
        n = batch.inputs.size(1)
        if self._sliding is not None and memory is None and n <= self._sliding[0].window:
            rank_zero_warn(
                f"eval_window={self._sliding[0].window} changes nothing: a segment has {n} positions, and none is seen "
                "from the next segment; add the callback, --trainer.callbacks MemoryCarry"
            )

    def _score_by_length(self, batch: TokenBatch, scored: Tensor, correct: Tensor) -> dict[str, Any]:
        """Update the accuracy of each length, and return all: a process may have no sequence of some length."""
        if self.accuracy_by_length and batch.starts is not None:
            raise ValueError("test_lengths does not support several sequences in a row; test with padded rows")
        lengths = valid_lengths(batch.lengths, batch.inputs)
        of_target = lengths[:, None].expand_as(scored)[scored]  # (B, N) -> (T,)
        metrics: dict[str, Any] = dict(self.accuracy_by_length.items())
        for n, metric in metrics.items():
            metric.update(correct[of_target == int(n)])
        return {f"accuracy_{n}": metric for n, metric in metrics.items()}

    def _written(self, batch: TokenBatch, memory: State | None) -> list[tuple[Response, str]]:
        text = NumberTokenizer(self.vocab_size) if self.tokenizer is None else self.text
        return self._responses.write(
            batch, memory, backbone=self.backbone, embed=self._embed, head=self.head, text=text
        )

    def write_predictions(self, predictions: list[Any], folder: Path) -> str:
        """Write the results of `predict_step`, with `response_metrics` as responses: see `Task.write_predictions`.

        Of data with offsets, such as `TextStream` and `SortingTask`, a line is a document or a sequence.
        """
        if self._responses.metrics:
            return write_responses(predictions, folder)
        if "offset" not in predictions[0]:
            return write_items(self, predictions, folder)
        figures = {"bits_per_target": ("nats", lambda nats: nats / math.log(2))}
        return write_documents(predictions, folder / "predictions.csv", self._trainer, figures)

    # -------------------------------------------------------------------------------------- memory in evaluation

    def on_validation_start(self) -> None:
        """Set the memory options of evaluation."""
        before = [
            {name: getattr(module, name) for name in _MEMORY_OPTIONS if hasattr(module, name)}
            for module in self._with_memory
        ]
        self._training_memory.append(before)  # a callback may draw samples within a validation
        for module, options in zip(self._with_memory, before, strict=True):
            module.set_memory(**{name: self._eval_memory.get(name, value) for name, value in options.items()})

    def on_validation_end(self) -> None:
        """Restore the memory options from before the evaluation."""
        for module, options in zip(self._with_memory, self._training_memory.pop(), strict=True):
            module.set_memory(**options)

    def setup(self, stage: str) -> None:
        """Restore the memory options of training: an exception may have ended an evaluation."""
        super().setup(stage)
        while self._training_memory:
            self.on_validation_end()

    on_test_start, on_test_end = on_validation_start, on_validation_end
    on_predict_start, on_predict_end = on_validation_start, on_validation_end

    # ------------------------------------------------------------------------------------------------- generation

    write_samples = write_texts

    def sample(self, prompt: Tensor, n_tokens: int, **options: Any) -> Tensor:
        """Continue each row of `prompt` (B, P) by `n_tokens` tokens, (B, n_tokens): see `generation.generate`."""
        return self._generated(generate, prompt, n_tokens, **options)

    def sample_each(self, prompts: Sequence[Tensor], n_tokens: int | Sequence[int], **options: Any) -> list[Tensor]:
        """Continue each of `prompts` (P,) by `n_tokens` tokens, (n, n_tokens): see `generation.generate_each`."""
        return self._generated(generate_each, prompts, n_tokens, **options)

    def beam_search(self, prompt: Tensor, max_len: int, *, beam: int, **options: Any) -> Hypotheses:
        """Search for the likeliest continuations of each row of `prompt` (B, P): see `beam.beam_search`."""
        return self._generated(beam_search, prompt, max_len, beam=beam, **options)

    def _generated(
        self, generation: Callable[..., Result], prompts: Tensor | Sequence[Tensor], *args: Any, **options: Any
    ) -> Result:
        for prompt in [prompts] if isinstance(prompts, Tensor) else prompts:
            check_tokens(prompt, self.vocab_size)
        given = prompts.to(self.device) if isinstance(prompts, Tensor) else [p.to(self.device) for p in prompts]
        with self.in_evaluation():
            return generation(self.backbone, self._embed, self.head, given, *args, **options)

    @property
    def text(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            ValueError: If the model was trained without a tokenizer.
        """
        if self.tokenizer is None:
            raise ValueError("the model's tokens can't be decoded to text: it was trained without a tokenizer")
        return Tokenizer.from_spec(self.tokenizer)

    @property
    def token_bytes(self) -> Tensor | None:
        """Number of bytes of each token's text, (vocab_size,). None: unknown, or `unit` is not "token"."""
        if self.tokenizer is None or self.unit != "token":
            return None
        if self._token_bytes is None:
            sizes = self.text.token_bytes()
            self._token_bytes = torch.empty(0) if sizes is None else torch.from_numpy(sizes)
        return self._token_bytes if len(self._token_bytes) else None

    def check_batch(self, batch: TokenBatch) -> None:
        """Raise ValueError if a token is outside the vocabulary, or padding is scored: see `Task.check_batch`."""
        check_fields(batch, TokenBatch)
        check_tokens(batch.inputs, self.vocab_size)
        check_targets(batch.targets, batch.lengths, self.vocab_size)
