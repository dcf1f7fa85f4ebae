"""Recognition of phonemes."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from lit_effattn.checks import at_least, positive, probabilities
from lit_effattn.datamodules.speech.utterances import SpeechBatch
from lit_effattn.nn.front_ends import FrontEndFactory, Projection
from lit_effattn.nn.look_ahead import LookAhead
from lit_effattn.sequence import SequenceModule, State, accumulator, reads_values, valid_positions
from lit_effattn.tasks.base import Objective, Task, check_backbone, check_fields, check_integers
from lit_effattn.tasks.ctc import Decoder, GreedyDecoder, align, ctc_nll
from lit_effattn.tasks.metrics import Count, ErrorRate, NatsPerUnit, for_stages
from lit_effattn.tasks.predictions import PICTURES, Transcript, write_transcripts


class SpeechRecognizer(Task):
    """Recognises the phones of an utterance, by connectionist temporal classification.

        −ln p(y|x) = −ln Σ_{π ∈ B⁻¹(y)} Π_t p_t(π_t),  p_t = softmax(W h_t + b)          Graves et al. 2006, equation 3
        PER = Σ edits / Σ reference phones                        with h = backbone(front_end(x)); see `ctc`

    A batch is a `SpeechBatch`. Metrics are the phoneme error rate, as a fraction, `per`; −ln p in nats a phone, `loss`;
    the number of `utterances`; and the number of `impossible` ones, which have fewer frames than their labels need, and
    therefore no loss. The error rate includes them.

    Args:
        backbone: Mixes the frames. Not causal, except for recognition during speech.
        n_mels: Width of a feature vector. From the command: that of the data.
        phones: Names of the labels 1, 2, …; 0 is the blank. From the command: those of the data.
        folded: The name of each phone in the error rate, for hypothesis and reference alike; "": not counted. Default:
            `phones`. From the command: that of the data.
        frame_seconds: Time from one feature vector to the next. From the command: that of the data.
        front_end: Maps feature vectors to the model's input. Default: Projection.
        decoder: Chooses the phones. Default: GreedyDecoder.
        look_ahead: n, the number of frames of the model after frame t that its output depends on, with a causal
            backbone: see `LookAhead`. n frames of zeros follow the last frame. A stream returns each output n frames
            later.
        label_smoothing: ε of the training loss: (1 − ε) times the loss above, and ε times that of uniformly drawn
            alignments, −Σ_t Σ_v ln p_t(v) / V.
        options: Arguments of `Task`: the optimiser and its schedule, and the weight of auxiliary losses.

    Raises:
        ValueError: If an option is out of range, `phones` and `folded` do not match, or `look_ahead` is given with a
            backbone that is not causal.
    """

    monitor = "val/per"
    fixed_by_data = ("n_mels", "phones", "folded", "frame_seconds")
    numbering = ("phones",)

    def __init__(
        self,
        backbone: SequenceModule,
        n_mels: int,
        phones: tuple[str, ...],
        folded: tuple[str, ...] | None = None,
        frame_seconds: float = 0.01,
        front_end: FrontEndFactory | None = None,
        decoder: Decoder | None = None,
        look_ahead: int = 0,
        label_smoothing: float = 0.0,
        **options: Any,
    ) -> None:
        check_backbone(backbone)
        super().__init__(**options)
        self.phones = tuple(phones)
        self.folded = self.phones if folded is None else tuple(folded)
        _check_phones(self.phones, self.folded)
        at_least(1, n_mels=n_mels)
        at_least(0, look_ahead=look_ahead)
        if look_ahead and not backbone.causal:
            raise ValueError(
                f"look_ahead={look_ahead} does not apply to a backbone with causal=False, which sees the whole "
                "recording; leave it out, or set causal=True"
            )
        positive(frame_seconds=frame_seconds)
        probabilities(label_smoothing=label_smoothing)
        self.n_mels = n_mels
        self.frame_seconds = frame_seconds
        self.look_ahead = look_ahead
        self.label_smoothing = label_smoothing
        # Not as the arguments' defaults: see `Task`.
        self.front_end = (front_end or Projection)(n_mels, backbone.d_input)
        self.decoder = decoder or GreedyDecoder()
        self.backbone = LookAhead(backbone, look_ahead) if look_ahead else backbone
        self.output = nn.Linear(backbone.d_model, len(self.phones) + 1)
        figures = {"loss": NatsPerUnit, "per": ErrorRate, "utterances": Count, "impossible": Count}
        self.scores = for_stages(figures)

    def forward(self, batch: SpeechBatch) -> tuple[Tensor, Tensor]:
        """Return ln p_t of the blank and every phone, (B, T', 1 + phones), and each row's frames T', (B,)."""
        self.check_batch(batch)
        return self.log_probs(self.hidden(batch)[0]), self._frames(batch)

    def hidden(self, batch: SpeechBatch, memory: State | None = None) -> tuple[Tensor, State]:
        """Return the backbone's output (B, T', d_model), continuing from `memory`, and its state at the end.

        With `look_ahead` the state is that after the frames of zeros.
        """
        x, lengths = self.front_end(batch.features, batch.lengths)  # (B, T', d_input), 0 in the padding
        hidden, state = self.backbone(F.pad(x, (0, 0, 0, self.look_ahead)), memory, lengths + self.look_ahead)
        return hidden[:, self.look_ahead :], state

    def log_probs(self, hidden: Tensor) -> Tensor:
        """Return ln p_t of the blank and every phone, (B, T, 1 + phones), from the output of the backbone."""
        logits = self.output(hidden)
        return logits.to(accumulator(logits.dtype)).log_softmax(-1)

    @property
    def subsampling(self) -> int:
        """Number of feature vectors per frame of the model. `SpeechData` reads it."""
        return self.front_end.factor

    def _frames(self, batch: SpeechBatch) -> Tensor:
        """Return the number of frames of each row, ⌈lengths / factor⌉: (B,)."""
        return (batch.lengths + self.subsampling - 1) // self.subsampling

    def objective(self, batch: SpeechBatch, memory: State | None = None) -> Objective:
        """Return the batch's loss in nats a phone, with auxiliary losses. Rows without an alignment have none."""
        hidden, state = self.hidden(batch, memory)
        log_probs, lengths = self.log_probs(hidden), self._frames(batch)
        nats, possible = ctc_nll(log_probs, lengths, batch.phones, batch.phone_lengths)
        phones = batch.phone_lengths.masked_fill(~possible, 0).sum().clamp(min=1)
        figures = {"train/loss": nats.detach().sum() / phones}
        if self.label_smoothing:
            uniform = -log_probs.mean(-1).masked_fill(~valid_positions(lengths, log_probs.size(1)), 0).sum(1)  # (B,)
            nats = (1 - self.label_smoothing) * nats + self.label_smoothing * uniform.masked_fill(~possible, 0)
        return self.with_auxiliary(nats.sum() / phones, figures, state, n_scored=phones * possible.any())

    def score(self, stage: str, batch: SpeechBatch) -> dict[str, Any]:
        """Update the loss, the phoneme error rate, and the counts of all and of impossible utterances."""
        log_probs, lengths = self(batch)
        nats, possible = ctc_nll(log_probs, lengths, batch.phones, batch.phone_lengths)
        hypotheses = self.decoder(log_probs, lengths, self.phones)
        metrics: Any = self.scores[stage]
        metrics["loss"](nats[possible], batch.phone_lengths[possible])
        metrics["per"]([self.fold(labels) for labels in hypotheses], [[self.fold(r)] for r in _references(batch)])
        metrics["utterances"](nats)
        metrics["impossible"](nats[~possible])
        return dict(metrics.items())

    def fold(self, labels: list[int]) -> list[str]:
        """Return the names of labels in the error rate: see `folded`."""
        return [self.folded[label - 1] for label in labels if self.folded[label - 1]]

    # ------------------------------------------------------------------------------------------------- transcripts

    def predict_step(self, batch: SpeechBatch, batch_idx: int = 0) -> list[Transcript]:
        """Recognise each utterance.

        Returns:
            A `Transcript` for each utterance. Its entry has `id`; `seconds`, the utterance's length; `phones`, a list
            of `phone`, `start` and `end` in seconds and `confidence`; and `reference`, the spoken phones, if they are
            known. Start and end are those of the phone's run of frames in the likeliest alignment, which covers only a
            part of the phone (see `ctc.align`); the confidence is the phone's mean probability over the run.
        """
        log_probs, lengths = self(batch)
        labels = self.decoder(log_probs, lengths, self.phones)
        return [
            self._transcript(batch, row, log_probs[row, :n].cpu(), labels[row], batch_idx == 0 and row < PICTURES)
            for row, n in enumerate(lengths.tolist())
        ]

    def _transcript(
        self, batch: SpeechBatch, row: int, log_probs: Tensor, labels: list[int], drawn: bool
    ) -> Transcript:
        n = int(batch.lengths[row])
        entry: dict[str, Any] = {
            "id": batch.ids[row],
            "seconds": round(n * self.frame_seconds, 3),
            "phones": [
                {
                    "phone": self.phones[span.token - 1],
                    "start": self._seconds(span.start, n),
                    "end": self._seconds(span.end, n),
                    "confidence": round(span.score, 4),
                }
                for span in align(log_probs, labels)
            ],
        }
        if batch.phone_lengths[row]:
            entry["reference"] = [self.phones[label - 1] for label in _references(batch)[row]]
        if not drawn:
            return Transcript(entry)
        return Transcript(entry, batch.features[row, :n].float().cpu(), log_probs.exp())

    def _seconds(self, frame: int, n: int) -> float:
        """Return the time at which a frame of the model begins, in an utterance of `n` feature vectors."""
        return round(min(frame * self.front_end.factor, n) * self.frame_seconds, 3)

    write_predictions = write_transcripts

    def check_batch(self, batch: SpeechBatch) -> None:
        """Raise ValueError unless the model can read features and labels: see `Task.check_batch`."""
        check_fields(batch, SpeechBatch)
        if batch.features.size(-1) != self.n_mels:
            raise ValueError(
                f"features have width {batch.features.size(-1)}, but the model has n_mels={self.n_mels}; use the "
                "same for both"
            )
        if reads_values(batch.phones):
            labels = batch.phones[valid_positions(batch.phone_lengths, batch.phones.size(1))]
            check_integers(labels, "label", 1, len(self.phones), f"{len(self.phones)} phones")


def _references(batch: SpeechBatch) -> list[list[int]]:
    return [labels[:n] for labels, n in zip(batch.phones.tolist(), batch.phone_lengths.tolist(), strict=True)]


def _check_phones(phones: tuple[str, ...], folded: tuple[str, ...]) -> None:
    if not phones:
        raise ValueError("phones is empty; name the phones to recognise")
    duplicates = sorted({phone for phone in phones if phones.count(phone) > 1})
    if duplicates:
        raise ValueError(f"phones names {', '.join(duplicates)} more than once; give each phone one label")
    if len(folded) != len(phones):
        raise ValueError(f"folded has {len(folded)} entries for {len(phones)} phones; give one each")
