"""Settings that jsonargparse would parse a thousand times are parsed once, with the same result."""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonargparse._typehints
import pytest
import yaml
from jsonargparse import Namespace

from lit_effattn.cli import command, main
from lit_effattn.cli.parse_once import copied, frozen
from lit_effattn.nn.transformer import Transformer


@contextmanager
def nothing_remembered() -> Iterator[dict[Any, Any]]:
    """Yield no results, whoever calls."""
    yield {}


def settings(flags: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["fit", "--config", "g2p_linear", *flags, "--print_config"])
    return capsys.readouterr().out


def test_equal_settings_are_parsed_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.chdir(tmp_path)
    parsed: Counter[str] = Counter()
    parse = jsonargparse._typehints.adapt_class_type

    def counted(value: Any, *args: Any, **options: Any) -> Any:
        parsed[value["class_path"].rsplit(".")[-1]] += 1
        return parse(value, *args, **options)

    monkeypatch.setattr(jsonargparse._typehints, "adapt_class_type", counted)
    flags = ["--model.backbone.encoder.attention.feature_map=EluFeatureMap", "--trainer.max_steps", "3"]
    printed = []
    for remembers in (True, False):
        if not remembers:
            monkeypatch.setattr(command, "parsed_before", nothing_remembered)
            monkeypatch.delattr(command._Parser, "_parse_common")
        printed.append((settings(flags, capsys), parsed["EluFeatureMap"]))
        parsed.clear()
    (remembered, few), (definition, many) = printed
    assert remembered == definition
    assert "EluFeatureMap" in definition
    assert 0 < 5 * few < many, f"{few} calls with, {many} without memory"


def test_a_file_named_in_two_folders_is_two_files(tmp_path: Path):
    files = [tmp_path / folder / "backbone.yaml" for folder in ("a", "b")]
    for file, eps in zip(files, (0.25, 0.5), strict=True):
        file.parent.mkdir()
        attention = {"class_path": "LinearAttention", "init_args": {"qk_norm_eps": eps}}
        (file.parent / "attention.yaml").write_text(yaml.safe_dump(attention))
        options = {"d_model": 8, "n_heads": 2, "n_layers": 1, "attention": "attention.yaml"}
        file.write_text(yaml.safe_dump({"class_path": "Transformer", "init_args": options}))
    parser = command._Parser()
    parser.add_subclass_arguments(Transformer, "first")
    parser.add_subclass_arguments(Transformer, "second")
    parsed = parser.parse_args([f"--first={files[0]}", f"--second={files[1]}"])
    found = [parsed[name].init_args.attention.init_args.qk_norm_eps for name in ("first", "second")]
    assert found == [0.25, 0.5]


def test_keys_tell_settings_apart():
    one, other = object(), object()
    values = [True, 1, 1.0, "1", None, "None", 0.0, -0.0, [1], (1,), {"a": 1}, Namespace(a=1), {"a": [1]}, one, other]
    assert len({frozen(value) for value in values}) == len(values)
    assert frozen({"a": [1, {"b": math.nan}]}) == frozen({"a": [1, {"b": math.nan}]})
    assert frozen(one) == frozen(one)


def test_a_copy_shares_no_container():
    value = Namespace(a=[1, {"b": (2, [3])}], c=Namespace(d=[4]))
    copy = copied(value)
    assert copy == value
    copy.a[1]["b"][1].append(5)
    copy.c.d.append(5)
    copy.a.append(5)
    assert value == Namespace(a=[1, {"b": (2, [3])}], c=Namespace(d=[4]))
