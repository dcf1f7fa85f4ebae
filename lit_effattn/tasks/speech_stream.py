"""Recognition of phones while somebody speaks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_effattn.datamodules.speech.filterbanks import (
    Filterbanks,
    RunningNormalization,
    StreamingFilterbanks,
    normalized,
)
from lit_effattn.nn.front_ends import FrontEndStream
from lit_effattn.sequence import State
from lit_effattn.tasks.ctc import Decoder
from lit_effattn.tasks.speech import SpeechRecognizer


class RecognizedPhone(NamedTuple):
    """A phone of a stream.

    Attributes:
        phone: Its name.
        start: Start of its first frame in seconds from the beginning of the stream.
        confidence: Its probability at that frame.
    """

    phone: str
    start: float
    confidence: float


class KeptStream(NamedTuple):
    """The position of a stream of sound, from which it can go on: see `SpeechStream.kept`.

    Attributes:
        samples: (n,), samples of the frame that is not complete yet. None: nothing was read.
        moments: (3, F), of the frames so far. None: `normalize` has no running statistics.
        features: (1, K, F), feature vectors that the front end needs. None: nothing was read.
        counts: (5,) integers: two of the front end, the outputs to be dropped, the last label, the number of outputs.
        state: The backbone's.
    """

    samples: Tensor | None
    moments: Tensor | None
    features: Tensor | None
    counts: Tensor
    state: State | None


class StreamFeatures(NamedTuple):
    """The features of a stream of sound.

    Attributes:
        filterbanks: Computes them.
        statistics: (3, F), `moments` of the training data for their normalisation. None: there are none.
        running: Whether they are normalised by the statistics of the sound so far.
    """

    filterbanks: Filterbanks
    statistics: Tensor | None = None
    running: bool = False

    def normalization(self) -> Callable[[Tensor], Tensor] | None:
        """Return a function that normalises the next frames (T, F) of a new stream; None: they stay as they are."""
        if self.running:
            return RunningNormalization()
        return None if self.statistics is None else partial(normalized, statistics=self.statistics)


def stream_features(saved: Mapping[str, Any], name: str, normalize: str | None = None) -> StreamFeatures | None:
    """Return the features of the `SpeechData` that a model was trained with; None if it had other data.

    Args:
        saved: A checkpoint of the model.
        name: Its name in messages.
        normalize: "running": normalise by the statistics of the sound so far. None: as in training.

    Raises:
        ValueError: If the statistics look ahead, or are missing.
    """
    options = saved.get("datamodule_hyper_parameters")
    options = options if isinstance(options, dict) else {}
    sample_rate, n_mels = options.get("sample_rate"), options.get("n_mels")
    if type(sample_rate) is not int or type(n_mels) is not int:
        return None
    banks = Filterbanks(sample_rate, n_mels=n_mels)
    chosen = normalize or options.get("normalize")
    if chosen == "running":
        return StreamFeatures(banks, running=True)
    if chosen is None:
        return StreamFeatures(banks)
    if chosen != "corpus":
        raise ValueError(
            f"{name}: it was trained with normalize={chosen!r}, whose statistics look ahead; train with "
            "--data.normalize corpus, or give --normalize running, with statistics of the sound so far and more errors "
            "in the first seconds"
        )
    # Its key is the name of the data's class, which may be a subclass of `SpeechData`.
    states = (part for part in saved.values() if isinstance(part, dict) and {"features", "statistics"} <= part.keys())
    statistics = next(states, {}).get("statistics")
    if not isinstance(statistics, Tensor) or statistics.shape != (3, n_mels):
        raise ValueError(f"{name}: it lacks the statistics of its training data; use a checkpoint of a training run")
    return StreamFeatures(banks, statistics)


def check_causal(model: SpeechRecognizer) -> None:
    """Raise ValueError unless the backbone of `model` is causal."""
    if not model.backbone.causal:
        raise ValueError(
            "the model's backbone has causal=False, so it needs the whole recording: use `predict`, or train with "
            "--model.backbone.causal true"
        )


class SpeechStream:
    """Recognises phones in a stream of samples.

    An output never changes later. The phones are those that the decoder finds in the whole recording, for any division
    into pieces, unless a module of the backbone has `depends_on_split`: TransformerXLAttention without `same_length`,
    where a position sees all of its piece. `GreedyDecoder` returns a phone as soon as its first frame is known,
    `BeamDecoder` when all hypotheses of its search agree on it. The delay of a frame is that of a frame of the
    filterbanks (25 ms), the front end's `context` and `factor`, and the model's `look_ahead`. The memory is that of the
    backbone's state, constant for kinds whose state is bounded, and of the search.

    Attributes:
        state: The state of the backbone. None: nothing was read.

    Args:
        model: A recogniser with a causal backbone. It is put in evaluation mode.
        filterbanks: As in training.
        normalize: Normalises the next frames (T, F), such as `RunningNormalization`. None: as they are.
        decoder: Chooses the phones. Default: the model's.

    Raises:
        ValueError: If the backbone is not causal, the front end or the decoder can't be applied to a stream, or the
            filterbanks have another number of filters than the model.
    """

    def __init__(
        self,
        model: SpeechRecognizer,
        filterbanks: Filterbanks,
        normalize: Callable[[Tensor], Tensor] | None = None,
        decoder: Decoder | None = None,
    ) -> None:
        check_causal(model)
        if filterbanks.n_mels != model.n_mels:
            raise ValueError(f"the filterbanks have n_mels={filterbanks.n_mels}, but the model n_mels={model.n_mels}")
        self.model = model.eval()
        self.normalize = normalize
        self._filterbanks = StreamingFilterbanks(filterbanks)
        self._front_end = FrontEndStream(model.front_end)
        self.state: State | None = None
        self._ahead = model.look_ahead  # number of outputs that are still to be dropped
        self._labels = (decoder or model.decoder).stream(model.phones)

    @property
    def kept(self) -> KeptStream:
        """The position of the stream. Setting it lets this stream, or another with the same options, go on from there.

        Raises:
            ValueError: If the decoder can't be kept: a beam search.
        """
        features, *front_end = self._front_end.kept
        counts = torch.tensor([*front_end, self._ahead, *self._labels.kept])
        moments = getattr(self.normalize, "moments", None)
        return KeptStream(self._filterbanks.samples, moments, features, counts, self.state)

    @kept.setter
    def kept(self, kept: KeptStream) -> None:
        first, n_frames, self._ahead, *labels = kept.counts.tolist()
        self._labels.kept = labels[0], labels[1]
        self._front_end.kept = kept.features, first, n_frames
        self._filterbanks.samples = kept.samples
        if isinstance(self.normalize, RunningNormalization):
            self.normalize.moments = kept.moments
        self.state = kept.state

    @property
    def options(self) -> dict[str, Any]:
        """The options on which `kept` depends, beside the model's."""
        banks, by_sound = self._filterbanks.filterbanks, isinstance(self.normalize, RunningNormalization)
        chosen = "running" if by_sound else "none" if self.normalize is None else "corpus"
        return {"sample_rate": banks.sample_rate, "filterbanks": repr(banks), "normalize": chosen}

    @torch.inference_mode()
    def log_probs(self, samples: Tensor, *, last: bool = False) -> Tensor:
        """Return ln p_t (n, V) of the next frames.

        Args:
            samples: (k,), the next samples in −1 … 1; k may be 0.
            last: Whether the stream ends with them.

        Raises:
            ValueError: If `samples` has another shape, or holds integers.
        """
        features = self._filterbanks(samples)
        features = features if self.normalize is None else self.normalize(features)
        frames = self._front_end(features[None].to(self.model.output.weight), last=last)
        if last and self.model.look_ahead:
            after = self.model.output.weight.new_zeros(1, self.model.look_ahead, self.model.backbone.d_input)
            frames = after if frames is None else torch.cat([frames, after], 1)
        if frames is None:
            return features.new_empty(0, len(self.model.phones) + 1)
        hidden, self.state = self.model.backbone(frames, self.state)
        log_probs = self.model.log_probs(hidden)[0].cpu()
        dropped = min(self._ahead, len(log_probs))
        self._ahead -= dropped
        return log_probs[dropped:]

    def __call__(self, samples: Tensor, *, last: bool = False) -> list[RecognizedPhone]:
        """Return the phones that are now known: see `log_probs`."""
        seconds = self.model.subsampling * self.model.frame_seconds
        return [
            RecognizedPhone(self.model.phones[label - 1], round(frame * seconds, 3), round(score, 4))
            for label, frame, score in self._labels(self.log_probs(samples, last=last), last=last)
        ]
