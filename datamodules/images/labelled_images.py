"""Images as sequences of integer levels, each with its class."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lit_effattn.datamodules.common.labelled import LabelledBatch, warn_of_untrained
from lit_effattn.datamodules.common.sampling import digest
from lit_effattn.datamodules.images import sources as image_sources
from lit_effattn.datamodules.images.pixels import PixelDataset, PixelSequences

_DIGITS = tuple("0123456789")
_CLASSES = {
    "digits": _DIGITS,
    "mnist": _DIGITS,
    "fashion_mnist": (
        *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
        *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    ),
    "cifar10": ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
}


class LabelledImages(PixelSequences):
    """The images of `PixelSequences` with their classes, in the same splits, for classification.

    A batch is a `LabelledBatch` whose `x` is what `PixelSequences` gives: (B, N) of uint8, N = H·W·C, with levels 0 to
    `n_levels - 1` in raster order. The classes of `dataset="folder"` are its subfolders: `cat/1.png`, or
    `train/cat/1.png`, `val/cat/2.png` and `test/cat/3.png` if the splits have folders.

    The arguments are those of `PixelSequences`.
    """

    n_features = None
    """None: the sequences are tokens."""

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of their labels. Those of a folder are sorted.

        Raises:
            FileNotFoundError: If the folder is missing.
            ValueError: If an image of the folder is not in a subfolder, or there are fewer than two classes.
        """
        if self.dataset == "folder":
            return _class_folders(self.root, self._folder[0])
        return _CLASSES[self.dataset]

    @property
    def vocab_size(self) -> int:
        """Number of tokens: `n_levels`."""
        return self.n_levels

    @property
    def shape(self) -> tuple[int, ...]:
        """Height, width and channels: `image_shape`."""
        return self.image_shape

    def _load(self, test: bool) -> dict[str, Any]:
        classes = self.classes  # checked before anything is read
        splits = super()._load(test)
        if self.dataset == "folder":
            labels = {
                split: torch.tensor([classes.index(_class_of(self.root, path)) for path in images.paths])
                for split, images in splits.items()
            }
        else:
            labels = image_sources.labels(self.dataset, self.root, test)
        return {split: _Labelled(images, labels[split]) for split, images in splits.items()}

    def _log_sizes(self, splits: tuple[str, ...]) -> None:
        super()._log_sizes(splits)
        if self.dataset == "folder":  # the others have all classes
            by_split: dict[str, Any] = self.splits
            warn_of_untrained(splits, {s: of_one.labels.tolist() for s, of_one in by_split.items()}, self.classes)


@dataclass(eq=False)
class _Labelled(Dataset[LabelledBatch]):
    """A data set that maps a list of indices to a batch."""

    images: PixelDataset
    labels: Tensor  # (n,)

    def __len__(self) -> int:
        return len(self.images)

    @property
    def identity(self) -> dict[str, Any]:
        """The identity of the images, and a digest of their labels."""
        return {**self.images.identity, "labels": digest(self.labels.numpy())}

    def __getitem__(self, indices: list[int]) -> LabelledBatch:
        rows = torch.tensor(indices) % len(self)  # index i + len is image i mirrored
        return LabelledBatch(self.images[indices], self.labels[rows], indices=rows)


def _class_of(root: Path, path: Path) -> str:
    """Return the subfolder of `root`, or of its split, that `path` is in; "" if there is none."""
    folders = path.relative_to(root).parts[1 if (root / "train").is_dir() else 0 : -1]
    return folders[0] if folders else ""


def _class_folders(root: Path, splits: dict[str, list[Path]]) -> tuple[str, ...]:
    names = set()
    for path in (path for paths in splits.values() for path in paths):
        name = _class_of(root, path)
        if not name:
            raise ValueError(f"{path} has no class; put it into a subfolder named after its class, as cat/1.png")
        names.add(name)
    if len(names) < 2:
        raise ValueError(f"{root}: {', '.join(names)} is the only class; add a subfolder for each other class")
    return tuple(sorted(names))
