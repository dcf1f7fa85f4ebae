"""Sources of images: uint8 arrays of shape (n, H, W, C), or paths of files, with fixed splits."""

import hashlib
import math
import socket
import struct
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image
    from torchvision.datasets import CIFAR10, MNIST

EXTENSIONS = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".webp")
PATCH = 32  # side of the crops from photographs, as in CIFAR-10
MAX_PIXELS = 2**26  # of an image file: 8192 × 8192, 270 MB in Pillow


def fixed_order(keys: Iterable[str]) -> list[int]:
    """Return a pseudo-random order that is the same on every machine and with every library version."""
    digests = [hashlib.sha256(key.encode()).digest() for key in keys]
    return sorted(range(len(digests)), key=digests.__getitem__)


def _split_off(images: Tensor, **counts: int) -> dict[str, Tensor]:
    """Return splits of the given names and sizes. The rest is "train"."""
    order = fixed_order(str(i) for i in range(len(images)))
    splits = {}
    for name, count in counts.items():
        splits[name], order = images[order[:count]], order[count:]
    return {"train": images[order], **splits}


# Data included in scikit-learn


def digits() -> dict[str, Tensor]:
    """Return the 1797 digits of 8 × 8 × 1 at levels 0 to 16: 1437 for training, 180 for validation, 180 for test."""
    from sklearn.datasets import load_digits

    images = torch.from_numpy(load_digits().images.astype(np.uint8)).unsqueeze(-1)  # (1797, 8, 8, 1)
    return _split_off(images, val=180, test=180)


def photos(stride: int) -> dict[str, Tensor]:
    """Return crops of two photographs: the left 5/6 of one as "train", its right 1/6 as "val", the other as "test"."""
    from sklearn.datasets import load_sample_images

    china, flower = (torch.tensor(image) for image in load_sample_images().images)  # (427, 640, 3) each
    border = china.shape[1] * 5 // 6
    return {
        "train": _crops(china[:, :border], stride),
        "val": _crops(china[:, border:], PATCH),
        "test": _crops(flower, PATCH),
    }


def _crops(photo: Tensor, stride: int) -> Tensor:
    crops = photo.unfold(0, PATCH, stride).unfold(1, PATCH, stride)  # (H, W, 3) -> (rows, columns, 3, 32, 32)
    return crops.permute(0, 1, 3, 4, 2).reshape(-1, PATCH, PATCH, 3)


# Data downloaded by torchvision, which tries its mirrors in turn and checks MD5 sums


_TIMEOUT = 10.0  # seconds that a server may be silent; torchvision sets no limit and waits for minutes


def prepare_mnist(root: Path, download: bool) -> None:
    """Make sure that MNIST's files are in `root`; raise FileNotFoundError if they are missing and not downloaded."""
    from torchvision.datasets import MNIST

    folder, names = root / "MNIST" / "raw", [name for name, _ in MNIST.resources]
    # torchvision loads the files as well, and its errors do not name a damaged one. `mnist` checks those that are here.
    if not all((folder / name.removesuffix(".gz")).is_file() for name in names):
        _open(MNIST, root, download, f"{', '.join(names)} of {MNIST.mirrors[0]}", folder)


def prepare_cifar10(root: Path, download: bool) -> None:
    """Make sure that CIFAR-10's files are in `root` and undamaged; raise FileNotFoundError if they are not."""
    from torchvision.datasets import CIFAR10

    _open(CIFAR10, root, download, CIFAR10.url, root)


def _open(dataset: "type[MNIST | CIFAR10]", root: Path, download: bool, archives: str, folder: Path) -> None:
    """Open a data set by torchvision, whose errors do not say which files belong where."""
    timeout = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_TIMEOUT)
    try:
        dataset(root, download=download)
    except (OSError, RuntimeError) as error:
        said = " ".join(str(error).split())
        reason = f"the download failed ({said})" if download else "download=False forbids a download"
        raise FileNotFoundError(
            f"{dataset.__name__} is missing or damaged in {folder.resolve()}, and {reason}. Put {archives} there"
            f"{'' if download else ', unpacked'}. --config digits_linear and --config photos_linear need no download."
        ) from error
    finally:
        socket.setdefaulttimeout(timeout)


