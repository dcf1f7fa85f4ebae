"""What the models learn from: one LightningDataModule a kind of data."""

from datamodules.copy_task import CopyTask
from datamodules.pixels import PixelSequences, images_to_levels, levels_to_images
from datamodules.sampling import ResumableLoader, ShardedBatches

__all__ = ["CopyTask", "PixelSequences", "ResumableLoader", "ShardedBatches", "images_to_levels", "levels_to_images"]
