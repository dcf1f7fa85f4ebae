"""Options that are text take every text as it is, on the command line and in files."""

import typing
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import yaml
from jsonargparse import set_dumper

from lit_effattn import registry
from lit_effattn.cli import main
from lit_effattn.cli.command import CLI
from lit_effattn.cli.parser import Parser
from lit_effattn.datamodules import SpeechCorpus, SpeechData
from lit_effattn.hparams import parameters, subclasses
from lit_effattn.settings.arguments import Arguments
from lit_effattn.settings.building import build_data
from lit_effattn.settings.texts import is_text
from lit_effattn.settings.yaml_text import dump_yaml

ODD = (
    *("null", "~", "None", "", " ", "true", "1e3", "0x1f", "1_000", "2024-01-01", "#include <stdio.h>", " # end"),
    *("x: y.wav", "{a: b}", "{a", "[1", "*a", "&a b", "!x y", "%d", "@x", "a\nb: c", "'q'", '"q"', "a.yaml", "=", "é"),
)
BASES = (pl.LightningDataModule, pl.Callback, SpeechCorpus)
CLASSES = sorted({*registry.classes(), *(kind for base in BASES for kind in subclasses(base))}, key=str)


def texts(hints: dict[str, Any]) -> list[str]:
    """Return the names that have a type of `is_text`."""
    return [name for name, hint in hints.items() if is_text(hint)]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text("a: b")


def test_a_type_is_text_if_every_text_is_a_value_of_it():
    for hint in (str, str | None, Path, Path | str | None, list[str] | str | None):
        assert is_text(hint)
    for hint in (int | str, list[str], list[str] | None, typing.Literal["a"], str | bool, str | dict[str, str], None):
        assert not is_text(hint)


def test_texts_of_every_class_are_kept():
    """A few texts for each option, each text for many options."""
    n = 0
    for kind in CLASSES:
        parser = Parser()
        names = texts({name: p.annotation for name, p in parameters(kind).items()})
        if not names:
            continue
        parser.add_class_arguments(kind, "x", skip={name for name in parameters(kind) if name not in names})
        for name in names:
            for text in ODD[n % 5 :: 5]:
                flag = parser.parse_args([f"--x.{name}={text}"], _skip_validation=True)
                file = parser.parse_object({"x": {name: text}}, _skip_required=True)
                for value in (flag.x[name], file.x[name]):
                    assert value == (Path(text) if isinstance(value, Path) else text), (kind, name)
            n += 1
    assert n > 40  # each text for at least 8 options


def test_the_flag_of_a_nested_class_and_a_file_keep_a_text_and_only_a_file_has_null():
    set_dumper("yaml", dump_yaml)
    parser = Parser()
    parser.add_subclass_arguments(SpeechData, "data")
    corpus = "lit_effattn.datamodules.EspeakCorpus"
    for text in ODD:
        flags = ["--data", "SpeechData", "--data.corpus", corpus, f"--data.audio={text}", f"--data.corpus.root={text}"]
        config = parser.parse_args(flags).data.init_args
        assert (config.audio, config.corpus.init_args.root) == (text, text)
        spec = {"class_path": "SpeechData", "init_args": {"audio": text, "corpus": {"class_path": corpus}}}
        again = parser.parse_string(parser.dump(parser.parse_object({"data": spec})))
        assert again.data.init_args.audio == text
    assert parser.parse_args([*flags[:4], "--data.audio", "[a, '# b']"]).data.init_args.audio == ["a", "# b"]
    spec["init_args"]["audio"] = None
    assert parser.parse_object({"data": spec}).data.init_args.audio is None
    assert parser.parse_args(["--data", yaml.safe_dump(spec)]).data.init_args.audio is None


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict", "generate"])
def test_every_text_of_every_command_is_kept(command: str, monkeypatch: pytest.MonkeyPatch):
    class Stopped(CLI):
        """Parses nothing, and keeps the parser of the command."""

        def parse_arguments(self, parser: Any, args: Any) -> None:
            raise StopIteration(self._parser(command))

    with pytest.raises(StopIteration) as stopped:
        Stopped(Arguments([command, "--help"]))
    parser = stopped.value.value
    names = [action.dest for action in parser._actions if is_text(getattr(action, "_typehint", None))]
    assert {"ckpt_path", "name", "trainer.default_root_dir"} <= {*names}
    assert command != "generate" or {"prompt", "prompt_file", "source", "state", "save_state"} <= {*names}
    for text in ODD:
        config = parser.parse_args([f"--{name}={text}" for name in names], _skip_validation=True)
        assert {name: config[name] for name in names} == dict.fromkeys(names, text)
    own = Arguments([command, *(f"--{name}=null" for name in ("name", "ckpt_path", "init_weights"))])
    assert [own.flags.text(name) for name in ("name", "ckpt_path", "init_weights")] == ["null"] * 3


def test_a_prompt_with_a_sign_of_yaml_begins_the_text(capsys: pytest.CaptureFixture[str]):
    for prompt in ("#include <stdio.h>", "null", "x: y.wav"):
        main(["generate", "--ckpt_path", "model:stdlib", "--prompt", prompt, "--n_tokens", "2"])
        assert capsys.readouterr().out.startswith(prompt)


def test_data_that_are_built_alone_keep_their_texts():
    manifests = {"train": "~", "val": "# a", "test": "c", "lexicon": None, "folding": "null"}
    corpus = {"class_path": "ManifestCorpus", "init_args": manifests}
    data: Any = build_data({"class_path": "SpeechData", "init_args": {"corpus": corpus}})
    assert [data.corpus.folding, *data.places[:2]] == [Path("null"), Path("~"), Path("# a")]
