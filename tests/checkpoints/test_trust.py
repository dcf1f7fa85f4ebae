import importlib
import sys
from pathlib import Path

import pytest

import lit_effattn
from lit_effattn.checkpoints.trust import Trust, imported
from lit_effattn.nn.transformer import Transformer


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


@pytest.mark.usefixtures("mine")
def test_a_module_itself_can_be_trusted():
    module = importlib.import_module("mine")
    assert Trust([module]).get("mine.inner.Other") is module.inner.Other


def test_one_string_is_no_list_of_names():
    with pytest.raises(ValueError, match=r"give a tuple of names: trust=\('mine',\)"):
        Trust("mine")


def test_a_class_that_the_package_exports_is_known_before_it_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(vars(lit_effattn), "Transformer", raising=False)
    assert imported("lit_effattn.Transformer") is Transformer
