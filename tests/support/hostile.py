"""What the tests of hostile checkpoints share: a module that must not be imported, and all places of settings."""

import sys
from collections.abc import Iterator
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import yaml

from lit_effattn.checkpoints.allowlist import _listed
from lit_effattn.checkpoints.spec_check import Place, parameters
from lit_effattn.tasks import Task

EVIL = """
from pathlib import Path
Path("imported").touch()
from lit_effattn.attention import LinearAttention
class MyAttention(LinearAttention):
    def __init__(self, *args):
        Path("called").touch()
        super().__init__(*args)
def function(*args, **kwargs):
    Path("called").touch()
"""


@pytest.fixture
def beside_evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("evil.py").write_text(EVIL)
    Path("evil.yaml").write_text(yaml.safe_dump({"class_path": "evil.MyAttention"}))
    sys.modules.pop("evil", None)
    yield
    sys.modules.pop("evil", None)


def nothing_happened() -> bool:
    return "evil" not in sys.modules and not any(Path(name).exists() for name in ("pwned", "imported", "called"))


def places(place: Place) -> Iterator[tuple[type, str, Place]]:
    """Yield all parameters of the listed classes that may stand at a place, or in a parameter of one of them."""
    left, seen = [place], set()
    while left:
        base = left.pop().named
        for kind in {k for k in _listed().values() if issubclass(k, base)} - seen:
            seen.add(kind)
            for name, (annotation, _) in parameters(kind).items():
                if name.endswith("help"):
                    continue
                inside = Place.of(annotation)
                yield kind, name, inside
                nested = Place.of(annotation, *inside.items, *inside.values)
                if nested.named and not issubclass(torch.Tensor, nested.named):
                    left.append(nested)


ROOTS = {
    "model": Place(classes=(Task,)),
    "data": Place(classes=(pl.LightningDataModule,)),
    "callback": Place(classes=(pl.Callback,)),
}
