"""One LightningModule a task."""

from lit_effattn.tasks.base import Task
from lit_effattn.tasks.language import LanguageModel
from lit_effattn.tasks.pixels import PixelModel

__all__ = ["LanguageModel", "PixelModel", "Task"]
