import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torchvision.datasets import CIFAR10

from lit_effattn.datamodules import LabelledImages, PixelSequences
from tests.datamodules.images.test_pixels import write_cifar10, write_idx

SPLITS = ("train", "val", "test")


def ready(**options):
    data = LabelledImages(**options)
    data.prepare_data()
    data.setup("fit")
    data.setup("test")
    return data


def everything(data, split):
    part = data.splits[split]
    return part[list(range(len(part)))]


def test_digits_have_the_labels_of_their_images_and_the_splits_of_pixel_sequences():
    truth = load_digits()
    labels = {image.astype(np.uint8).tobytes(): label for image, label in zip(truth.images, truth.target, strict=True)}
    assert len(labels) == 1797
    data, plain = ready(), PixelSequences()
    plain.setup("fit")
    plain.setup("test")
    for split in SPLITS:
        batch = everything(data, split)
        assert torch.equal(batch.x, plain.splits[split][list(range(len(batch.x)))])
        assert batch.labels.tolist() == [labels[row.numpy().tobytes()] for row in batch.x]
        assert batch.lengths is None
    assert data.classes == tuple("0123456789")
    assert (data.vocab_size, data.n_features, data.shape) == (17, None, (8, 8, 1))


def test_loaders_return_labelled_batches():
    data = ready(batch_size=32, eval_batch_size=90)
    assert [len(batch.labels) for batch in data.test_dataloader()] == [90, 90]
    indices = torch.cat([batch.indices for batch in data.predict_dataloader()])
    assert indices.tolist() == list(range(180))
    first = next(iter(data.train_dataloader()))
    assert torch.equal(first.labels, everything(data, "train").labels[first.indices])
    assert len(set(first.indices.tolist())) == 32


@pytest.mark.filterwarnings("ignore:.* training images in")
@pytest.mark.parametrize("dataset", ["mnist", "fashion_mnist", "cifar10"])
def test_labels_of_files_belong_to_their_images(dataset, tmp_path, monkeypatch):
    """Each image carries its label in its first value."""
    if dataset.endswith("mnist"):
        folder = "MNIST" if dataset == "mnist" else "FashionMNIST"
        for part, n in (("train", 60), ("t10k", 10)):
            images = np.zeros((n, 28, 28), np.uint8)
            images[:, 0, 0] = np.arange(n) * (7 if n == 60 else 3) % 10
            write_idx(tmp_path / f"{folder}/raw/{part}-images-idx3-ubyte", images)
            write_idx(tmp_path / f"{folder}/raw/{part}-labels-idx1-ubyte", images[:, 0, 0].copy())
    else:
        write_cifar10(tmp_path, monkeypatch)
        load = CIFAR10.__init__

        def opened(self, *given, **options):
            load(self, *given, **options)
            self.data[:, 0, 0, 0] = self.targets = np.arange(len(self.data)) * (7 if self.train else 3) % 10

        monkeypatch.setattr(CIFAR10, "__init__", opened)
    data = ready(dataset=dataset, root=str(tmp_path), download=False)
    for split in SPLITS:
        batch = everything(data, split)
        assert torch.equal(batch.labels, batch.x[:, 0].long())
        assert split == "val" or len(batch.labels.unique()) > 5
    assert len(data.classes) == 10


def write_classes(root, names, n=1, at=0):
    for label, name in enumerate(names):
        (root / name).mkdir(parents=True)
        for i in range(n):
            Image.new("L", (8, 8), 50 * label + at + i).save(root / name / f"{i}.png")


@pytest.mark.parametrize("divided", [True, False])
def test_subfolders_are_classes(divided, tmp_path):
    names = ("cat", "dog", "owl")
    if divided:
        for i, split in enumerate(SPLITS):
            write_classes(tmp_path / split, names, 2, at=10 * i)
    else:
        write_classes(tmp_path, names, 12)
    data = ready(dataset="folder", root=str(tmp_path), image_size=8, channels=1, flip=True)
    assert data.classes == names
    counts = []
    for split in SPLITS:
        batch = everything(data, split)
        assert torch.equal(batch.labels, batch.x[:, 0].long() // 50)
        counts.append(len(batch.labels))
    assert counts == ([6, 6, 6] if divided else [30, 3, 3])
    assert [Path(name).parts[-2] for name in data.test_files] == [names[label] for label in batch.labels]
    part = data.splits["train"]
    mirrored = part[[len(part) + 1, 0]]  # image 1 mirrored
    assert torch.equal(mirrored.labels, part[[1, 0]].labels)
    assert mirrored.indices.tolist() == [1, 0]


def test_classes_without_training_images_are_named(tmp_path):
    for split, names in {"train": ("cat", "dogs"), "val": ("cat", "dog"), "test": ("cat", "dogs")}.items():
        write_classes(tmp_path / split, names, 2)
    with pytest.warns(match="val: 2 have a class that is not in the training data: 'dog'") as warned:
        ready(dataset="folder", root=str(tmp_path), image_size=8, channels=1)
    assert not any("test: " in str(warning.message) for warning in warned)


def test_what_has_no_classes_is_refused(tmp_path):
    write_classes(tmp_path / "other", ("Train", "Test"), 10)
    with pytest.raises(ValueError, match=r"Train\W.*png and Test\W.*png have names of splits; put them into folders"):
        _ = LabelledImages("folder", root=str(tmp_path / "other"), image_size=8).classes
    shutil.rmtree(tmp_path / "other")
    write_classes(tmp_path, ("cat",), 10)
    options = {"dataset": "folder", "root": str(tmp_path), "image_size": 8}
    with pytest.raises(ValueError, match="cat is the only class; add a subfolder"):
        _ = LabelledImages(**options).classes
    Image.new("L", (8, 8)).save(tmp_path / "stray.png")
    with pytest.raises(ValueError, match=r"stray.png has no class; put it into a subfolder"):
        _ = LabelledImages(**options).classes
    with pytest.raises(FileNotFoundError, match="no such folder"):
        _ = LabelledImages(**{**options, "root": "nowhere"}).classes
