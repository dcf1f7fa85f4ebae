"""lit-effattn: train, resume, test and sample models whose attention costs less than N², on PyTorch Lightning.

What is exported here is imported when it is first asked for: `import lit_effattn.attention` loads PyTorch alone.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_effattn.nn.encoder_decoder import EncoderDecoder
    from lit_effattn.nn.lstm import LSTM
    from lit_effattn.nn.transformer import Transformer
    from lit_effattn.tasks import LanguageModel, PixelModel, SequenceClassifier, SequenceToSequence, SpeechRecognizer

    __version__: str

__all__ = [
    "LSTM",
    "EncoderDecoder",
    "LanguageModel",
    "PixelModel",
    "SequenceClassifier",
    "SequenceToSequence",
    "SpeechRecognizer",
    "Transformer",
    "__version__",
]

_MODULES = {
    "EncoderDecoder": "lit_effattn.nn.encoder_decoder",
    "LSTM": "lit_effattn.nn.lstm",
    "LanguageModel": "lit_effattn.tasks",
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
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault(name, getattr(importlib.import_module(_MODULES[name]), name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _OldNames:
    """Import hook: `import lit_effattn.positions` gives the module of the new name, with a warning that says it."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not name.startswith("lit_effattn."):
            return None
        from lit_effattn.checkpoints.allowlist import moved

        return None if moved(name) == name else ModuleSpec(name, _OldNames)  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType | None:
        return None

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        from lit_effattn.checkpoints.allowlist import moved

        name = module.__name__
        warnings.warn(f"{name} is now {moved(name)}; use the new name", FutureWarning, stacklevel=2)
        sys.modules[name] = importlib.import_module(moved(name))


sys.meta_path.append(_OldNames)  # after all other finders: for modules that do not exist
