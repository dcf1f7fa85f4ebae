"""What the models learn from: one LightningDataModule a kind of data."""

from datamodules.copy_task import CopyTask
from datamodules.pixels import PixelSequences, images_to_levels, levels_to_images
from datamodules.sampling import ResumableLoader, ShardedBatches
from datamodules.sorting_task import SortingTask, counting_accuracy
from datamodules.text import TextStream
from datamodules.tokens import IGNORE, TokenBatch

__all__ = [
    "IGNORE",
    "CopyTask",
    "PixelSequences",
    "ResumableLoader",
    "ShardedBatches",
    "SortingTask",
    "TextStream",
    "TokenBatch",
    "counting_accuracy",
    "images_to_levels",
    "levels_to_images",
]
