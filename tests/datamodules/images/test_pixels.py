import gzip
import hashlib
import pickle
import socket
import struct
import tarfile
import time

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.datasets import CIFAR10, MNIST, FashionMNIST

from lit_effattn.datamodules import PixelSequences, images_to_levels, levels_to_images
from lit_effattn.datamodules.images import sources as image_sources
from tests.callbacks.tiny import trainer
from tests.datamodules.lightning_runs import Recorder, fit


def ready(stage="fit", **options):
    data = PixelSequences(**options)
    data.prepare_data()
    data.setup(stage)
    return data


def in_raster_order(image):
    return [int(value) for row in image for pixel in row for value in pixel]


def as_set(rows):
    return {bytes(row.tolist()) for row in rows}


# Levels and images


def test_levels_to_images_by_definition():
    height, width, channels, n_levels = 2, 3, 3, 7
    levels = torch.arange(18).remainder(n_levels).to(torch.uint8).view(1, -1)
    images = levels_to_images(levels, (height, width, channels), n_levels)
    assert images.dtype == torch.uint8
    position = 0
    for row in range(height):
        for column in range(width):
            for channel in range(channels):
                exact = int(levels[0, position]) / (n_levels - 1) * 255
                assert int(images[0, channel, row, column]) == int(exact + 0.5)
                position += 1


@pytest.mark.parametrize("n_levels", [2, 4, 8, 16, 17, 32, 64, 128, 256])
def test_images_to_levels_undoes_levels_to_images(n_levels):
    levels = torch.arange(n_levels).repeat(12).to(torch.uint8).view(2, -1)
    shape = (2, n_levels, 3)
    assert torch.equal(images_to_levels(levels_to_images(levels, shape, n_levels), n_levels), levels)


