"""Speech: corpora, features, augmentation."""

from lit_effattn.datamodules.speech.speech_data import SpeechData

__all__ = ["SpeechData"]
