"""Names of classes in every spelling that a parser might read as one, at every place of a checkpoint.

Nothing of them is executed or imported: whichever wall is missing, the others hold.
"""

import copy
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import yaml
from jsonargparse import set_parsing_settings

from lit_effattn.checkpoints.allowlist import NotAllowedError, Trust, listed
from lit_effattn.checkpoints.spec_build import build
from lit_effattn.checkpoints.spec_check import CheckpointJudge, parameters
from lit_effattn.cli.command import _Parser
from lit_effattn.settings import saved as saved_settings
from lit_effattn.settings import sealed
from lit_effattn.settings.arguments import Arguments
from lit_effattn.settings.saved import checked_settings
from lit_effattn.settings.sealed import Sealed, parse_saved
from lit_effattn.settings.trainer import Trainer
from lit_effattn.tasks import Task
from tests.support.hostile import ROOTS, beside_evil, nothing_happened, places

__all__ = ["beside_evil"]  # a fixture
pytestmark = pytest.mark.usefixtures("beside_evil")

TARGETS = {
    "a command": ("os.system", {"command": "touch pwned"}),
    "a module here": ("evil.MyAttention", {}),
    "a function here": ("evil.function", {}),
}


def escaped(text: str, form: Callable[[int], str], which: Callable[[int], bool] = lambda i: True) -> str:
    return "".join(form(ord(c)) if which(i) else c for i, c in enumerate(text))


def quoted(text: str, key: str) -> str:
    """Return JSON with another spelling of the key `class_path`."""
    return text.replace('"class_path"', f'"{key}"')


HEX4, HEX2, HEX8 = "\\u{:04x}".format, "\\x{:02x}".format, "\\U{:08x}".format