def test_images_to_levels_rounds_down():
    values = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    assert images_to_levels(values, 10)[0].tolist() == [value * 10 // 256 for value in range(256)]


def test_wrong_length_is_refused():
    with pytest.raises(ValueError, match=r"length 5 .*\(2, 2, 1\)"):
        levels_to_images(torch.zeros(1, 5, dtype=torch.uint8), (2, 2, 1), 4)


# Arguments


def test_facts_are_known_before_any_data():
    facts = {
        "digits": ((8, 8, 1), 17),
        "mnist": ((28, 28, 1), 256),
        "fashion_mnist": ((28, 28, 1), 256),
        "cifar10": ((32, 32, 3), 256),
    }
    for dataset, expected in facts.items():
        data = PixelSequences(dataset)
        assert (data.image_shape, data.n_levels) == expected
    data = PixelSequences("folder", root="nowhere", image_size=12, channels=1, n_levels=5)
    assert (data.image_shape, data.n_levels) == ((12, 12, 1), 5)
    assert data.hparams.n_levels == 5
    assert PixelSequences("digits").hparams.n_levels is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": "imagenet"}, "dataset='imagenet'.*digits, mnist"),
        ({"batch_size": 0}, "batch_size=0.*at least 1"),
        ({"eval_batch_size": 0}, "eval_batch_size=0.*at least 1"),
        ({"num_workers": -1}, "num_workers=-1.*at least 0"),
        ({"seed": -1}, "seed=-1.*at least 0"),
        ({"n_levels": 1}, "n_levels=1.*between 2 and 17"),
        ({"n_levels": 18}, "n_levels=18.*between 2 and 17"),
        ({"flip": True}, "flip=True.*dataset='digits'.*cifar10 or folder"),
        ({"root": "x"}, "root='x'.*dataset='digits'"),
        ({"dataset": "cifar10", "channels": 1}, "channels=1.*choose dataset folder"),
        ({"download": False}, "download=False.*choose dataset mnist or fashion_mnist or cifar10"),
        ({"dataset": "folder", "image_size": 8}, "root=None.*folder"),
        ({"dataset": "folder", "root": "x"}, "image_size=None.*folder"),
        ({"dataset": "folder", "root": "x", "image_size": 0}, "image_size=0.*at least 1"),
        ({"dataset": "folder", "root": "x", "image_size": 8, "channels": 2}, "channels=2.*1 .*3"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        PixelSequences(**options)


# Digits


def test_digits_are_split_once_for_all():
    from sklearn.datasets import load_digits

    data = ready(seed=1)
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 1437, "val": 180, "test": 180}
    rows = torch.cat([data.splits[name][list(range(len(data.splits[name])))] for name in ("train", "val", "test")])
    originals = sorted(in_raster_order(image[..., None]) for image in load_digits().images)
    assert sorted(rows.tolist()) == originals
    other = ready(seed=2)
    for name, split in data.splits.items():
        assert torch.equal(split.images, other.splits[name].images)
    # The very split: results reported earlier are about these images.
    digest = hashlib.sha256(data.splits["test"].images.numpy().tobytes()).hexdigest()
    assert digest[:16] == "6f8a318cbae82aa7"


def test_digits_are_quantised():
    full, coarse = ready(), ready(n_levels=4)
    for value, level in zip(full.splits["val"][[3, 5]].flatten(), coarse.splits["val"][[3, 5]].flatten(), strict=True):
        assert int(level) == int(value) * 4 // 17
    assert int(coarse.splits["train"][list(range(1437))].max()) == 3


def flipped(folder, **options):
    """Return the data of a folder with 24 training images, mirrored at random."""
    write_images(folder, 30)
    return {"dataset": "folder", "root": str(folder), "image_size": 8, "flip": True, **options}


def test_mirrored_sample_by_definition(tmp_path):
    data = ready(**flipped(tmp_path))
    train = data.splits["train"]
    plain, mirrored = train[[5, len(train) + 5]].view(2, 8, 8, 3)
    for column in range(8):
        assert torch.equal(mirrored[:, column], plain[:, 7 - column])
    assert not torch.equal(mirrored, plain)
    assert torch.equal(train[[5]][0], plain.flatten())  # the stored image is untouched


def test_flips_are_drawn_in_training_only(tmp_path):
    data = ready(**flipped(tmp_path, batch_size=8, eval_batch_size=2))
    n = len(data.splits["train"])
    assert {index >= n for batch in data.train_dataloader().sampler for index in batch} == {True, False}
    assert max(index for batch in data.val_dataloader().sampler for index in batch) < len(data.splits["val"])
    unflipped = ready(dataset="folder", root=str(tmp_path), image_size=8, batch_size=8)
    assert max(index for batch in unflipped.train_dataloader().sampler for index in batch) < n


# Loaders


def test_batches():
    data = ready(batch_size=100, eval_batch_size=50)
    batches = list(data.train_dataloader())
    assert len(batches) == len(data.train_dataloader()) == 14
    assert {(tuple(batch.shape), batch.dtype) for batch in batches} == {((100, 64), torch.uint8)}
    assert data.to_images(batches[0]).shape == (100, 1, 8, 8)
    assert type(data.val_dataloader()) is type(data.test_dataloader()) is DataLoader
    evaluation = list(data.val_dataloader())
    assert len(evaluation) == len(data.val_dataloader()) == 4
    assert torch.equal(torch.cat(evaluation), data.splits["val"][list(range(180))])
    assert torch.equal(torch.cat(list(data.predict_dataloader())), torch.cat(list(data.test_dataloader())))
    assert len(list(ready(batch_size=90).val_dataloader())) == 2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("num_workers", "options"),
    [(0, {}), (0, {"limit_train_batches": 2}), (0, {"val_check_interval": 2}), (2, {"limit_train_batches": 2})],
)
def test_a_run_resumed_anywhere_sees_what_an_uninterrupted_one_sees(tmp_path, num_workers, options):
    arguments = flipped(tmp_path / "images", batch_size=5, num_workers=num_workers)

    def run(**more):
        return fit(tmp_path, PixelSequences(**arguments), torch.Tensor.tolist, max_epochs=2, **options, **more)

    whole, per_epoch = run(), options.get("limit_train_batches", 4)
    assert len(whole) == 2 * per_epoch
    assert all(whole.count(batch) == 1 for batch in whole)  # every epoch its own order
    for steps in (1, per_epoch, per_epoch + 1) if num_workers else range(1, 2 * per_epoch + 1):
        run(stop_after=steps)
        assert run(resume=True) == whole[steps:], steps


@pytest.mark.filterwarnings("ignore")
def test_predict_gives_the_test_images_in_order(tmp_path):
    data = PixelSequences(eval_batch_size=50)
    predicted = trainer(tmp_path, []).predict(Recorder(len), data)
    assert torch.equal(torch.cat(predicted), data.splits["test"][list(range(180))])


