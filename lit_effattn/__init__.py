"""lit-effattn: train, resume, test and sample models whose attention costs less than N², on PyTorch Lightning.

What is exported here is imported when it is first asked for: `import lit_effattn.attention` loads PyTorch alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_effattn.nn.encoder_decoder import EncoderDecoder
    from lit_effattn.nn.lstm import LSTM
    from lit_effattn.nn.transformer import Transformer
    from lit_effattn.tasks import (
        LanguageModel,
        MaskedLanguageModel,
        PixelModel,
        SequenceClassifier,
        SequenceToSequence,
        SpeechRecognizer,
    )

    __version__: str

__all__ = [
    "LSTM",
    "EncoderDecoder",
    "LanguageModel",
    "MaskedLanguageModel",
    "PixelModel",
    "SequenceClassifier",
    "SequenceToSequence",
    "SpeechRecognizer",
    "Transformer",
    "__version__",
]

EXPORTS = {
    "EncoderDecoder": "lit_effattn.nn.encoder_decoder",
    "LSTM": "lit_effattn.nn.lstm",
    "LanguageModel": "lit_effattn.tasks",
    "MaskedLanguageModel": "lit_effattn.tasks",
    "PixelModel": "lit_effattn.tasks",
    "SequenceClassifier": "lit_effattn.tasks",
    "SequenceToSequence": "lit_effattn.tasks",
    "SpeechRecognizer": "lit_effattn.tasks",
    "Transformer": "lit_effattn.nn.transformer",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("lit-effattn")
    if name not in EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault(name, getattr(importlib.import_module(EXPORTS[name]), name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