def encodings(name: str, args: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield a spec of a class in many spellings, each with the family that it is of."""
    spec = {"class_path": name, "init_args": args}
    text = json.dumps(spec)
    block = yaml.safe_dump(spec)
    yield "plain", spec
    yield "plain", name
    for prefix in ("", "x.", "x.y.", "init_args.", "init_args.x.", "dict_kwargs.", "."):
        yield "dotted key", {f"{prefix}class_path": name, f"{prefix}init_args": args}
        yield "dotted key", {f"{prefix}class_path": name, **{f"{prefix}init_args.{k}": v for k, v in args.items()}}
        yield "dotted key", {"class_path": "torch.optim.SGD", "init_args": {f"{prefix}class_path": name}}
    for form in (HEX4, HEX8, HEX2):
        for which in (lambda i: True, lambda i: i == 5, lambda i: i == 0, lambda i: i % 2 == 0):
            yield "escapes", quoted(text, escaped("class_path", form, which))
            yield "escapes", f'{{"{escaped("class_path", form, which)}": "{escaped(name, form)}"}}'
    yield "escapes", quoted(text, "class\\u005Fpath")
    yield "escapes", quoted(text, "class\\/path".replace("/", "_"))
    for start in ("---\n", "--- ", "%YAML 1.1\n---\n", "\ufeff", "\n\n", " ", "# x\n", "\t", "...\n---\n"):
        yield "document starts", start + text
        yield "document starts", start + block
    for tag in ("!!map ", "!<tag:yaml.org,2002:map> ", "!!omap ", "!x "):
        yield "tags", tag + text
    yield "tags", f"!!python/object/apply:{name} {json.dumps(list(args.values()))}"
    yield "tags", f"!!python/name:{name} ''"
    yield "tags", f"!!python/object/new:{name} {json.dumps(list(args.values()))}"
    yield "tags", f"!!python/module:{name.partition('.')[0]} ''"
    yield "anchors", f"a: &a {text}\nb: *a"
    yield "anchors", f"&a {text}"
    yield "anchors", f"- &n class_path\n- {{*n : {name}}}"
    yield "merge keys", f"<<: {text}"
    yield "merge keys", f"a: &a {text}\n<<: *a"
    yield "merge keys", f"{{<<: [{text}]}}"
    yield "merge keys", {"<<": spec}
    for flow in (text, text.replace('"', "'"), text.replace('"', ""), block, text.replace(": ", ":\n   ")):
        yield "flow and block", flow
        yield "flow and block", f"[{flow}]" if flow is not block else f"- {block.replace(chr(10), chr(10) + '  ')}"
    for q in ("'", '"', "`", "«", "\u201c", "\uff02"):
        yield "quotes", text.replace('"', q)
        yield "quotes", {f"{q}class_path{q}": name}
    for alike in (
        "cl\u0430ss_path",
        "class\uff3fpath",
        "\uff43lass_path",
        "class_path\u200b",
        "\uff43\uff4c\uff41\uff53\uff53\uff3fpath",
        "Class_Path",
    ):
        yield "look-alikes", {alike: name, "init_args": args}
        yield "look-alikes", quoted(text, alike)
    for bad in (name.replace(".", "\uff0e"), name.replace(".", "\u2024"), name.replace("s", "\u0455"), f" {name}"):
        yield "look-alikes", {"class_path": bad, "init_args": args}
    inner = text
    for _ in range(4):
        inner = json.dumps(inner)
        yield "strings of strings", inner
        yield "strings of strings", yaml.safe_dump(inner)
        yield "strings of strings", {"x": inner}
    for word in ("1", "1e3", "0x10", "2026-01-01", "null", "~", "true", "on", ".inf", "1:30", "!!int 3", "NaN", "-"):
        yield "numbers and dates", word
        yield "numbers and dates", [word]
    yield "duplicate keys", f'{{"class_path": "torch.optim.SGD", "class_path": "{name}"}}'
    yield "duplicate keys", f"class_path: torch.optim.SGD\nclass_path: {name}"
    yield "duplicate keys", f'{{"x": 1, "x": {text}}}'
    for file in (
        "evil.yaml",
        "./evil.yaml",
        "file://evil.yaml",
        "@evil.yaml",
        "${oc.env:HOME}",
        "fs::local://evil.yaml",
    ):
        yield "files", file
        yield "files", {"class_path": file}
    yield "files", {"__path__": "evil.yaml", **spec}
    for outer in (dict, tuple):
        yield "nested", outer({"x": spec}.items()) if outer is dict else (spec, text)
    yield "nested", [[[spec]]]
    yield "nested", {"x": {"y": [text]}}


PAYLOADS = [(family, payload) for target in TARGETS.values() for family, payload in encodings(*target)]
FAMILIES = sorted({family for family, _ in PAYLOADS})


@cache
def everywhere() -> list[tuple[str, type, str]]:
    """All options of all listed classes, and the trainer's."""
    result = {(root, kind, name) for root, of in ROOTS.items() for kind, name, _ in places(of)}
    result |= {("trainer", Trainer, name) for name in parameters(Trainer) if not name.endswith("help")}
    return sorted(result, key=lambda place: (place[0], place[1].__name__, place[2]))


def settings_with(payload: Any, root: str, kind: type, name: str) -> dict[str, Any]:
    """Settings of a checkpoint with the payload at a place that the parser reaches."""
    payload = copy.deepcopy(payload)
    if root == "trainer":
        return {"trainer": {name: payload}}
    spec = {"class_path": f"{kind.__module__}.{kind.__qualname__}", "init_args": {name: payload}}
    if root == "callback":
        return {"trainer": {"callbacks": [spec]}}
    if root == "data":
        if issubclass(kind, pl.LightningDataModule):
            return {"data": spec}
        return {"data": {"class_path": "lit_effattn.datamodules.SpeechData", "init_args": {"corpus": spec}}}
    transformer = {"d_model": 8, "n_heads": 2, "n_layers": 1, "attention": "LinearAttention"}
    needed = {
        "backbone": {"class_path": "lit_effattn.Transformer", "init_args": transformer},
        **{"n_levels": 17, "image_shape": [8, 8, 1], "vocab_size": 9, "n_mels": 4, "phones": ["a"], "n_classes": 2},
    }
    if issubclass(kind, Task):
        spec["init_args"] = {n: v for n, v in needed.items() if n in parameters(kind)} | spec["init_args"]
        return {"model": spec}
    task = {n: needed[n] for n in ("backbone", "n_levels", "image_shape")}
    if kind.__module__.startswith("torch.optim.lr_scheduler") or "schedules" in kind.__module__:
        task["lr_scheduler"] = spec
    elif kind.__module__.startswith("torch.optim"):
        task["optimizer"] = spec
    else:
        transformer["attention"] = spec
    return {"model": {"class_path": "lit_effattn.PixelModel", "init_args": task}}


@pytest.fixture(scope="module")
def parser() -> _Parser:
    made = _Parser(exit_on_error=False)
    made.add_lightning_class_args(Trainer, "trainer")
    made.add_subclass_arguments(Task, "model", required=False)
    made.add_subclass_arguments(pl.LightningDataModule, "data", required=False)
    set_parsing_settings(import_path_denylist=[], instantiate_subclass_spec_in_any=False)
    return made


def as_the_command_does(settings: dict[str, Any], parser: _Parser) -> str:
    """Take settings from a checkpoint as far as the constructors; return how far they came."""
    trust, closed = Trust(), None
    try:
        taken = checked_settings(settings, Path("it.ckpt"), Arguments(["fit"])).settings
    except NotAllowedError:
        return "refused"
    closed = Sealed(trust)
    try:
        parsed = parse_saved(parser, taken, closed, CheckpointJudge("it.ckpt", trust))
    except Exception:
        return "refused by the parser"
    parser._instantiators = None
    parser.add_instantiator(closed.call, object)
    try:
        parser.instantiate(parsed, instantiate_groups=False)
    except Exception:
        return "refused by a constructor"
    return "taken as text"


def as_python_does(settings: dict[str, Any]) -> None:
    for part, base in (("model", Task), ("data", pl.LightningDataModule)):
        if part in settings:
            try:
                build(settings[part], base, part, CheckpointJudge("it.ckpt", Trust()))
            except Exception:
                continue


def tried(sample: list[tuple[Any, Any]], parser: _Parser) -> Counter[tuple[str, str, str]]:
    """Try payloads at places. Return how many of each root and family ended how."""
    ends: Counter[tuple[str, str, str]] = Counter()
    for place, (family, payload) in sample:
        settings = settings_with(payload, *place)
        as_python_does(copy.deepcopy(settings))
        ends[place[0], family, as_the_command_does(settings, parser)] += 1
        assert nothing_happened(), f"{payload!r} at {place}"
    return ends


def test_every_encoding_somewhere(parser: _Parser):
    """Each payload at three places, chosen once."""
    choose = random.Random(0)
    sample = [(place, payload) for payload in PAYLOADS for place in choose.sample(everywhere(), 3)]
    ends = tried(sample, parser)
    assert {family for _, family, _ in ends} == set(FAMILIES)
    assert sum(ends.values()) == 3 * len(PAYLOADS) > 1_000
    assert sum(n for (*_, end), n in ends.items() if end == "refused") > len(PAYLOADS)


@pytest.mark.exhaustive
def test_every_encoding_everywhere(parser: _Parser, record_property: Any, capsys: pytest.CaptureFixture[str]):
    """A seventh of the payloads at each place, another seventh at the next."""
    ends = tried([(p, payload) for i, p in enumerate(everywhere()) for payload in PAYLOADS[i % 7 :: 7]], parser)
    assert sum(ends.values()) > 30_000
    table = Counter[tuple[str, str]]()
    for (root, family, _), n in ends.items():
        table[root, family] += n
    record_property("tried", dict(ends))
    with capsys.disabled():
        print(f"\n{sum(ends.values()):,} payloads, 0 executed, 0 imported")
        for (root, family), n in sorted(table.items()):
            by_end = {end: m for (r, f, end), m in sorted(ends.items()) if (r, f) == (root, family)}
            print(f"{root:9}{family:20}{n:8,}  {by_end}")


# ---------------------------------------------------------------------------------------------------- walls, one by one


def _no_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_settings, "check", lambda value, *_: value)
    monkeypatch.setattr(saved_settings, "check_value", lambda *_: None)
    monkeypatch.setattr(saved_settings, "_check_machine", lambda *_: None)