# MNIST and CIFAR-10


def idx(array):
    return struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_idx(path, array, pack=False):
    data = idx(array)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data) if pack else data)


def write_mnist(root, pack=False, name="MNIST"):
    rng = np.random.default_rng(0)
    written = {}
    for part, n in (("train", 60), ("t10k", 10)):
        written[part] = rng.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        raw, end = root / name / "raw", ".gz" if pack else ""
        write_idx(raw / f"{part}-images-idx3-ubyte{end}", written[part], pack)
        write_idx(raw / f"{part}-labels-idx1-ubyte{end}", np.zeros(n, np.uint8), pack)
    return written


def test_splits_are_logged_once(caplog: pytest.LogCaptureFixture):
    data = ready("test", dataset="digits")
    for stage in ("test", "predict", "fit", "validate"):
        data.setup(stage)
    assert caplog.messages == [
        "digits: 180 to test; images of 8×8×1 at 17 levels",
        "digits: 1,437 to train on, 180 to validate; images of 8×8×1 at 17 levels",
    ]


def test_mnist(tmp_path):
    written = write_mnist(tmp_path)
    data = ready(dataset="mnist", root=str(tmp_path), download=False)
    data.setup("test")
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 55, "val": 5, "test": 10}
    rows = torch.cat([data.splits["train"][list(range(55))], data.splits["val"][list(range(5))]])
    assert as_set(rows) == {image.tobytes() for image in written["train"]}
    assert data.splits["test"][[3]][0].tolist() == in_raster_order(written["t10k"][3][..., None])


def md5(path):
    return hashlib.md5(path.read_bytes()).hexdigest()


def no_network(monkeypatch):
    def refuse(*_, **__):
        raise OSError("the network was asked")

    monkeypatch.setattr("urllib.request.urlopen", refuse)


def test_fashion_mnist_unpacks_archives_without_a_network(tmp_path, monkeypatch):
    """A damaged archive is got again, if that is allowed."""
    options = {"dataset": "fashion_mnist", "root": str(tmp_path)}
    no_network(monkeypatch)
    write_mnist(tmp_path, pack=True, name="FashionMNIST")
    raw = tmp_path / "FashionMNIST" / "raw"
    resources = [(name, md5(raw / name)) for name, _ in FashionMNIST.resources]
    monkeypatch.setattr(FashionMNIST, "resources", resources)
    archive = raw / "train-images-idx3-ubyte.gz"
    whole = archive.read_bytes()
    for download, words in ((True, "the download failed .*the network was asked"), (False, "download=False forbids")):
        archive.write_bytes(whole[:-100])
        with pytest.raises(FileNotFoundError, match=f"^{archive}: damaged, and {words}"):
            ready(**options, download=download)
    archive.write_bytes(whole)
    with pytest.warns(match="60 training images in .* instead of 60,000"):
        assert len(ready(**options, download=False).splits["train"]) == 55


def test_split_sizes_of_the_full_data_sets():
    for n, share, expected in ((60000, 12, (55000, 5000)), (50000, 25, (48000, 2000))):
        splits = image_sources._split_off(torch.arange(n), val=n // share)
        assert (len(splits["train"]), len(splits["val"])) == expected
        assert len(torch.cat(list(splits.values())).unique()) == n


def test_damaged_files_of_mnist_are_refused(tmp_path):
    write_mnist(tmp_path)
    images = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte"
    labels = images.with_name("train-labels-idx1-ubyte")
    whole = images.read_bytes()
    other_type = whole[:2] + b"\x0d" + whole[3:]  # of float32
    for path, content, words in (
        *(
            (images, content, "is damaged")
            for content in (whole[:-10], b"", whole[:9], b"<html>404</html>", other_type)
        ),
        (images, idx(np.zeros((60, 14, 14), np.uint8)), r"is damaged \(its items have the shape \(14, 14\)"),
        (labels, idx(np.zeros(59, np.uint8)), "has 59 labels for the 60 images of train-images-idx3-ubyte"),
    ):
        images.write_bytes(whole)
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"^{path} {words}"):
            ready(dataset="mnist", root=str(tmp_path))


