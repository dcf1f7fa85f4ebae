"""Streaming steps as modules of tensors alone, which other programs can run.

    log_probs, *state = step(*inputs, *state)

All shapes are fixed. `LanguageModel` and `PixelModel` read one token of each row, `SpeechRecognizer` the sound of one
frame.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lit_effattn.datamodules.speech.filterbanks import EPSILON, PREEMPHASIS, SCALE, Filterbanks, normalized, running
from lit_effattn.nn.heads import Head
from lit_effattn.sequence import SequenceModule, State, map_tensors, tensors
from lit_effattn.tasks import LanguageModel, PixelModel, SpeechRecognizer
from lit_effattn.tasks.speech_stream import StreamFeatures, check_causal


class Step(nn.Module, ABC):
    """One step of a stream: `log_probs, *state = step(*inputs, *state)`."""

    inputs: dict[str, Tensor]  # an example of each input by name, with the batch as first dimension
    empty: State  # the state before the first step, with final shapes
    entry: nn.Module  # the first module, which reads the inputs
    backbone: SequenceModule  # mixes the sequence
    unit: str  # what a step reads of each row

    @abstractmethod
    def draw(self, n: int, generator: torch.Generator) -> Iterator[tuple[Tensor, ...]]:
        """Draw the inputs of `n` steps."""


class TokenStep(Step):
    """One token of each row: `log_probs, *state = step(tokens, *state)`, of the next token."""

    unit = "token"

    def __init__(self, task: LanguageModel | PixelModel, empty: State) -> None:
        super().__init__()
        self.entry: nn.Module = task.embedding
        self.scale: float = getattr(task, "embedding_scale", 1.0)
        self.backbone: SequenceModule = task.backbone
        self.head: Head = task.head
        self.empty = empty
        self.inputs = {"tokens": torch.zeros(next(tensors(empty)).size(0), 1, dtype=torch.long)}

    def forward(self, tokens: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """(B, 1) -> (B, n_levels) log-probabilities of the next token, and the tensors of the next state."""
        x = self.scale * self.entry(tokens)  # (B, 1, d_input)
        y, after = self.backbone(x, with_tensors(self.empty, state))  # (B, 1, E)
        return self.head.log_probs(y[:, -1]), *_outputs(after, state)

    def draw(self, n: int, generator: torch.Generator) -> Iterator[tuple[Tensor, ...]]:
        """Draw random tokens."""
        for tokens in torch.randint(0, self.head.n_levels, (n, *self.inputs["tokens"].shape), generator=generator):
            yield (tokens,)


class SpeechState(NamedTuple):
    """The state of `SpeechStep`."""

    moments: Tensor | None  # (B, 3, F), float64, of the frames so far, for a running normalisation. None: there is none
    features: Tensor | None  # (B, K, F), feature vectors before, which the front end reads again. None: it reads none
    length: Tensor | None  # (B,), number of frames so far, at most the frames of `features`. None: as above
    backbone: State  # the state of the backbone


class SpeechStep(Step):
    """One frame of the model: `log_probs, *state = step(sound, lengths, *state)`.

    The sound is samples (B, S), S = (factor − 1) · hop + frame, or feature vectors (B, factor, F). The next step's
    samples begin factor · hop later. `lengths` (B,) is the number of valid feature vectors, or of those that are made
    of valid samples: factor; at the end of the sound less; 0 in the steps after the end, one for each frame of
    `look_ahead`. The log-probabilities (B, V) are those of `look_ahead` frames before, so the first `look_ahead` ones
    are to be ignored. A backbone whose state grows needs `max_len`, the number of frames of a stream. Without
    `features`, the step reads features.

    Raises:
        ValueError: If the backbone is not causal, or the front end needs feature vectors of later frames.
    """

    unit = "frame"
    statistics: Tensor | None

    def __init__(
        self, task: SpeechRecognizer, batch_size: int, max_len: int | None, features: StreamFeatures | None
    ) -> None:
        super().__init__()
        check_causal(task)
        name, context, self.factor = type(task.front_end).__name__, task.front_end.context, task.subsampling
        if context is None or context[1] >= self.factor:
            raise ValueError(
                f"{name}: context={context}, so a frame depends on feature vectors of later frames; a step needs a "
                f"front end whose context ends at {self.factor - 1}, its factor less 1"
            )
        self.kept = -(-context[0] // self.factor)  # frames whose feature vectors are read again
        self.entry = task.front_end
        self.backbone = task.backbone
        self.task = task
        self.running = features is not None and features.running
        self.filterbanks = None if features is None else _FilterbankLayer(features.filterbanks, self.factor)
        self.register_buffer("statistics", None if features is None else features.statistics, persistent=False)
        if self.filterbanks is None:
            sound = {"features": torch.zeros(batch_size, self.factor, task.n_mels)}
        else:
            sound = {"samples": torch.zeros(batch_size, int(self.filterbanks.samples[-1, -1]) + 1)}
        self.inputs = sound | {"lengths": torch.full((batch_size,), self.factor)}
        self.empty = SpeechState(
            torch.zeros(batch_size, 3, task.n_mels, dtype=torch.double) if self.running else None,
            torch.zeros(batch_size, self.kept * self.factor, task.n_mels) if self.kept else None,
            torch.zeros(batch_size, dtype=torch.long) if self.kept else None,
            task.backbone.initial_state(batch_size, max_len=max_len),
        )

    def forward(self, sound: Tensor, lengths: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """(B, S) or (B, factor, F), and (B,) -> (B, V), and the tensors of the next state."""
        before: SpeechState = with_tensors(self.empty, state)
        x, moments = self._features(sound, before.moments)
        frame, features, length = self._frame(x, lengths, before)
        hidden, after = self.backbone(frame, before.backbone)  # (B, 1, E)
        return self.task.log_probs(hidden)[:, 0], *_outputs(SpeechState(moments, features, length, after), state)

    def _features(self, sound: Tensor, moments: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return normalised feature vectors (B, factor, F), and the moments after them."""
        x = sound if self.filterbanks is None else self.filterbanks(sound)
        if moments is not None:
            sums = running(x, moments.transpose(0, 1))  # (3, B, factor, F)
            return normalized(x, sums), sums[:, :, -1].transpose(0, 1)
        return x if self.statistics is None else normalized(x, self.statistics), None

    def _frame(self, x: Tensor, lengths: Tensor, before: SpeechState) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the model's input (B, 1, d_input), and the feature vectors and their number of frames to be kept."""
        frame = self.entry(x, lengths)[0]
        if before.features is None or before.length is None:
            return frame, None, None
        features = torch.cat([before.features, x], 1)  # (B, (kept + 1) · factor, F)
        for n in range(1, self.kept + 1):  # frames before, as many as there are
            window = features[:, (self.kept - n) * self.factor :]
            longer = self.entry(window, n * self.factor + lengths)[0][:, n:]
            frame = torch.where((before.length >= n)[:, None, None], longer, frame)
        return frame, features[:, self.factor :], (before.length + 1).clamp(max=self.kept)

    def draw(self, n: int, generator: torch.Generator) -> Iterator[tuple[Tensor, ...]]:
        """Draw noise."""
        sound, lengths = self.inputs.values()
        for _ in range(n):
            yield torch.randn(sound.shape, generator=generator) / (10 if self.filterbanks is not None else 1), lengths


