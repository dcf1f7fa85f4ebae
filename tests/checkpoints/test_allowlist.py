import importlib
import sys
from pathlib import Path
from typing import get_origin

import pytest
import torch

import lit_effattn.attention
import lit_effattn.tasks
import lit_effattn.tasks.schedules
from lit_effattn import datamodules
from lit_effattn.checkpoints.allowlist import Trust, is_ours, listed


def test_every_kind_task_and_data_set_is_listed_by_its_names():
    for package in (lit_effattn.attention, lit_effattn.tasks, datamodules):
        kinds = [getattr(package, name) for name in package.__all__]
        kinds = [kind for kind in kinds if isinstance(kind, type) and get_origin(kind) is None]
        assert kinds
        for kind in kinds:
            assert listed(f"{package.__name__}.{kind.__name__}") is kind
            assert listed(f"{kind.__module__}.{kind.__name__}") is kind
            assert listed(kind.__name__) is kind


def test_what_checkpoints_hold_is_listed():
    for name, kind in [
        ("torch.optim.RAdam", torch.optim.RAdam),
        ("torch.optim.radam.RAdam", torch.optim.RAdam),
        ("torch.optim.lr_scheduler.MultiStepLR", torch.optim.lr_scheduler.MultiStepLR),
        ("torch.nn.Embedding", torch.nn.Embedding),
        ("lit_effattn.tasks.schedules.WarmupCosine", lit_effattn.tasks.schedules.WarmupCosine),
    ]:
        assert listed(name) is kind


def test_nothing_else_is():
    for name in [
        "os.system",
        "torch.optim.AdamW.step",
        "torch.nn.Module",
        "torch.nn.Sequential",
        "torch.optim.optimizer.Tensor",
        "lit_effattn.tasks.pixels.torch",
        "lightning.pytorch.callbacks.ModelCheckpoint",
        "lightning.pytorch.callbacks.LambdaCallback",
        "lit_effattn.Path",
        "lit_effattn.nn.heads.Tensor",
        "lit_effattn.tasks.ctc.Path",
        "lit_effattn.nn.adaptive.Module",
        "Tensor",
        "lit_effattn.nowhere.LinearAttention",
        "ReduceLROnPlateau",  # there are two
        "",
    ]:
        assert listed(name) is None


def test_a_folder_of_the_same_name_elsewhere_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "datamodules.py").write_text("class PixelSequences: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "datamodules", raising=False)
    foreign = importlib.import_module("datamodules").PixelSequences
    del sys.modules["datamodules"]  # monkeypatch would put theirs back
    assert listed("datamodules.PixelSequences") is None
    assert is_ours(datamodules.PixelSequences)
    assert not is_ours(foreign)


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("from os import system\nfrom mine.inner import Mine\n")
    (tmp_path / "mine" / "inner.py").write_text("class Mine: pass\nclass Other: pass\ndef make(): pass\n")
    (tmp_path / "touched.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("mine", "mine.inner"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.usefixtures("mine")
def test_what_a_trusted_module_defines_is_trusted_and_not_what_it_imports():
    trust = Trust(["mine"])
    inner = sys.modules["mine.inner"]
    assert trust.get("mine.Mine") is inner.Mine
    assert trust.get("mine.inner.Other") is inner.Other
    assert trust.has(inner.make)
    assert trust.get("mine.system") is None
    assert not trust.has(sys.modules["os"].system)
    assert trust.get("mine.nothing") is None


@pytest.mark.usefixtures("mine")
def test_a_class_that_is_trusted_by_name_is_the_only_one():
    trust = Trust(["mine.inner.Mine"])
    inner = sys.modules["mine.inner"]
    assert trust.get("mine.inner.Mine") is inner.Mine
    assert trust.has(inner.Mine)
    assert trust.get("mine.inner.Other") is None
    assert not trust.has(inner.Other)
    assert trust.get("touched.Anything") is None  # and is not imported to see


@pytest.mark.usefixtures("mine")
def test_a_class_itself_can_be_trusted():
    class Here:
        pass

    trust = Trust([Here])
    assert trust.has(Here)
    assert trust.get(f"{__name__}.{Here.__qualname__}") is Here


def test_one_string_is_no_list_of_names():
    with pytest.raises(ValueError, match=r"give a tuple of names: trust=\('mine',\)"):
        Trust("mine")
