"""Images as sequences of integer levels, for autoregressive models."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.utils.data import Dataset

from lit_effattn.checks import applicable, at_least
from lit_effattn.datamodules.common.base import DataModule
from lit_effattn.datamodules.common.faults import Faults
from lit_effattn.datamodules.common.sampling import ShardedBatches, digest, processes
from lit_effattn.datamodules.common.splits import PURPOSES
from lit_effattn.datamodules.images import sources as image_sources


class _Kind(NamedTuple):
    shape: tuple[int, int, int] | None  # (H, W, C); None: given by the arguments
    n_levels: int
    options: tuple[str, ...]  # arguments that other kinds of data reject


_KINDS = {
    "digits": _Kind((8, 8, 1), 17, ()),
    "mnist": _Kind((28, 28, 1), 256, ("root", "download")),
    "fashion_mnist": _Kind((28, 28, 1), 256, ("root", "download")),
    "cifar10": _Kind((32, 32, 3), 256, ("root", "download", "flip")),
    "folder": _Kind(None, 256, ("root", "image_size", "channels", "verify", "flip", "max_pixels")),
}


class PixelSequences(DataModule):
    """Images as autoregressive sequences of integer levels.

    A batch is one tensor (B, N) of uint8, N = H·W·C, with levels 0 to `n_levels - 1` in raster order: row by row,
    pixel by pixel, with the channels (R, G, B) of each pixel in turn.

    The splits do not depend on `seed`, so different runs are scored on the same images. `predict` uses the test images.

    Args:
        dataset: digits: UCI's 1797 handwritten digits, 8×8×1 at 17 levels, 1437/180/180 for training, validation and
            test; needs no network. mnist, fashion_mnist: 28×28×1, 55,000/5,000/10,000. cifar10: 32×32×3,
            48,000/2,000/10,000. folder: any images; subfolders train, val and test are the splits, otherwise a fixed
            80/10/10 %.
        root: folder: folder of the images (png, jpg, jpeg, webp, bmp, gif, tif, tiff or ppm, in subfolders too).
            mnist, fashion_mnist, cifar10: folder of the files, unpacked or as archives, or for their download;
            default: data.
        batch_size: Images per step and process.
        eval_batch_size: The same in validation, test and prediction; default: `batch_size`.
        num_workers: Worker processes that load data; 0: none.
        n_levels: Number of levels after quantisation, from 2 to that of the data (digits 17, others 256), which is the
            default: level = ⌊value · n_levels / levels of the data⌋.
        flip: cifar10, folder: mirror each training image left to right with probability 1/2.
        seed: Seed of the order and the flips of the training images.
        image_size: folder: side of the square that images are resized to and centre-cropped; required.
        channels: folder: 3 for colour (default), 1 for grey.
        download: mnist, fashion_mnist, cifar10: download files that are missing; default: true.
        verify: folder: decode every image once before the run, to find broken ones early; default: true.
        max_pixels: folder: reject images with more pixels, which would exhaust the memory; at most 178,956,970,
            Pillow's limit; default: 67,108,864.

    Attributes:
        image_shape: Height, width and channels of an image.
        n_levels: Number of levels. Values are 0 to `n_levels - 1`.

    Raises:
        ValueError: If an argument is out of its range or does not apply to the data set.
    """

    def __init__(
        self,
        dataset: Literal["digits", "mnist", "fashion_mnist", "cifar10", "folder"] = "digits",
        *,
        root: str | None = None,
        batch_size: int = 32,
        eval_batch_size: int | None = None,
        num_workers: int = 0,
        n_levels: int | None = None,
        flip: bool = False,
        seed: int = 0,
        image_size: int | None = None,
        channels: Literal[1, 3] | None = None,
        download: bool | None = None,
        verify: bool | None = None,
        max_pixels: int | None = None,
    ) -> None:
        super().__init__(num_workers, seed)
        self.save_hyperparameters(logger=False)
        if not isinstance(dataset, str):
            raise ValueError(
                f"dataset must be a name, but is a {type(dataset).__name__}; choose one of {', '.join(_KINDS)}, or "
                "give the trainer a loader of your own, whose batches are integer levels (B, N)"
            )
        options = {"root": root, "image_size": image_size, "channels": channels, "download": download, "verify": verify}
        takes = {name: kind.options for name, kind in _KINDS.items()}
        applicable("dataset", dataset, takes, **options, flip=flip or None, max_pixels=max_pixels)
        at_least(1, batch_size=batch_size, eval_batch_size=eval_batch_size, image_size=image_size)
        at_least(1, max_pixels=max_pixels)
        if max_pixels is not None and max_pixels > image_sources.PILLOW_PIXELS:
            raise ValueError(f"max_pixels={max_pixels} must be at most {image_sources.PILLOW_PIXELS}, Pillow's limit")
        kind = _KINDS[dataset]
        if n_levels is not None and not 2 <= n_levels <= kind.n_levels:
            raise ValueError(
                f"n_levels={n_levels} must be between 2 and {kind.n_levels}, the levels of dataset={dataset!r}; "
                "leave it out to keep them all"
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.eval_batch_size = batch_size if eval_batch_size is None else eval_batch_size
        self.flip = flip
        self.root = Path("data" if root is None else root)
        self.download = download is not False
        self.verify = verify is not False
        self.max_pixels = image_sources.MAX_PIXELS if max_pixels is None else max_pixels
        self.splits: dict[str, PixelDataset] = {}
        self._logged: set[str] = set()
        self.n_levels: int = kind.n_levels if n_levels is None else n_levels
        self.image_shape = kind.shape or _folder_shape(root, image_size, channels)

    @cached_property
    def _folder(self) -> tuple[dict[str, list[Path]], Faults]:
        """The images of `dataset="folder"` by split, and what is left out."""
        return image_sources.folder(self.root)

    @property
    def places(self) -> list[Path]:
        """Files and folders that the images are read from. They may be missing."""
        folders = {"mnist": "MNIST/raw", "fashion_mnist": "FashionMNIST/raw", "cifar10": "cifar-10-batches-py"}
        if self.dataset == "folder":
            return [self.root]
        return [self.root / folders[self.dataset]] if self.dataset in folders else []

    @property
    def test_files(self) -> list[str]:
        """The files of the test images in their order, relative to `root`, if each has one."""
        paths = self._folder[0]["test"] if self.dataset == "folder" else []
        return [path.relative_to(self.root).as_posix() for path in paths]

    def to_images(self, levels: Tensor) -> Tensor:
        """Convert sequences of levels (B, N) to images (B, C, H, W) of uint8, 0 to 255."""
        return levels_to_images(levels, self.image_shape, self.n_levels)

    def prepare_data(self) -> None:
        """Unpack archives and download what is missing, or decode every image of a folder once.

        Raises:
            FileNotFoundError: If files are missing or damaged, and not downloaded.
            ValueError: If an image cannot be read.
        """
        if self.dataset in image_sources.N_TRAIN:
            image_sources.prepare(self.dataset, self.root, self.download)
        elif self.dataset == "folder" and self.verify:
            paths = [path for of_split in self._folder[0].values() for path in of_split]
            image_sources.verify_images(paths, self.image_shape[2], self.max_pixels)

    def setup(self, stage: str) -> None:
        """Load the splits of the stage, fit, validate, test or predict, and log their sizes and the files left out.

        Called again, it does nothing.
        """
        test = stage in ("test", "predict")
        if ("test" if test else "train") not in self.splits:
            self.splits |= self._load(test)
        wanted = ("test",) if test else ("train", "val")
        if not self._logged.issuperset(wanted):
            self._logged.update(wanted)
            self._log_sizes(wanted)

    def _log_sizes(self, splits: tuple[str, ...]) -> None:
        sizes = {name: len(self.splits[name]) for name in splits}
        counts = ", ".join(f"{sizes[name]:,} {PURPOSES[name]}" for name in splits)
        shape = "×".join(str(n) for n in self.image_shape)
        rank_zero_info(f"{self.dataset}: {counts}; images of {shape} at {self.n_levels} levels")
        official = image_sources.N_TRAIN.get(self.dataset)
        if "train" in sizes and official is not None and (n := sum(sizes.values())) != official:
            rank_zero_warn(f"{self.dataset}: {n:,} training images in {self.root} instead of {official:,}")
        if self.dataset == "folder" and (faults := self._folder[1]):
            rank_zero_warn(f"{self.root}: {len(faults)} left out:\n  {faults}")

    def _load(self, test: bool) -> dict[str, Any]:
        """Return a `PixelDataset` for each split."""
        if self.dataset == "folder":
            paths = self._folder[0]
            return {name: ImageFiles(paths[name], self.image_shape, self.n_levels, self.max_pixels) for name in paths}
        native = _KINDS[self.dataset].n_levels
        images = image_sources.images(self.dataset, self.root, test)
        return {name: ImageArray(images[name], native, self.n_levels) for name in images}

    def _batches(self, split: str, training: bool) -> tuple[Dataset[Any], ShardedBatches]:
        data = self.splits[split]
        variants = 2 if training and self.flip else 1
        order: dict[str, Any] = {"shuffle": training, "drop_last": training, **processes(self.trainer)}
        batch_size = self.batch_size if training else self.eval_batch_size
        return data, ShardedBatches(len(data), batch_size, seed=self.seed, variants=variants, **order)


class PixelDataset(Dataset[Tensor], ABC):
    """Images of one split. A list of B indices gives the batch (B, N); index i + len is image i mirrored."""

    native_levels: int
    n_levels: int

    @abstractmethod
    def __len__(self) -> int: ...

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The number of images and a digest, which changes if they change."""
        return {"images": len(self), "digest": digest(*self._digested())}

    @abstractmethod
    def _digested(self) -> tuple[Any, ...]: ...

    @abstractmethod
    def read(self, indices: list[int]) -> Tensor:
        """Return new copies of the images (B, H, W, C), uint8."""

    def __getitem__(self, indices: list[int]) -> Tensor:
        n = len(self)
        images = self.read([i % n for i in indices])
        mirrored = torch.tensor([i >= n for i in indices])
        images[mirrored] = images[mirrored].flip(2)
        return _quantise(images, self.native_levels, self.n_levels).flatten(1)  # (B, H, W, C) -> (B, N)


