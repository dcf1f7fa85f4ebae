"""Sources of images: uint8 arrays of shape (n, H, W, C), or paths of files, with fixed splits."""

import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lit_effattn.datamodules.common.bars import progress_bar
from lit_effattn.datamodules.common.faults import Faults
from lit_effattn.datamodules.common.files import open_image, walk_splits
from lit_effattn.datamodules.common.splits import fixed_order

if TYPE_CHECKING:
    from PIL.Image import Image

EXTENSIONS = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
_NAMED = 10  # broken images that an error names after the first
MAX_PIXELS = 2**26  # of an image file: 8192 × 8192, 270 MB in Pillow
PILLOW_PIXELS = 178_956_970  # Pillow rejects larger images
_PHOTOMETRIC, _WHITE_IS_ZERO = 262, 0  # a tag of TIFF, which Pillow applies to at most 8 bits


def _split_off(values: Tensor, **counts: int) -> dict[str, Tensor]:
    """Return splits of the given names and sizes. The rest is "train"."""
    order = fixed_order(str(i) for i in range(len(values)))
    splits = {}
    for name, count in counts.items():
        splits[name], order = values[order[:count]], order[count:]
    return {"train": values[order], **splits}


def images(dataset: str, root: Path, test: bool) -> dict[str, Tensor]:
    """Return the images of each split, (n, H, W, C) of uint8.

    Raises:
        ValueError: If a file is damaged.
    """
    if dataset == "digits":
        return _split_off(torch.from_numpy(_digits()[:, :-1].reshape(-1, 8, 8, 1)), val=180, test=180)
    data = torch.as_tensor(_loaded(dataset, root, test)[0])  # (n, H, W) or (n, H, W, C)
    return _official_splits(dataset, data if data.dim() == 4 else data.unsqueeze(-1), test)


def labels(dataset: str, root: Path, test: bool) -> dict[str, Tensor]:
    """Return the labels of the images, (n,) for each split. The arguments are those of `images`."""
    if dataset == "digits":
        return _split_off(torch.from_numpy(_digits()[:, -1].astype(np.int64)), val=180, test=180)
    return _official_splits(dataset, torch.as_tensor(_loaded(dataset, root, test)[1]), test)


def _digits() -> NDArray[np.uint8]:
    """Return the grey levels and the digit of each image, (1797, 64 + 1)."""
    return np.loadtxt(Path(__file__).with_name("digits.csv.gz"), dtype=np.uint8, delimiter=",")


# Data downloaded by torchvision, which tries its mirrors in turn and checks MD5 sums


_TIMEOUT = 10.0  # seconds that a server may be silent; torchvision sets no limit and waits for minutes


N_TRAIN = {"mnist": 60_000, "fashion_mnist": 60_000, "cifar10": 50_000}
"""Number of images of the official training files, from which those for validation are split off."""


def _data_set(name: str) -> Any:
    from torchvision.datasets import CIFAR10, MNIST, FashionMNIST

    return {"mnist": MNIST, "fashion_mnist": FashionMNIST, "cifar10": CIFAR10}[name]


def _loaded(name: str, root: Path, test: bool) -> tuple[Any, Any]:
    """Return the images and labels that torchvision reads. Raise ValueError if a file is damaged."""
    from torchvision.datasets import mnist

    dataset = _data_set(name)
    if name == "cifar10":
        loaded = _open(dataset, root, False, train=not test)
        return loaded.data, loaded.targets
    folder, part = root / dataset.__name__ / "raw", "t10k" if test else "train"
    files = [folder / f"{part}-images-idx3-ubyte", folder / f"{part}-labels-idx1-ubyte"]
    parts = []
    for file, read, size in zip(files, (mnist.read_image_file, mnist.read_label_file), ((28, 28), ()), strict=True):
        try:
            parts.append(read(str(file)))
            if parts[-1].shape[1:] != size:
                raise ValueError(f"its items have the shape {tuple(parts[-1].shape[1:])}, not {size}")
        except (AssertionError, ValueError, LookupError, TypeError, RuntimeError) as error:
            why = " ".join(str(error).split()) or "it is not in the IDX format"
            raise ValueError(f"{file} is damaged ({why}); delete it and run again") from error
    if len(parts[0]) != len(parts[1]):
        raise ValueError(f"{files[1]} has {len(parts[1])} labels for the {len(parts[0])} images of {files[0].name}")
    return parts[0], parts[1]


