"""Data modules: one `LightningDataModule` per kind of data."""

from lit_effattn.datamodules.associative_recall import AssociativeRecall
from lit_effattn.datamodules.audio import AudioError, read_audio
from lit_effattn.datamodules.augment import SpecAugment
from lit_effattn.datamodules.copy_task import CopyTask
from lit_effattn.datamodules.corpora import EspeakCorpus, LibriSpeechCorpus, ManifestCorpus
from lit_effattn.datamodules.dialogue_task import DialogueTask
from lit_effattn.datamodules.dialogues import GroundedDialogues
from lit_effattn.datamodules.filterbanks import Filterbanks
from lit_effattn.datamodules.labelled import LabelledBatch, pad_labelled
from lit_effattn.datamodules.labelled_images import LabelledImages
from lit_effattn.datamodules.labelled_texts import LabelledTexts
from lit_effattn.datamodules.length_batches import LengthBatches
from lit_effattn.datamodules.phonemes import Lexicon, Pronouncer
from lit_effattn.datamodules.pixels import PixelSequences, images_to_levels, levels_to_images
from lit_effattn.datamodules.retrieval_task import RetrievalTask
from lit_effattn.datamodules.sampling import ResumableLoader, ShardedBatches
from lit_effattn.datamodules.sequence_pairs import SequencePairs
from lit_effattn.datamodules.sorting_task import SortingTask, counting_accuracy
from lit_effattn.datamodules.speech import SpeechData
from lit_effattn.datamodules.state_tracking import StateTracking
from lit_effattn.datamodules.text import TextStream
from lit_effattn.datamodules.timit import TimitCorpus
from lit_effattn.datamodules.tokens import IGNORE, PairBatch, Response, TokenBatch
from lit_effattn.datamodules.utterances import BLANK, SpeechBatch, SpeechCorpus, Utterance
from lit_effattn.datamodules.wave_augment import WaveAugment

__all__ = [
    "BLANK",
    "IGNORE",
    "AssociativeRecall",
    "AudioError",
    "CopyTask",
    "DialogueTask",
    "EspeakCorpus",
    "Filterbanks",
    "GroundedDialogues",
    "LabelledBatch",
    "LabelledImages",
    "LabelledTexts",
    "LengthBatches",
    "Lexicon",
    "LibriSpeechCorpus",
    "ManifestCorpus",
    "PairBatch",
    "PixelSequences",
    "Pronouncer",
    "Response",
    "ResumableLoader",
    "RetrievalTask",
    "SequencePairs",
    "ShardedBatches",
    "SortingTask",
    "SpecAugment",
    "SpeechBatch",
    "SpeechCorpus",
    "SpeechData",
    "StateTracking",
    "TextStream",
    "TimitCorpus",
    "TokenBatch",
    "Utterance",
    "WaveAugment",
    "counting_accuracy",
    "images_to_levels",
    "levels_to_images",
    "pad_labelled",
    "read_audio",
]