@dataclass(eq=False)
class ImageArray(PixelDataset):
    """Images in memory: (n, H, W, C) of uint8."""

    images: Tensor
    native_levels: int
    n_levels: int

    def __len__(self) -> int:
        return len(self.images)

    def read(self, indices: list[int]) -> Tensor:
        """Return new copies of the images (B, H, W, C), uint8."""
        return self.images[torch.tensor(indices)]  # indexing with a list is slower

    def _digested(self) -> tuple[Any, ...]:
        return (self.images.numpy(),)


@dataclass(eq=False)
class ImageFiles(PixelDataset):
    """Image files, each read on access. Their `identity` is of their names and sizes, not of their contents."""

    paths: list[Path]
    image_shape: tuple[int, int, int]
    n_levels: int
    max_pixels: int
    native_levels: int = 256

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, indices: list[int]) -> Tensor:
        """Return the decoded and resized images (B, H, W, C), uint8."""
        size, _, channels = self.image_shape
        return torch.stack([image_sources.read_image(self.paths[i], size, channels, self.max_pixels) for i in indices])

    def _digested(self) -> tuple[Any, ...]:
        return ([("/".join(path.parts[-2:]), path.stat().st_size) for path in self.paths],)


def levels_to_images(levels: Tensor, image_shape: tuple[int, int, int], n_levels: int) -> Tensor:
    """Convert levels to images for display: value = level / (n_levels − 1) · 255, rounded.

    Args:
        levels: (B, N) integers, 0 to `n_levels - 1`, in raster order.
        image_shape: (H, W, C), with H·W·C = N.
        n_levels: Number of levels.

    Returns:
        (B, C, H, W) of uint8.

    Raises:
        ValueError: If N is not H·W·C.
    """
    height, width, channels = image_shape
    if levels.shape[1] != height * width * channels:
        raise ValueError(f"sequences of length {levels.shape[1]} are not images of image_shape={image_shape}")
    top = n_levels - 1
    values = (2 * 255 * levels.int() + top) // (2 * top)  # rounded in integers: the same on every device
    return values.to(torch.uint8).view(-1, height, width, channels).permute(0, 3, 1, 2)  # (B, N) -> (B, C, H, W)


def images_to_levels(images: Tensor, n_levels: int) -> Tensor:
    """Convert images (B, C, H, W) of uint8 to levels (B, N), quantised like the data: ⌊value · n_levels / 256⌋.

    Inverts `levels_to_images` for 17 levels and for every power of two up to 256.
    """
    return _quantise(images.permute(0, 2, 3, 1), 256, n_levels).flatten(1)  # (B, C, H, W) -> (B, H, W, C) -> (B, N)


def _quantise(values: Tensor, native_levels: int, n_levels: int) -> Tensor:
    if n_levels == native_levels:
        return values
    return (values.int() * n_levels // native_levels).to(torch.uint8)


def _folder_shape(root: str | None, image_size: int | None, channels: int | None) -> tuple[int, int, int]:
    if root is None:
        raise ValueError("root=None: dataset='folder' needs the folder of the images, such as root=data/mine")
    if image_size is None:
        raise ValueError("image_size=None: dataset='folder' needs the side to resize the images to, such as 32")
    if channels not in (None, 1, 3):
        raise ValueError(f"channels={channels} must be 1 (grey) or 3 (colour)")
    return image_size, image_size, channels or 3
