"""A stand-in for the package `datasets`, with the attributes that the sources use."""

import json
import sys
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import pytest

REAL = pytest.mark.skipif("not __import__('importlib.util').util.find_spec('datasets')", reason="needs datasets")


class Rows(list):
    features = MappingProxyType({})

    def __getitem__(self, key):
        return [row[key] for row in self] if isinstance(key, str) else super().__getitem__(key)

    @property
    def column_names(self):
        return list(self[0])

    def select_columns(self, names):
        return Rows({name: row[name] for name in names} for row in self)

    @property
    def _fingerprint(self):
        return str(self)


def write_rows(folder, names, row, n):
    """Write `n` rows of each split, `row(name, i)`."""
    folder.mkdir()
    for name in names:
        (folder / f"{name}.jsonl").write_text("\n".join(json.dumps(row(name, i)) for i in range(n)))


def fake_datasets(monkeypatch):
    """Replace `datasets`."""

    def load_dataset(path, subset):
        assert subset is None
        files = {file.stem: file for file in Path(path).glob("*.jsonl")}
        return {name: Rows(json.loads(line) for line in file.open()) for name, file in files.items()}

    monkeypatch.setattr("lit_effattn.datamodules.common.hugging_face.find_spec", lambda name: True)
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset, __version__="4.0.0"))