def _no_seal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sealed, "close", lambda self, value: value)


def _no_check_of_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed, "check_settings", lambda *_: None)


def _no_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed, "only_listed", lambda names: nullcontext())


WALLS = {
    "the check of what the file says": _no_check,
    "the tokens": _no_seal,
    "the check of what was parsed": _no_check_of_the_result,
    "the parser's own list": _no_lists,
}


@pytest.mark.parametrize(
    "wall", [next(iter(WALLS)), *(pytest.param(w, marks=pytest.mark.exhaustive) for w in [*WALLS][1:])]
)
def test_without_one_wall_the_others_hold(wall: str, parser: _Parser, monkeypatch: pytest.MonkeyPatch):
    WALLS[wall](monkeypatch)
    choose = random.Random(wall)
    ends = tried([(choose.choice(everywhere()), payload) for payload in PAYLOADS], parser)
    assert sum(ends.values()) == len(PAYLOADS)


def test_without_any_wall_it_would_be_executed(parser: _Parser, monkeypatch: pytest.MonkeyPatch):
    """The payloads are live: the test above can fail."""
    for remove in WALLS.values():
        remove(monkeypatch)
    payload = {"lr_lambda.class_path": "evil.function", "lr_lambda.init_args": {}}
    spec = {"class_path": "torch.optim.lr_scheduler.LambdaLR", "init_args": payload}
    model = {"class_path": "lit_effattn.PixelModel", "init_args": {"lr_scheduler": spec}}
    as_the_command_does({"model": model}, parser)
    assert not nothing_happened()


# ----------------------------------------------------------------------------------------------------------- the tokens


def test_a_string_comes_back_as_it_was():
    for text in ["", "1", "null", "{a: 1}", "evil.yaml", "os.system", "---", "\u2028", "🦆", '"', "a\nb"]:
        closed = Sealed(Trust())
        data = {"a": text, "b": [text, {"c c": text}], "n": 3, "t": True, "none": None}
        shut = closed.close(data)
        assert shut["a"] != text
        assert shut["a"].isidentifier()
        assert closed.open(shut) == data
        assert yaml.safe_load(closed.open_yaml(yaml.safe_dump(shut))) == data


def test_names_on_the_list_and_words_of_the_code_stay():
    closed = Sealed(Trust())
    kept = ["lit_effattn.attention.LinearAttention", "LinearAttention", "strided", "16-mixed"]
    assert all(listed(name) for name in kept[:2])
    assert closed.close(kept)[2:] != kept[2:]
    assert closed.seal({"names": kept, "kind": "lit_effattn.attention.SparseAttention"})["names"] == kept
