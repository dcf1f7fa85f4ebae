"""Classification of sequences: of pixels, bytes, other tokens, or feature vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_effattn.attention.positions import bind
from lit_effattn.checks import at_least, one_of, probabilities
from lit_effattn.datamodules.common.labelled import LabelledBatch
from lit_effattn.nn.packing import first_positions, packed
from lit_effattn.sequence import (
    SequenceModule,
    State,
    accumulator,
    reads_values,
    valid_lengths,
    valid_positions,
    without_padding,
)
from lit_effattn.tasks.base import Objective, Task, check_integers, check_tokens
from lit_effattn.tasks.metrics import Accuracy, Count, Mean, for_stages
from lit_effattn.tasks.pixels import ordinal_waves
from lit_effattn.tasks.predictions import write_classes


class SequenceClassifier(Task):
    """Assigns a sequence to one of C classes.

        p(c | x) = softmax(W pool(h_1 … h_n) + b)_c,  h = backbone(embed(x)),  n the sequence's valid positions
        pool: Σ_t h_t / n (mean), or h_n (last)

    A batch is a `LabelledBatch`, or a tuple or list `(x, labels)` or `(x, labels, lengths)`, as from a `DataLoader`
    over an (x, y) data set; `datamodules.pad_labelled` pads sequences of different lengths, and `datamodules.pack` lays
    them end to end in one row, each with its label, and pooled by itself. x is (B, N) tokens, which
    are embedded, or (B, N, F) feature vectors, on which one matrix is applied. Metrics are the `accuracy`, correct
    sequences / sequences, and the `loss`, Σ −ln p(label) / sequences. Every sequence starts from the empty state.

    Args:
        backbone: Mixes the sequence; causal or not.
        classes: Names of the C classes, in the order of their labels. From the command: those of the data.
        vocab_size: Number of tokens, if sequences are tokens. From the command: that of the data.
        n_features: Width F of the feature vectors, if sequences are those. From the command: that of the data.
        shape: Shape of a sequence: (height, width, channels) of an image in raster order, or (length,). Learned
            positions need it. From the command: that of the data.
        pooling: mean: of the outputs at all valid positions. last: the output at the last valid position, for a causal
            backbone.
        embedding_std: Standard deviation of the initial embedding of tokens: see `PixelModel`.
        ordinal_embedding: Initialise the embedding with waves of the token's number, for tokens that are levels: see
            `PixelModel`.
        label_smoothing: ε of the training loss, spread over all classes, the label included, as in
            torch.nn.CrossEntropyLoss.
        options: Arguments of `Task`: the optimiser and its schedule, and the weight of auxiliary losses.

    Raises:
        ValueError: If an option is out of range, not exactly one of `vocab_size` and `n_features` is given, or
            pooling="last" is given with a backbone that is not causal.
    """

    monitor = "val/loss"
    fixed_by_data = ("classes", "vocab_size", "n_features", "shape")
    numbering = ("classes",)
    new_modules = ("output",)
    in_progress_bar = ("train/loss", "train/accuracy")

    def __init__(
        self,
        backbone: SequenceModule,
        classes: tuple[str, ...],
        vocab_size: int | None = None,
        n_features: int | None = None,
        shape: tuple[int, ...] | None = None,
        pooling: Literal["mean", "last"] = "mean",
        embedding_std: float = 1.0,
        ordinal_embedding: bool = False,
        label_smoothing: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.classes = tuple(classes)
        _check_classes(self.classes)
        _check_input(vocab_size, n_features)
        one_of(("mean", "last"), pooling=pooling)
        if pooling == "last" and not backbone.causal:
            raise ValueError(
                "pooling='last' needs a causal backbone, whose last output has seen the whole sequence; set "
                "causal=True, or pooling='mean'"
            )
        probabilities(label_smoothing=label_smoothing)
        self.vocab_size = vocab_size
        self.n_features = n_features
        self.pooling = pooling
        self.label_smoothing = label_smoothing
        if shape is not None:
            bind(backbone, shape)
        self.embedding: nn.Embedding | nn.Linear
        if vocab_size is not None:
            self.embedding = nn.Embedding(vocab_size, backbone.d_input)
            nn.init.normal_(self.embedding.weight, std=embedding_std)
            if ordinal_embedding:
                self.embedding.weight.data[:] = embedding_std * ordinal_waves(vocab_size, backbone.d_input)
        elif n_features is not None:
            self.embedding = nn.Linear(n_features, backbone.d_input)
        self.backbone = backbone
        self.output = nn.Linear(backbone.d_model, len(self.classes))
        self.scores = for_stages({"loss": Mean, "accuracy": Accuracy, "sequences": Count})

    def forward(self, x: Tensor, lengths: Tensor | None = None, starts: Tensor | None = None) -> Tensor:
        """Return ln p of every class, (B, C), or with `starts` one row for each sequence.

        Args:
            x: (B, N) tokens, or (B, N, F) feature vectors.
            lengths: (B,), number of valid positions of each row; None: all are valid.
            starts: (B, N), where sequences begin, if rows hold several: see `LabelledBatch`.

        Raises:
            ValueError: If the model can't read the sequences.
        """
        self._check_sequences(x, lengths)
        return self._logits(LabelledBatch(x, None, lengths, starts=starts))[0].log_softmax(-1)

    def hidden(self, batch: Any, memory: State | None = None) -> tuple[Tensor, State]:
        """Return the backbone's output (B, N, d_model), continuing from `memory`, and its state after the batch."""
        x, _, lengths, _, starts = as_labelled(batch)
        if starts is None:
            return self.backbone(self._embed(x, lengths), memory, lengths)
        return packed(self.backbone, self._embed(x, lengths), starts, memory, lengths, keep_state=memory is not None)

    def _logits(self, batch: LabelledBatch, memory: State | None = None) -> tuple[Tensor, State]:
        """Return the logits of each sequence, (B, C), and the state after the batch."""
        hidden, state = self.hidden(batch, memory)
        if batch.starts is None:
            pooled = self._pool(hidden, batch.lengths)
        else:
            pooled = self._pool_pieces(hidden, batch.lengths, batch.starts)
        logits = self.output(pooled)
        return logits.to(accumulator(logits.dtype)), state

    def _embed(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        if self.n_features is not None:
            return self.embedding(without_padding(x, lengths).to(self.embedding.weight.dtype))  # (B, N, F) -> (B, N, E)
        tokens = x.long()
        if lengths is not None:  # the padding may hold any number
            tokens = tokens.masked_fill(~valid_positions(lengths, x.size(1)), 0)
        return self.embedding(tokens)  # (B, N) -> (B, N, E)

    def _pool(self, hidden: Tensor, lengths: Tensor | None) -> Tensor:
        """(B, N, E) -> (B, E). The backbone's outputs are 0 in the padding."""
        lengths = valid_lengths(lengths, hidden)
        if self.pooling == "last":
            last = (lengths - 1).clamp(min=0)[:, None, None].expand(-1, 1, hidden.size(2))  # (B, 1, E)
            return hidden.gather(1, last)[:, 0]
        total = hidden.sum(1, dtype=accumulator(hidden.dtype))
        return (total / lengths.clamp(min=1)[:, None]).to(hidden.dtype)

    def _pool_pieces(self, hidden: Tensor, lengths: Tensor | None, starts: Tensor) -> Tensor:
        """(B, N, E) -> (S, E), a row for each sequence. The backbone's outputs are 0 in the padding."""
        begins = first_positions(starts, lengths).flatten()
        piece = begins.cumsum(0) - 1  # (B N,), of each position; padding belongs to the piece before it
        valid = valid_positions(valid_lengths(lengths, hidden), hidden.size(1)).flatten()
        first = begins.nonzero()[:, 0]  # (S,)
        sizes = torch.zeros_like(first).index_add(0, piece, valid.long())
        outputs = hidden.flatten(0, 1)  # (B, N, E) -> (B N, E)
        if self.pooling == "last":
            return outputs[first + sizes - 1]
        total = outputs.new_zeros(len(first), outputs.size(1), dtype=accumulator(hidden.dtype))
        return (total.index_add(0, piece, outputs.to(total.dtype)) / sizes[:, None]).to(hidden.dtype)

    def objective(self, batch: Any, memory: State | None = None) -> Objective:
        """Return the mean over the batch's sequences, in nats, with auxiliary losses. There is no memory."""
        batch = as_labelled(batch)
        labels = batch.labels
        assert labels is not None  # see `check_batch`
        logits, state = self._logits(batch, memory)
        loss = F.cross_entropy(logits, labels.long(), label_smoothing=self.label_smoothing)
        correct = (logits.detach().argmax(-1) == labels).to(logits.dtype)
        figures = {"train/loss": loss.detach(), "train/accuracy": correct.mean()}
        n_scored = torch.full((), labels.size(0), device=loss.device)
        return self.with_auxiliary(loss, figures, state, n_scored=n_scored, n_sequences=n_scored)

    def score(self, stage: str, batch: Any) -> dict[str, Any]:
        """Update the loss and the accuracy, and in test the number of sequences."""
        batch = as_labelled(batch)
        labels = batch.labels
        assert labels is not None  # see `check_batch`
        log_probs = self._logits(batch)[0].log_softmax(-1)
        metrics: Any = self.scores[stage]
        metrics["loss"](F.nll_loss(log_probs, labels.long(), reduction="none"))
        metrics["accuracy"](log_probs.argmax(-1) == labels)
        if stage != "test":
            return {"loss": metrics["loss"], "accuracy": metrics["accuracy"]}
        metrics["sequences"](labels)
        return dict(metrics.items())

    # -------------------------------------------------------------------------------------------------- predictions

    def predict_step(self, batch: Any) -> dict[str, Tensor]:
        """Return the likeliest class of each sequence.

        Args:
            batch: As in training, or x alone; the labels may be None.

        Returns:
            `class` and `probability`, (B,); `label` and `index`, (B,), if the batch has labels and indices.
        """
        x, labels, lengths, indices, starts = as_labelled(batch)
        log_p, classes = self(x, lengths, starts).max(-1)
        columns = {"class": classes, "probability": log_p.exp(), "label": labels, "index": indices}
        return {name: column for name, column in columns.items() if column is not None}

    write_predictions = write_classes

    def check_batch(self, batch: Any) -> None:
        """Raise ValueError unless the model can read sequences and labels: see `Task.check_batch`."""
        x, labels, lengths, _, starts = as_labelled(batch)
        self._check_sequences(x, lengths)
        if labels is None:
            raise ValueError("the batch has no labels; without labels, only predict can read it")
        if starts is None:
            _check_row_integers("labels", labels, x)
        elif reads_values(starts) and labels.shape != (n := int(first_positions(starts, lengths).sum()),):
            raise ValueError(f"labels has shape {tuple(labels.shape)}, but {n} sequences start; expected ({n},)")
        n = len(self.classes)
        check_integers(labels, "label", 0, n - 1, f"{n} classes")

    def _check_sequences(self, x: Tensor, lengths: Tensor | None) -> None:
        tokens = self.vocab_size is not None
        fits = x.dim() == 2 and not x.is_floating_point() if tokens else x.dim() == 3 and x.size(2) == self.n_features
        if not fits:
            expected = "integers of shape (batch, length)" if tokens else f"shape (batch, length, {self.n_features})"
            option = f"vocab_size={self.vocab_size}" if tokens else f"n_features={self.n_features}"
            raise ValueError(
                f"x is {x.dtype} of shape {tuple(x.shape)}, but a model with {option} reads {expected}; tokens need "
                "vocab_size, feature vectors n_features"
            )
        if lengths is not None:
            _check_row_integers("lengths", lengths, x)
            if reads_values(lengths) and (lengths < 1).any():
                raise ValueError(f"lengths is {lengths.tolist()}; leave out sequences without a position")
        if self.vocab_size is not None and reads_values(x):
            valid = x if lengths is None else x[valid_positions(lengths, x.size(1))]
            check_tokens(valid, self.vocab_size)


def _check_row_integers(name: str, values: Tensor, x: Tensor) -> None:
    """Raise ValueError unless `values` are integers, one for each row of `x`."""
    if values.shape != x.shape[:1] or values.is_floating_point():
        raise ValueError(
            f"{name} is {values.dtype} of shape {tuple(values.shape)}; expected integers of shape ({len(x)},)"
        )


def as_labelled(batch: Any) -> LabelledBatch:
    """Return a batch as a `LabelledBatch`.

    Args:
        batch: A `LabelledBatch`, a tuple or list `(x, labels)` or `(x, labels, lengths)`, or x alone.

    Raises:
        ValueError: If `batch` is something else.
    """
    if isinstance(batch, LabelledBatch):
        return batch
    if isinstance(batch, Tensor):
        return LabelledBatch(batch)
    if not isinstance(batch, (tuple, list)) or len(batch) not in (2, 3):
        given = f"{type(batch).__name__} of {len(batch)}" if hasattr(batch, "__len__") else type(batch).__name__
        raise ValueError(f"a batch is {given}; expected a LabelledBatch, (x, labels) or (x, labels, lengths)")
    return LabelledBatch(*batch)


def _check_classes(classes: Sequence[str]) -> None:
    if len(classes) < 2:
        raise ValueError(f"classes={tuple(classes)} names fewer than two classes; name all classes of the data")
    if len(set(classes)) < len(classes):
        duplicate = next(name for i, name in enumerate(classes) if name in classes[:i])
        raise ValueError(f"classes names {duplicate!r} twice; give each class its own name")


def _check_input(vocab_size: int | None, n_features: int | None) -> None:
    if (vocab_size is None) == (n_features is None):
        raise ValueError(
            f"vocab_size={vocab_size} and n_features={n_features}: give vocab_size if sequences are tokens, n_features "
            "if they are feature vectors"
        )
    at_least(1, vocab_size=vocab_size, n_features=n_features)
