"""lit-effattn: train, resume, test and sample models whose attention costs less than N², on PyTorch Lightning."""

from importlib.metadata import version

from lit_effattn.lstm import LSTM
from lit_effattn.tasks import LanguageModel, PixelModel, SpeechRecognizer
from lit_effattn.transformer import Transformer

__version__ = version("lit-effattn")
__all__ = ["LSTM", "LanguageModel", "PixelModel", "SpeechRecognizer", "Transformer", "__version__"]