def write_cifar10(root, monkeypatch, n=10):
    rng = np.random.default_rng(0)
    folder = root / CIFAR10.base_folder
    folder.mkdir(parents=True)
    written = {}
    for name, _ in CIFAR10.train_list + CIFAR10.test_list:
        written[name] = rng.integers(0, 256, (n, 3072), dtype=np.uint8)
        (folder / name).write_bytes(pickle.dumps({"data": written[name], "labels": [0] * n}))
    (folder / CIFAR10.meta["filename"]).write_bytes(pickle.dumps({CIFAR10.meta["key"]: ["plane"]}))
    monkeypatch.setattr(CIFAR10, "train_list", [[name, md5(folder / name)] for name, _ in CIFAR10.train_list])
    monkeypatch.setattr(CIFAR10, "test_list", [[name, md5(folder / name)] for name, _ in CIFAR10.test_list])
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": md5(folder / CIFAR10.meta["filename"])})
    return written


def test_cifar10(tmp_path, monkeypatch):
    written = write_cifar10(tmp_path, monkeypatch)
    data = ready(dataset="cifar10", root=str(tmp_path), download=False)
    data.setup("test")
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 48, "val": 2, "test": 10}
    # In the file all red values come first, then green, then blue; in a sequence the colours of a pixel are together.
    planes = written["test_batch"][4].reshape(3, 32, 32)
    expected = [int(planes[c, h, w]) for h in range(32) for w in range(32) for c in range(3)]
    assert data.splits["test"][[4]][0].tolist() == expected
    assert len(as_set(torch.cat([data.splits["train"].images, data.splits["val"].images]).flatten(1))) == 50


def test_cifar10_unpacks_its_archive_in_place_of_damaged_files_without_a_network(tmp_path, monkeypatch):
    no_network(monkeypatch)
    write_cifar10(tmp_path, monkeypatch)
    archive = tmp_path / CIFAR10.filename
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / CIFAR10.base_folder, CIFAR10.base_folder)
    monkeypatch.setattr(CIFAR10, "tgz_md5", md5(archive))
    broken = tmp_path / CIFAR10.base_folder / "data_batch_3"
    broken.write_bytes(broken.read_bytes()[:-1])
    whole = archive.read_bytes()
    archive.write_bytes(whole[:-1])
    with pytest.raises(FileNotFoundError, match=f"^{archive}, {broken}: damaged, and the download failed"):
        ready(dataset="cifar10", root=str(tmp_path))
    archive.write_bytes(whole)
    assert len(ready(dataset="cifar10", root=str(tmp_path), download=False).splits["train"]) == 48


@pytest.mark.parametrize(
    ("dataset", "folder", "names"),
    [
        ("mnist", "MNIST/raw", [*(name for name, _ in MNIST.resources), "ossci-datasets"]),
        ("cifar10", "", ["https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"]),
    ],
)
def test_no_files_and_no_network(tmp_path, monkeypatch, dataset, folder, names):
    no_network(monkeypatch)
    data = PixelSequences(dataset, root=str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"the download failed \(.*the network was asked") as caught:
        data.prepare_data()
    for part in (str(tmp_path / folder), *names, "--config digits_linear"):
        assert part in str(caught.value)
    with pytest.raises(FileNotFoundError, match=r"is missing, and download=False.* into /"):
        PixelSequences(dataset, root=str(tmp_path), download=False).prepare_data()


def test_a_mirror_that_never_answers_costs_seconds(tmp_path, monkeypatch):
    monkeypatch.setattr(image_sources, "_TIMEOUT", 0.2)
    monkeypatch.setenv("no_proxy", "*")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(MNIST, "mirrors", [f"http://127.0.0.1:{silent.getsockname()[1]}/"])
        start = time.monotonic()
        with pytest.raises(FileNotFoundError, match=r"the download failed \(timed out"):
            PixelSequences("mnist", root=str(tmp_path)).prepare_data()
    assert time.monotonic() - start < 5
    assert socket.getdefaulttimeout() is None


# Folders


def write_images(root, n, size=(40, 30)):
    root.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for i in range(n):
        end = ("png", "PNG", "bmp", "ppm", "gif", "webp", "jpg", "tif")[i % 8]
        folder = root / ("even" if i % 2 == 0 else "odd")
        folder.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)).save(folder / f"{i:03}.{end}")