def _official_splits(dataset: str, values: Tensor, test: bool) -> dict[str, Tensor]:
    return {"test": values} if test else _split_off(values, val=len(values) // (25 if dataset == "cifar10" else 12))


def prepare(name: str, root: Path, download: bool) -> None:
    """Make sure that the files of mnist, fashion_mnist or cifar10 are in `root`, unpacked.

    Archives in their place are unpacked, if their MD5 sums are right; torchvision then asks no network.

    Raises:
        FileNotFoundError: If files are missing or damaged, and not downloaded.
    """
    from torchvision.datasets.utils import check_integrity

    dataset = _data_set(name)
    folder, archives, _ = _archives(dataset, root)
    # torchvision loads the files as well, and its errors do not name a damaged one: see `_loaded`.
    if name == "cifar10" or not all((folder / archive.removesuffix(".gz")).is_file() for archive, _ in archives):
        download |= all(check_integrity(folder / archive, md5) for archive, md5 in archives)
        _open(dataset, root, download)


def _archives(dataset: Any, root: Path) -> tuple[Path, list[tuple[str, str]], str]:
    """Return the folder of a data set's archives, their names and MD5 sums, and what to put there."""
    if dataset.__name__ == "CIFAR10":
        return root, [(dataset.filename, dataset.tgz_md5)], dataset.url
    names = ", ".join(archive for archive, _ in dataset.resources)
    return root / dataset.__name__ / "raw", dataset.resources, f"{names} of {dataset.mirrors[0]}"


def _open(dataset: Any, root: Path, download: bool, **options: Any) -> Any:
    """Open a data set with torchvision. The error names the files and their folder, which torchvision's does not."""
    from torchvision.datasets.utils import check_integrity

    timeout = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_TIMEOUT)
    try:
        return dataset(root, download=download, **options)
    except (OSError, RuntimeError) as error:
        folder, files, source = _archives(dataset, root.resolve())
        if dataset.__name__ == "CIFAR10":
            lists = dataset.train_list + dataset.test_list
            files = [*files, *((f"{dataset.base_folder}/{name}", md5) for name, md5 in lists)]
        damaged = [str(p) for name, md5 in files if (p := folder / name).exists() and not check_integrity(p, md5)]
        problem = f"{', '.join(damaged)}: damaged" if damaged else f"{dataset.__name__} is missing"
        cause = " ".join(str(error).split())
        reason = f"the download failed ({cause})" if download else "download=False forbids a download"
        raise FileNotFoundError(
            f"{problem}, and {reason}. Put {source} into {folder}. --config digits_linear needs no download."
        ) from error
    finally:
        socket.setdefaulttimeout(timeout)


# Folders of images


def folder(root: Path) -> tuple[dict[str, list[Path]], Faults]:
    """Return the images of a folder by split, and what is left out.

    The splits are its subfolders train, val and test, or else a fixed 80/10/10 %.

    Raises:
        FileNotFoundError: If the folder is missing or has no images.
        ValueError: If one or two of the three subfolders are missing, or there are too few images to split.
    """
    splits, faults = walk_splits(root, EXTENSIONS)
    for name, paths in splits.items():
        if not paths:
            raise FileNotFoundError(
                f"{(root / name).resolve()}: no image in it or in its subfolders ({' '.join(EXTENSIONS)})"
                f"{faults.counts}"
            )
    if "" not in splits:
        return splits, faults
    paths = splits[""]
    if len(paths) < 10:
        raise ValueError(
            f"{root}: {len(paths)} images are too few to split 80/10/10; add some to have at least 10{faults.counts}"
        )
    # Ordered by the hashes of the names: images keep their relative order when some are added or removed.
    paths = [paths[i] for i in fixed_order(path.relative_to(root).as_posix() for path in paths)]
    held_out = len(paths) // 10
    return {"test": paths[:held_out], "val": paths[held_out : 2 * held_out], "train": paths[2 * held_out :]}, faults


