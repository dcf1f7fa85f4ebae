"""Data modules: one `LightningDataModule` per kind of data."""

from lit_effattn.datamodules.common.labelled import LabelledBatch, pad_labelled
from lit_effattn.datamodules.common.length_batches import LengthBatches
from lit_effattn.datamodules.common.packing import pack
from lit_effattn.datamodules.common.sampling import ResumableLoader, ShardedBatches
from lit_effattn.datamodules.common.tokens import IGNORE, PairBatch, Response, TokenBatch, pad_tokens
from lit_effattn.datamodules.images.labelled_images import LabelledImages
from lit_effattn.datamodules.images.pixels import PixelSequences, images_to_levels, levels_to_images
from lit_effattn.datamodules.pairs.labelled_texts import LabelledTexts
from lit_effattn.datamodules.pairs.sequence_pairs import SequencePairs
from lit_effattn.datamodules.speech.audio import AudioError, read_audio
from lit_effattn.datamodules.speech.augment import SpecAugment
from lit_effattn.datamodules.speech.corpora import EspeakCorpus, LibriSpeechCorpus, ManifestCorpus
from lit_effattn.datamodules.speech.filterbanks import Filterbanks
from lit_effattn.datamodules.speech.phonemes import Lexicon, Pronouncer
from lit_effattn.datamodules.speech.speech_data import SpeechData
from lit_effattn.datamodules.speech.timit import TimitCorpus
from lit_effattn.datamodules.speech.utterances import BLANK, SpeechBatch, SpeechCorpus, Utterance
from lit_effattn.datamodules.speech.wave_augment import WaveAugment
from lit_effattn.datamodules.synthetic.associative_recall import AssociativeRecall
from lit_effattn.datamodules.synthetic.copy_task import CopyTask
from lit_effattn.datamodules.synthetic.dialogue_task import DialogueTask
from lit_effattn.datamodules.synthetic.retrieval_task import RetrievalTask
from lit_effattn.datamodules.synthetic.sorting_task import SortingTask, counting_accuracy
from lit_effattn.datamodules.synthetic.state_tracking import StateTracking
from lit_effattn.datamodules.text.dialogues import GroundedDialogues
from lit_effattn.datamodules.text.text_stream import TextStream

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
    "pack",
    "pad_labelled",
    "pad_tokens",
    "read_audio",
]