def mnist(root: Path, test: bool) -> dict[str, Tensor]:
    """Return MNIST's training images as "train" (55,000) and "val" (5,000), or its test images as "test"."""
    from torchvision.datasets import MNIST

    part = "t10k" if test else "train"
    files = root / "MNIST" / "raw"
    n_images = _idx_shape(files / f"{part}-images-idx3-ubyte", (28, 28))
    n_labels = _idx_shape(files / f"{part}-labels-idx1-ubyte", ())
    if n_images != n_labels:
        raise ValueError(
            f"{files / f'{part}-labels-idx1-ubyte'}: {n_labels} labels for {n_images} images; "
            f"delete the files of {files} and run again"
        )
    images = MNIST(root, train=not test).data.unsqueeze(-1)  # (n, 28, 28, 1)
    return {"test": images} if test else _split_off(images, val=len(images) // 12)


def _idx_shape(path: Path, item: tuple[int, ...]) -> int:
    """Return the number of items of shape `item` in an IDX file; raise ValueError if header and size disagree."""
    n_dims = 1 + len(item)
    with path.open("rb") as file:
        header = file.read(4 + 4 * n_dims)
    if len(header) < 4 + 4 * n_dims or header[:4] != bytes((0, 0, 8, n_dims)):
        raise ValueError(f"{path}: not an IDX file of {n_dims}-dimensional bytes; delete it and run again")
    shape = struct.unpack(f">{n_dims}I", header[4:])
    held = path.stat().st_size - len(header)
    if held != math.prod(shape):
        raise ValueError(f"{path}: holds {held} bytes, but its header says {math.prod(shape)}; delete it and run again")
    if shape[1:] != item:
        raise ValueError(f"{path}: items of shape {shape[1:]} instead of {item}; delete it and run again")
    return shape[0]


def cifar10(root: Path, test: bool) -> dict[str, Tensor]:
    """Return CIFAR-10's training images as "train" (48,000) and "val" (2,000), or its test images as "test"."""
    from torchvision.datasets import CIFAR10

    images = torch.from_numpy(CIFAR10(root, train=not test).data)  # (n, 32, 32, 3)
    return {"test": images} if test else _split_off(images, val=len(images) // 25)


# Folders of images


def folder(root: Path) -> dict[str, list[Path]]:
    """Return the images of a folder, split by its subfolders train, val and test, or else into a fixed 80/10/10 %.

    Raises:
        FileNotFoundError: If the folder is missing or has no images.
        ValueError: If one or two of the three subfolders are missing, or there are too few images to split.
    """
    names = ("train", "val", "test")
    missing = [name for name in names if not (root / name).is_dir()]
    if not missing:
        return {name: _images_in(root / name) for name in names}
    if len(missing) < len(names):
        raise ValueError(
            f"{root}: has subfolders train, val or test, but not {' and '.join(missing)}; "
            "add what is missing, or put all images into one folder to have them split"
        )
    paths = _images_in(root)
    if len(paths) < 10:
        raise ValueError(f"{root}: {len(paths)} images are too few to split 80/10/10; add some to have at least 10")
    # Ordered by the hashes of the names: images keep their relative order when some are added or removed.
    paths = [paths[i] for i in fixed_order(path.relative_to(root).as_posix() for path in paths)]
    held_out = len(paths) // 10
    return {"test": paths[:held_out], "val": paths[held_out : 2 * held_out], "train": paths[2 * held_out :]}


def _images_in(root: Path) -> list[Path]:
    wanted = " ".join(EXTENSIONS)
    if not root.is_dir():
        raise FileNotFoundError(f"{root.resolve()}: no such folder; root must name one with images ({wanted})")
    # File managers leave files whose names begin with a dot; they are not images.
    paths = [p for p in root.rglob("*") if p.suffix.lower() in EXTENSIONS and not p.name.startswith(".")]
    if not paths:
        raise FileNotFoundError(f"{root.resolve()}: no image in it or in its subfolders ({wanted})")
    return sorted(paths, key=lambda path: path.relative_to(root).as_posix())


def read_image(path: Path, image_size: int, channels: int, max_pixels: int = MAX_PIXELS) -> Tensor:
    """Read an image: its centre square, resized with antialiasing, without transparency: (size, size, channels).

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
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as file:
            if file.width * file.height > max_pixels:  # from the header, before decoding
                raise ValueError(f"{file.width} × {file.height} are more than max_pixels={max_pixels}")
            image = ImageOps.exif_transpose(file)
            if image.mode.startswith("I"):  # 16 bits: `convert` would clip at 255
                image = Image.fromarray((np.asarray(image) // 256).astype(np.uint8))
            return image.convert("L" if channels == 1 else "RGB")
    except Exception as error:  # Pillow's decoders raise many types of exceptions on a broken file
        raise ValueError(f"{path}: not a readable image ({error}); remove it or replace it") from error


def verify_images(paths: Sequence[Path], max_pixels: int = MAX_PIXELS) -> None:
    """Decode every image once; ValueError names the first broken one. More than 2000 images show a progress bar."""
    from rich.progress import track

    with ThreadPoolExecutor() as pool:
        decoded = pool.map(lambda path: _decode(path, 3, max_pixels).size, paths)
        for _ in track(decoded, "Checking images", total=len(paths), disable=len(paths) <= 2000):
            pass