class _FilterbankLayer(nn.Module):
    """Computes `Filterbanks` by products of matrices: samples (B, S) -> (B, n, F), S = (n − 1) · hop + frame."""

    samples: Tensor
    transform: Tensor
    filters: Tensor

    def __init__(self, filterbanks: Filterbanks, n_frames: int) -> None:
        super().__init__()
        n = filterbanks.frame_samples
        starts = filterbanks.hop_samples * torch.arange(n_frames)
        weights = filterbanks.weights()  # (1 + size / 2, F)
        angles = torch.outer(torch.arange(n).double(), torch.arange(weights.size(0)).double())
        angles *= torch.pi / (weights.size(0) - 1)
        # Preemphasis y_i = x_i − .97 x_{i−1}, with x_{−1} = x_0, then the window and the Fourier transform.
        emphasis = torch.eye(n, dtype=torch.double) - PREEMPHASIS * torch.eye(n, dtype=torch.double).roll(1, 1)
        emphasis[0, 0], emphasis[-1, 0] = 1 - PREEMPHASIS, 0
        window = torch.hann_window(n, periodic=False, dtype=torch.double) ** 0.85
        transform = emphasis @ (window[:, None] * torch.cat([angles.cos(), angles.sin()], 1))
        self.register_buffer("samples", starts[:, None] + torch.arange(n), persistent=False)
        self.register_buffer("transform", transform.float(), persistent=False)
        self.register_buffer("filters", weights, persistent=False)

    def forward(self, samples: Tensor) -> Tensor:
        """See the class."""
        x = SCALE * samples[:, self.samples]  # (B, S) -> (B, n, frame)
        parts = (x - x.mean(-1, keepdim=True)) @ self.transform  # real and imaginary
        power = torch.stack(parts.chunk(2, -1)).square().sum(0)  # (B, n, 1 + size / 2)
        return (power @ self.filters).clamp(min=EPSILON).log()


def with_tensors(state: State, values: Iterable[Tensor]) -> State:
    """Return a state of the same structure with other tensors."""
    values = iter(values)
    return map_tensors(lambda _: next(values), state)


def _outputs(after: State, before: tuple[Tensor, ...]) -> Iterator[Tensor]:
    """Yield the tensors of a state. In ONNX an output must not be an input: those of `before` are copied."""
    for t in tensors(after):
        yield t.clone() if any(t is s for s in before) else t