def test_folder_is_split_by_names(tmp_path):
    write_images(tmp_path, 30)
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / "._000.png").write_text("no image either")
    (tmp_path / "odd" / "a.HEIC").write_text("not read")
    with pytest.warns(
        match=r"3 left out:\n  1 ending in .heic:\n.*a.HEIC\n  1 ending in .txt:\n.*notes.txt\n  1 hidden:\n.*_00"
    ):
        data = ready(dataset="folder", root=str(tmp_path), image_size=8, batch_size=4)
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 24, "val": 3, "test": 3}
    paths = [path for split in data.splits.values() for path in split.paths]
    assert len(set(paths)) == 30
    batches = list(data.train_dataloader())
    assert {tuple(batch.shape) for batch in batches} == {(4, 8 * 8 * 3)}
    moved = tmp_path.parent / f"{tmp_path.name}-moved"
    tmp_path.rename(moved)
    again = ready(dataset="folder", root=str(moved), image_size=8, seed=5)
    for name, split in data.splits.items():
        assert [p.name for p in split.paths] == [p.name for p in again.splits[name].paths]


def test_folder_with_splits_of_its_own(tmp_path):
    for i, name in enumerate(("train", "val", "test")):
        write_images(tmp_path / name, i + 1)
    data = ready(dataset="folder", root=str(tmp_path), image_size=8)
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 1, "val": 2, "test": 3}
    (tmp_path / "val").rename(tmp_path / "valid")
    with pytest.raises(ValueError, match=f"{tmp_path}: .* not val;"):
        ready(dataset="folder", root=str(tmp_path), image_size=8)


