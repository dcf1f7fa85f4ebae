"""Models of a target sequence given a source: translation, and pronunciation of words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn

from lit_effattn.attention.positions import n_positions
from lit_effattn.checks import at_least, one_of, probabilities
from lit_effattn.datamodules.common.tokens import IGNORE, PairBatch
from lit_effattn.datamodules.text.tokenizers import NumberTokenizer, Tokenizer
from lit_effattn.generation.beam import LENGTH_PENALTY, Hypotheses, LengthNorm, beam_search, check_beam
from lit_effattn.nn.encoder_decoder import EncoderDecoder
from lit_effattn.nn.heads import CategoricalHead, HeadFactory
from lit_effattn.sequence import State, valid_lengths
from lit_effattn.tasks.auxiliary import mean_of_scored
from lit_effattn.tasks.base import Objective, Task, check_fields, check_targets, check_tokens
from lit_effattn.tasks.metrics import Count, ErrorRate, ExactMatch, Perplexity, for_stages
from lit_effattn.tasks.options import TargetOptions
from lit_effattn.tasks.predictions import PICTURES, Translation, write_translations
from lit_effattn.tasks.samples import check_known, write_targets
from lit_effattn.tasks.text_metrics import Bleu, Chrf

DecodedMetric = Literal["bleu", "chrf", "error_rate", "exact_match"]

_METRICS: dict[str, Callable[[], Any]] = {
    "bleu": Bleu,
    "chrf": Chrf,
    "error_rate": ErrorRate,
    "exact_match": ExactMatch,
}
_IN_UNITS = ("error_rate", "exact_match")

EXTRA_LEN = 50
"""Maximum length of an output beyond that of its source, in tokens (Vaswani et al. 2017, section 6.1)."""

PICTURED_LEN = 256
"""The longest source, in tokens, for which it is drawn: the weights take O(S²) memory, and pictures grow wide."""


class SequenceToSequence(Task):
    """Models a target given a source, token by token, with an encoder and a decoder.

        p(y | x) = Π_t p(y_t | y_1 … y_{t−1}, x),  perplexity = exp(−Σ_t ln p / T)           Vaswani et al. 2017

    A batch is a `PairBatch`. Training and perplexity use teacher forcing: each token is predicted from the reference
    tokens before it. The end token is scored, too. Embeddings are drawn from N(0, 1/E) and multiplied by √E (section
    3.4).

    `test` writes every target by beam search, and scores it with `metrics`: "bleu" and "chrf" by sacrebleu, on text;
    "error_rate", edits to the nearest reference over its length, in units separated by spaces (words or phones);
    "exact_match", the fraction that equals a reference. For pronunciations the word error rate is 1 − exact match, and
    the phone error rate is the error rate. `val` does the same in the epochs of `decode_every_n_epochs`. Without
    tokenizers, as in synthetic tasks, texts are the tokens' numbers, separated by spaces.

    Args:
        backbone: Encoder and decoder.
        source_vocab_size: Number of tokens of the source. From the command: that of the data.
        target_vocab_size: Number of tokens of the target; the last one begins and ends a sequence. From the command:
            that of the data.
        source_tokenizer: The source's tokenizer, as `Tokenizer.spec`; checkpoints contain it. None: there is no text.
            From the command: that of the data.
        target_tokenizer: The target's tokenizer, likewise.
        tie: Which matrices are shared. "target": the target's embedding and the head. "all": these and the source's
            embedding, which needs one vocabulary of both. "none": none.
        head: Makes the distribution over the target's tokens. Default: CategoricalHead.
        label_smoothing: ε of the training loss, spread over all tokens, the target included, as in
            torch.nn.CrossEntropyLoss.
        metrics: Metrics of the outputs in `test`.
        beam: Number of hypotheses of the search in `test`, `val` and `predict`; 1 is greedy. See `beam.beam_search`.
        length_penalty: α of the search.
        length_norm: Divisor of log p: gnmt, ((5 + tokens) / 6)^α, or average, tokens^α, as in fairseq and transformers.
        max_output_len: Maximum number of tokens of an output, the end token included. It bounds the time of a search
            with a long source. Default: 50 more than the source has (Vaswani et al. 2017, section 6.1).
        decode_every_n_epochs: In validation, write and score the outputs every n epochs of training, and in `validate`;
            null: never.
        options: Arguments of `Task`: the optimiser and its schedule, and the weight of auxiliary losses.

    Raises:
        ValueError: If an option is out of range, or the vocabularies can't be shared.
    """

    monitor = "val/perplexity"
    predicts_by_steps = True
    generation = TargetOptions
    numbering = ("source_tokenizer", "target_tokenizer")
    fixed_by_data = ("source_vocab_size", "target_vocab_size", "source_tokenizer", "target_tokenizer")

    def __init__(
        self,
        backbone: EncoderDecoder,
        source_vocab_size: int,
        target_vocab_size: int,
        source_tokenizer: str | None = None,
        target_tokenizer: str | None = None,
        tie: Literal["none", "target", "all"] = "none",
        head: HeadFactory | None = None,
        label_smoothing: float = 0.0,
        metrics: Sequence[DecodedMetric] = ("exact_match", "error_rate"),
        beam: int = 4,
        length_penalty: float = LENGTH_PENALTY,
        max_output_len: int | None = None,
        decode_every_n_epochs: int | None = None,
        length_norm: LengthNorm = "gnmt",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        probabilities(label_smoothing=label_smoothing)
        at_least(1, decode_every_n_epochs=decode_every_n_epochs, max_output_len=max_output_len)
        one_of(("none", "target", "all"), tie=tie)
        for name in metrics:
            one_of(_METRICS, metrics=name)
        check_beam(beam, 1, length_penalty, length_norm)
        self.source_vocab_size = source_vocab_size
        self.target_vocab_size = target_vocab_size
        self.source_tokenizer = source_tokenizer
        self.target_tokenizer = target_tokenizer
        self.backbone = backbone
        self.source_embedding = _embedding(source_vocab_size, backbone.d_source)
        self.target_embedding = _embedding(target_vocab_size, backbone.d_input)
        self.head = (head or CategoricalHead)(backbone.d_model, target_vocab_size)
        if tie != "none":
            self.head.tie(self.target_embedding)
        if tie == "all":
            self._share_source_embedding()
        self.label_smoothing = label_smoothing
        self.metrics = tuple(metrics)
        self.beam = beam
        self.length_penalty = length_penalty
        self.length_norm: LengthNorm = length_norm
        self.max_output_len = max_output_len
        self.decode_every_n_epochs = decode_every_n_epochs
        chosen: dict[str, Callable[[], Any]] = {name: _METRICS[name] for name in self.metrics}
        self.scores = for_stages({"perplexity": Perplexity, "sequences": Count, **chosen})

    def _share_source_embedding(self) -> None:
        source, target = self.source_embedding.weight, self.target_embedding.weight
        if source.shape != target.shape or self.source_tokenizer != self.target_tokenizer:
            raise ValueError(
                f"tie='all' needs one vocabulary of source and target, not {tuple(source.shape)} and "
                f"{tuple(target.shape)}; set joint=true in the data, or tie='target'"
            )
        self.source_embedding.weight = target

    @property
    def border(self) -> int:
        """The token that begins and ends a target."""
        return self.target_vocab_size - 1

    def _embed_source(self, tokens: Tensor) -> Tensor:
        return self.backbone.d_source**0.5 * self.source_embedding(tokens)

    def _embed_target(self, tokens: Tensor) -> Tensor:
        return self.backbone.d_input**0.5 * self.target_embedding(tokens)

    def remember(self, source: Tensor, source_lengths: Tensor | None = None, *, max_len: int | None = None) -> State:
        """Encode source tokens (B, S): see `EncoderDecoder.remember`."""
        return self.backbone.remember(self._embed_source(source), source_lengths, max_len=max_len)

    def hidden(self, batch: PairBatch, memory: State | None = None) -> tuple[Tensor, State]:
        """Return the decoder's output (B, N, d_model) by teacher forcing, and its state after the batch.

        Args:
            batch: Sources and targets.
            memory: The decoder's state before the targets. Default: the encoded sources.
        """
        memory = self.remember(batch.source, batch.source_lengths) if memory is None else memory
        return self.backbone(self._embed_target(batch.inputs), memory, batch.lengths)

    def forward(self, batch: PairBatch) -> Tensor:
        """Return −log p in nats of every target, 0 in padding: (B, N)."""
        self.check_batch(batch)
        hidden, _ = self.hidden(batch)
        return self.head.nll(hidden, batch.targets.clamp(min=0)).masked_fill(batch.targets == IGNORE, 0)

    def training_step(self, batch: PairBatch) -> Tensor:
        """Return the loss of `objective`. Texts are removed: compiled code would be compiled again for others."""
        check_fields(batch, PairBatch)
        return super().training_step(batch._replace(sources=[], references=[]))

    def objective(self, batch: PairBatch, memory: State | None = None) -> Objective:
        """Return the mean over the batch's targets, in nats, with auxiliary losses. There is no memory."""
        hidden, state = self.hidden(batch, memory)
        losses = self.head.loss(hidden, batch.targets.clamp(min=0), self.label_smoothing)
        loss, n_scored = mean_of_scored(losses, batch.targets)
        figures = {"train/loss": loss.detach()}
        return self.with_auxiliary(loss, figures, state, n_scored=n_scored)

    def score(self, stage: str, batch: PairBatch) -> dict[str, Any]:
        """Update the perplexity, and in test the metrics of the outputs."""
        metrics: Any = self.scores[stage]
        metrics["perplexity"](self(batch)[batch.targets != IGNORE])
        updated = {"perplexity": metrics["perplexity"]}
        if stage == "test":
            metrics["sequences"](batch.lengths)
            updated["sequences"] = metrics["sequences"]
        elif self.decode_every_n_epochs is None or (
            self._trainer is not None
            and self._trainer.state.fn == TrainerFn.FITTING
            and (self._trainer.current_epoch + 1) % self.decode_every_n_epochs
        ):
            return updated
        outputs = self.texts(self.search(batch.source, batch.source_lengths))
        for name in self.metrics:
            if name in _IN_UNITS:
                references = [[text.split() for text in texts] for texts in batch.references]
                metrics[name]([texts[0].split() for texts in outputs], references)
            else:
                metrics[name]([texts[0] for texts in outputs], batch.references)
            updated[name] = metrics[name]
        return updated

    def on_test_end(self) -> None:
        """Print sacrebleu's signatures of BLEU and chrF."""
        metrics: Any = self.scores["test"]
        for name in ("bleu", "chrf"):
            if name in self.metrics:
                rank_zero_only(print)(f"{name} is that of sacrebleu, {metrics[name].signature()}")

    # -------------------------------------------------------------------------------------------------- the outputs

    @torch.no_grad()
    def search(
        self,
        source: Tensor,
        source_lengths: Tensor | None = None,
        *,
        beam: int | None = None,
        length_penalty: float | None = None,
        length_norm: LengthNorm | None = None,
        n_best: int = 1,
        state: State | None = None,
        progress: Callable[[Iterable[int]], Iterable[int]] = iter,
    ) -> Hypotheses:
        """Search for the likeliest targets of source tokens (B, S): see `beam.beam_search`.

        A target has at most 50 tokens more than its source, the end token included, at most `max_output_len`, and at
        most as many as the decoder has positions.

        Args:
            source: (B, S) tokens, the end token included.
            source_lengths: (B,); None: all positions are valid.
            beam: Number of hypotheses. Default: the task's.
            length_penalty: α. Default: the task's.
            length_norm: gnmt or average. Default: the task's.
            n_best: Number of targets to return for each source, at most `beam`.
            state: The encoded source: see `remember`. Default: it is encoded.
            progress: Wraps the iterable of steps.
        """
        source_lengths = valid_lengths(source_lengths, source)
        limits = source_lengths + EXTRA_LEN
        for most in (self.max_output_len, n_positions(self.backbone.decoder)):
            limits = limits if most is None else limits.clamp(max=most)
        with self.in_evaluation():
            return beam_search(
                self.backbone,
                self._embed_target,
                self.head,
                torch.full((len(source), 1), self.border, device=source.device),
                limits,
                beam=self.beam if beam is None else beam,
                end=self.border,
                length_penalty=self.length_penalty if length_penalty is None else length_penalty,
                length_norm=self.length_norm if length_norm is None else length_norm,
                n_best=n_best,
                state=self.remember(source, source_lengths, max_len=int(limits.max())) if state is None else state,
                compile=False,  # each source gives another shape
                progress=progress,
            )

    def texts(self, hypotheses: Hypotheses) -> list[list[str]]:
        """Return the n best texts of each source."""
        tokenizer = self.target_text
        return [
            [tokenizer.decode(row[:length].numpy()) for row, length in zip(rows, lengths, strict=True)]
            for rows, lengths in zip(hypotheses.tokens.cpu(), hypotheses.lengths.tolist(), strict=True)
        ]

    def predict_step(self, batch: PairBatch, batch_idx: int = 0) -> list[Translation]:
        """Write a target for each source.

        Returns:
            A `Translation` for each source. Its entry has `source`, `outputs`, a list of `text`, `score` and `log_p` in
            nats, the best first, and `references` if they are known.
        """
        return self.translations(batch, n_best=1, drawn=PICTURES if batch_idx == 0 else 0)

    write_predictions, write_samples = write_translations, write_targets

    def translations(self, batch: PairBatch, *, drawn: int, **search: Any) -> list[Translation]:
        """Search for the targets of a batch, with the options of `search`, and draw the attention of the first ones."""
        hypotheses = self.search(batch.source, batch.source_lengths, **search)
        scores, log_probs = hypotheses.scores.tolist(), hypotheses.log_probs.tolist()
        translations = []
        for row, texts in enumerate(self.texts(hypotheses)):
            entry: dict[str, Any] = {
                "source": batch.sources[row],
                "outputs": [
                    {"text": text, "score": round(score, 4), "log_p": round(log_p, 4)}
                    for text, score, log_p in zip(texts, scores[row], log_probs[row], strict=True)
                    if score > -torch.inf
                ],
            }
            if batch.references and batch.references[row]:
                entry["references"] = batch.references[row]
            number = row if batch.indices is None else int(batch.indices[row])
            if row < drawn and int(batch.source_lengths[row]) <= PICTURED_LEN:
                source = batch.source[row, : int(batch.source_lengths[row])]
                target = hypotheses.tokens[row, 0, : int(hypotheses.lengths[row, 0])]
                translations.append(Translation(number, entry, *self._attention_to_source(source, target)))
            else:
                translations.append(Translation(number, entry, None, [], []))
        return translations

    def _attention_to_source(self, source: Tensor, target: Tensor) -> tuple[Tensor, list[str], list[str]]:
        """Return the attention weights (N, S) of `target` (N,) to `source` (S,), and the texts of both's tokens.

        The weights are the mean over the heads of the layer with the largest maximum weights, averaged over positions.
        """
        inputs = torch.cat([target.new_tensor([self.border]), target[:-1]])[None]  # (1, N)
        with self.in_evaluation():
            layers = self.backbone.attention_weights(self._embed_source(source[None]), self._embed_target(inputs))
        weights = max((w[0].mean(0) for w in layers), key=lambda w: float(w.amax(-1).mean()))  # (N, S)
        names = [
            [tokenizer.decode([int(token)]) or "</s>" for token in tokens]
            for tokenizer, tokens in ((self.target_text, target), (self.source_text, source))
        ]
        return weights.float().cpu(), names[0], names[1]

    def encode(self, text: str) -> Tensor:
        """Return a source text's tokens, the end token last: (S,).

        Raises:
            ValueError: If the text has no token, or a character that the model's training texts do not contain.
        """
        tokenizer = self.source_text
        check_known(tokenizer, text)
        tokens = [int(token) for token in tokenizer.encode(text)]
        if not tokens:
            raise ValueError(f"the source {text!r} has no tokens; give a text")
        return torch.tensor([*tokens, tokenizer.start])

    @property
    def source_text(self) -> Tokenizer:
        """The source's tokenizer."""
        return _text(self.source_tokenizer, self.source_vocab_size)

    @property
    def target_text(self) -> Tokenizer:
        """The target's tokenizer."""
        return _text(self.target_tokenizer, self.target_vocab_size)

    def check_batch(self, batch: PairBatch) -> None:
        """Raise ValueError if a token is outside its vocabulary, or padding is scored: see `Task.check_batch`."""
        check_fields(batch, PairBatch)
        check_tokens(batch.source, self.source_vocab_size, "source_vocab_size", "source token")
        check_tokens(batch.inputs, self.target_vocab_size, "target_vocab_size", "target token")
        check_targets(batch.targets, batch.lengths, self.target_vocab_size, "target_vocab_size")


def _embedding(n_tokens: int, width: int) -> nn.Embedding:
    embedding = nn.Embedding(n_tokens, width)
    nn.init.normal_(embedding.weight, std=width**-0.5)
    return embedding


def _text(spec: str | None, n_tokens: int) -> Tokenizer:
    return NumberTokenizer(n_tokens) if spec is None else Tokenizer.from_spec(spec)
