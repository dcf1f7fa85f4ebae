"""What the tests of hostile files share: a module that must not be imported, and names of classes in many forms."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

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

NAMES: dict[str, tuple[Any, dict[str, Any]]] = {
    "a command": ("os.system", {"command": "touch pwned"}),
    "code": ("builtins.exec", {"source": "open('pwned', 'w')"}),
    "a constructor that runs a command": ("subprocess.Popen", {"args": ["touch", "pwned"]}),
    "a class of the current folder": ("evil.MyAttention", {}),
    "a function of the current folder": ("evil.function", {}),
    "a class by its bare name": ("MyAttention", {}),
    "a method of a listed class": ("torch.optim.adamw.AdamW.step", {}),
    "a class method of ours": ("lit_effattn.PixelModel.load_from_checkpoint", {"checkpoint_path": "evil.ckpt"}),
    "an imported module of ours": ("lit_effattn.cli.command.os.system", {"command": "touch pwned"}),
    "a download": ("torch.hub.load", {"repo_or_dir": "somebody/something", "model": "it"}),
    "a pickle": ("torch.load", {"f": "evil.pt", "weights_only": False}),
    "a callback that deletes": ("lightning.pytorch.callbacks.ModelCheckpoint", {"dirpath": "."}),
    "jsonargparse's settings": ("jsonargparse.set_parsing_settings", {"import_path_allowlist": ["os"]}),
    "dots": ("..os.system", {}),
    "no string": (7, {}),
}


def forms(name: Any, args: dict[str, Any]) -> Iterator[Any]:
    """Yield a spec of a class in forms that some parser reads as one."""
    spec = {"class_path": name, "init_args": args}
    text, block = json.dumps(spec), yaml.safe_dump(spec)
    yield from (spec, [spec], [[spec]], {"x": spec}, name, [name], text, block, json.dumps(text), {"x": text})
    yield {"class_path": name, "dict_kwargs": args}
    yield {"class_path": spec}
    yield {"x.class_path": name, "x.init_args": args}
    yield {"init_args.class_path": name}
    yield {"<<": spec}
    yield {"__path__": "evil.yaml", **spec}
    yield text.replace("class_path", "class\\u005fpath")
    yield text.replace("class_path", "\uff43lass_path")
    yield f"!!python/object/apply:{name} {json.dumps(list(args.values()))}"
    yield f"!!python/name:{name} ''"
    yield f"---\n{text}"
    yield f"a: &a {text}\nb: *a"
    yield "evil.yaml"


PAYLOADS = [payload for named in NAMES.values() for payload in forms(*named)]


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