def test_image_is_read_exactly_where_nothing_is_resized(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (8, 12, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    assert image_sources.read_image(tmp_path / "a.png", 8, 3).tolist() == pixels[:, 2:10].tolist()
    grey = np.array(Image.fromarray(pixels).convert("L"))
    assert image_sources.read_image(tmp_path / "a.png", 8, 1)[..., 0].tolist() == grey[:, 2:10].tolist()


def test_shrinking_averages(tmp_path):
    stripes = np.zeros((64, 64), np.uint8)
    stripes[:, ::2] = 255
    Image.fromarray(stripes).save(tmp_path / "a.png")
    inner = image_sources.read_image(tmp_path / "a.png", 8, 1)[1:-1, 1:-1]
    assert int(inner.min()) > 110
    assert int(inner.max()) < 145


def test_unusual_images(tmp_path):
    deep = np.arange(16, dtype=np.uint16).reshape(4, 4) * 4096
    Image.fromarray(deep).save(tmp_path / "deep.png")
    assert image_sources.read_image(tmp_path / "deep.png", 4, 1).flatten().tolist() == list(range(0, 256, 16))
    Image.fromarray(deep.astype(np.float32)).save(tmp_path / "float.tif")
    with pytest.raises(ValueError, match=r"float\.tif: .*8 or 16 bits"):
        image_sources.read_image(tmp_path / "float.tif", 4, 1)
    for name, values, message in (
        ("signed.tif", deep.astype(np.int32) - 4096, "signed"),  # modulo 256, -4096 // 256 would be 240
        ("long.tif", deep.astype(np.int32) * 256, "32 bits"),
        ("shallow.png", np.arange(16, dtype=np.uint16).reshape(4, 4), "none is above 15"),
    ):
        Image.fromarray(values).save(tmp_path / name)
        with pytest.raises(ValueError, match=rf"{name}: .*{message}.*8.* bits a channel"):
            image_sources.read_image(tmp_path / name, 4, 1)
    Image.fromarray(deep).save(tmp_path / "clear.png", transparency=4096)
    Image.fromarray(deep).save(tmp_path / "negative.tif")
    black_is_zero = b"\x06\x01\x03\x00\x01\x00\x00\x00\x01"  # the last byte is the value
    tif = (tmp_path / "negative.tif").read_bytes()
    (tmp_path / "negative.tif").write_bytes(tif.replace(black_is_zero, black_is_zero[:-1] + b"\0"))
    for name in ("clear.png", "negative.tif"):
        with pytest.raises(ValueError, match=rf"{name}: .*0 is white or one is transparent"):
            image_sources.read_image(tmp_path / name, 4, 1)
    Image.fromarray(np.zeros((4, 4), np.uint16)).save(tmp_path / "black.png")
    assert not image_sources.read_image(tmp_path / "black.png", 4, 1).any()
    turned = np.arange(16, dtype=np.uint8).reshape(4, 4)
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    Image.fromarray(turned).save(tmp_path / "turned.png", exif=exif)
    assert image_sources.read_image(tmp_path / "turned.png", 4, 1).flatten().tolist() == list(range(15, -1, -1))


def test_transparent_pixels_are_white(tmp_path):
    alpha = np.array([[0, 255], [51, 0]], np.uint8)
    black = np.dstack([np.zeros((2, 2, 3), np.uint8), alpha])
    white_behind = [[255, 0], [204, 255]]  # alpha · 0 + (1 − alpha) · 255
    Image.fromarray(black).save(tmp_path / "rgba.png")
    Image.fromarray(black[..., 2:]).save(tmp_path / "la.png")
    palette = Image.fromarray(np.array([[0, 1], [1, 0]], np.uint8), "P")
    palette.putpalette([0] * 768)
    palette.save(tmp_path / "palette.png", transparency=0)
    for channels in (1, 3):
        for name, expected in (("rgba", white_behind), ("la", white_behind), ("palette", [[255, 0], [0, 255]])):
            image = image_sources.read_image(tmp_path / f"{name}.png", 2, channels)
            assert image.tolist() == np.repeat(np.array(expected)[..., None], channels, 2).tolist(), name


def test_broken_image_is_named(tmp_path):
    write_images(tmp_path, 12)
    broken = tmp_path / "even" / "000.png"
    broken.write_bytes(broken.read_bytes()[:-200])
    options = {"dataset": "folder", "root": str(tmp_path), "image_size": 8}
    with pytest.raises(ValueError, match=f"{broken}: not a readable image .*remove it or replace it"):
        PixelSequences(**options).prepare_data()
    PixelSequences(**options, verify=False).prepare_data()
    Image.new("LAB", (9, 9)).save(tmp_path / "even" / "000.tif")
    broken.unlink()
    PixelSequences(**options).prepare_data()
    with pytest.raises(ValueError, match=r"even/000\.tif: not a readable image"):
        PixelSequences(**options, channels=1).prepare_data()
    broken.write_bytes(b"")
    (tmp_path / "even" / "002.bmp").write_bytes(b"")
    with pytest.raises(ValueError, match=r"even/000\.png.* Of 13 images, 1 more are broken: \S*even/002\.bmp$"):
        PixelSequences(**options).prepare_data()
    broken.write_text("text")
    with pytest.raises(ValueError, match=f"{broken}: not a readable image"):
        image_sources.read_image(broken, 8, 3)


def test_an_image_that_would_fill_the_memory_is_not_decoded(tmp_path, monkeypatch):
    write_images(tmp_path, 12)
    huge = tmp_path / "even" / "000.png"
    Image.new("1", (9000, 9000)).save(huge)
    assert huge.stat().st_size < 20_000
    options = {"dataset": "folder", "root": str(tmp_path), "image_size": 8}
    with pytest.raises(ValueError, match=f"{huge}: .*9000 × 9000 pixels are more than max_pixels=67108864"):
        PixelSequences(**options).prepare_data()
    huge.unlink()
    PixelSequences(**options, max_pixels=40 * 30).prepare_data()
    with pytest.raises(ValueError, match="max_pixels=178956971 must be at most 178956970, Pillow's limit"):
        PixelSequences(**options, max_pixels=178_956_971)
    with pytest.raises(ValueError, match="more than max_pixels=1199"):
        PixelSequences(**options, max_pixels=40 * 30 - 1).prepare_data()


def test_folders_without_enough_images(tmp_path):
    options = {"dataset": "folder", "image_size": 8}
    with pytest.raises(FileNotFoundError, match=f"{tmp_path}: no image in it .*png"):
        ready(root=str(tmp_path), **options)
    with pytest.raises(FileNotFoundError, match=r"nowhere: there is no such folder"):
        ready(root=str(tmp_path / "nowhere"), **options)
    write_images(tmp_path, 9)
    with pytest.raises(ValueError, match=f"{tmp_path}: 9 images are too few"):
        ready(root=str(tmp_path), **options)
