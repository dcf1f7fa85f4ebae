"""What the models learn from: one LightningDataModule a kind of data."""

from datamodules.audio import AudioError, read_audio
from datamodules.augment import SpecAugment
from datamodules.copy_task import CopyTask
from datamodules.corpora import EspeakCorpus, LibriSpeechCorpus, ManifestCorpus
from datamodules.filterbanks import Filterbanks
from datamodules.length_batches import LengthBatches
from datamodules.phonemes import Lexicon
from datamodules.pixels import PixelSequences, images_to_levels, levels_to_images
from datamodules.sampling import ResumableLoader, ShardedBatches
from datamodules.sorting_task import SortingTask, counting_accuracy
from datamodules.speech import SpeechData
from datamodules.text import TextStream
from datamodules.timit import TimitCorpus
from datamodules.tokens import IGNORE, TokenBatch
from datamodules.utterances import BLANK, SpeechBatch, SpeechCorpus, Utterance

__all__ = [
    "BLANK",
    "IGNORE",
    "AudioError",
    "CopyTask",
    "EspeakCorpus",
    "Filterbanks",
    "LengthBatches",
    "Lexicon",
    "LibriSpeechCorpus",
    "ManifestCorpus",
    "PixelSequences",
    "ResumableLoader",
    "ShardedBatches",
    "SortingTask",
    "SpecAugment",
    "SpeechBatch",
    "SpeechCorpus",
    "SpeechData",
    "TextStream",
    "TimitCorpus",
    "TokenBatch",
    "Utterance",
    "counting_accuracy",
    "images_to_levels",
    "levels_to_images",
    "read_audio",
]
