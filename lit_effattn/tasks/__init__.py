"""One LightningModule a task."""

from lit_effattn.tasks.base import Task
from lit_effattn.tasks.pixels import PixelModel

__all__ = ["PixelModel", "Task"]
