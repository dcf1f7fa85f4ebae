"""One LightningModule a task."""

from lit_effattn.nn import adaptive, encoder_decoder, front_ends, lstm, transformer
from lit_effattn.tasks import schedules
from lit_effattn.tasks.base import Task
from lit_effattn.tasks.classification import SequenceClassifier
from lit_effattn.tasks.language import LanguageModel
from lit_effattn.tasks.masked import MaskedLanguageModel
from lit_effattn.tasks.pixels import PixelModel
from lit_effattn.tasks.pronouncer import TrainedPronouncer
from lit_effattn.tasks.sequence_to_sequence import SequenceToSequence
from lit_effattn.tasks.speech import SpeechRecognizer

__all__ = [
    "LanguageModel",
    "MaskedLanguageModel",
    "PixelModel",
    "SequenceClassifier",
    "SequenceToSequence",
    "SpeechRecognizer",
    "Task",
    "TrainedPronouncer",
]

_ENTERED = (adaptive, encoder_decoder, front_ends, lstm, schedules, transformer)
"""Modules whose classes a checkpoint of a task may name."""