def read_image(path: Path, image_size: int, channels: int, max_pixels: int = MAX_PIXELS) -> Tensor:
    """Read an image: its centre square, resized with antialiasing.

    Transparent pixels show a white background. 16-bit grey values are divided by 256.

    Args:
        path: The file.
        image_size: Side of the result.
        channels: 3: colour, 1: grey.
        max_pixels: Largest accepted number of pixels in the file.

    Returns:
        (image_size, image_size, channels) of uint8.

    Raises:
        ValueError: If the image cannot be read, or has more than `max_pixels`.
    """
    from PIL import Image

    image = _decode(path, channels, max_pixels)
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    square = image.resize((image_size, image_size), Image.Resampling.BICUBIC, box=(left, top, left + side, top + side))
    return torch.from_numpy(np.array(square)).view(image_size, image_size, channels)


def _decode(path: Path, channels: int, max_pixels: int) -> "Image":
    from PIL import ImageOps

    try:
        with open_image(path) as file:
            if file.width * file.height > max_pixels:  # from the header, before decoding
                raise ValueError(f"{file.width} × {file.height} pixels are more than max_pixels={max_pixels}")
            return _flat(ImageOps.exif_transpose(file), file).convert("L" if channels == 1 else "RGB")
    except Exception as error:  # Pillow's decoders raise many types of exceptions on a broken file
        raise ValueError(f"{path}: not a readable image ({error}); remove it or replace it") from error


def _flat(image: "Image", file: "Image") -> "Image":
    """Return `image`, read from `file`, with 8 bits a channel and its transparent pixels on a white background."""
    from PIL import Image

    if image.mode == "F" or (image.mode, file.format) == ("I", "TIFF"):  # 16 bits without sign are I;16
        raise ValueError("its grey values are signed, floats or have 32 bits; save it with 8 or 16 bits a channel")
    if image.mode.startswith("I"):  # 16 bits: `convert` would clip at 255
        values = np.asarray(image)
        if 0 < (high := values.max()) < 256:
            raise ValueError(f"its grey values have 16 bits, but none is above {high}; save it with 8 bits a channel")
        if image.has_transparency_data or getattr(file, "tag_v2", {}).get(_PHOTOMETRIC) == _WHITE_IS_ZERO:
            raise ValueError(
                "its grey values have 16 bits, and 0 is white or one is transparent; save it with 8 bits a channel"
            )
        return Image.fromarray((values // 256).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image


def verify_images(paths: Sequence[Path], channels: int, max_pixels: int = MAX_PIXELS) -> None:
    """Decode every image once, as `read_image` does. More than 2000 images show a progress bar.

    Raises:
        ValueError: If images are broken. The message names the first ones.
    """
    with ThreadPoolExecutor() as pool, progress_bar(disable=len(paths) <= 2000) as bar:
        faults = pool.map(lambda path: _fault(path, channels, max_pixels), paths)
        tracked = bar.track(faults, total=len(paths), description="Checking images")
        broken = {path: fault for path, fault in zip(paths, tracked, strict=True) if fault is not None}
    if broken:
        first, *more = broken
        names = ", ".join(str(path) for path in more[:_NAMED]) + (", …" if len(more) > _NAMED else "")
        also = f". Of {len(paths)} images, {len(more)} more are broken: {names}" if more else ""
        raise ValueError(f"{broken[first]}{also}")


def _fault(path: Path, channels: int, max_pixels: int) -> str | None:
    try:
        _decode(path, channels, max_pixels)
    except ValueError as error:
        return str(error)
    return None
