"""Which settings the user gives: every form of a flag and of a file."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_effattn.settings.arguments import Arguments, File
from tests.support.commands import REPOSITORY

STRIDE = "model.backbone.attention.stride"
SPARSE: dict[str, Any] = {"class_path": "lit_effattn.attention.SparseAttention", "init_args": {"stride": 4}}
TRANSFORMER = {"class_path": "Transformer", "init_args": {"attention": SPARSE}}
MODEL = {"class_path": "PixelModel", "init_args": {"backbone": TRANSFORMER}}


@pytest.fixture(autouse=True)
def _in_a_folder_with_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    write("sparse.yaml", SPARSE)
    write("transformer.yaml", {"attention": "mine/link.yaml"})
    write("run.yaml", {"model": MODEL})
    write("other.yaml", {"model": {"class_path": "PixelModel"}})
    write("mine/dotted.yaml", {"model.init_args.backbone.attention": "inner.yaml"})
    write("mine/inner.yaml", {"init_args": {"stride": 4}})
    write("mine/link.yaml", ["SoftmaxAttention", {"stride": 4}])


def write(path: str, content: Any) -> None:
    Path(path).write_text(yaml.safe_dump(content))


def parse(*args: str) -> Arguments:
    return Arguments(["fit", *args])


FORMS = [
    [f"--{STRIDE}", "4"],
    [f"--{STRIDE}=4"],
    ["--model.init_args.backbone.init_args.attention.init_args.stride", "4"],
    ["--model.backbone.attention", json.dumps(SPARSE)],
    [f"--model.backbone.attention={json.dumps(SPARSE)}"],
    ["--model.backbone.attention", "{stride: 4}"],
    ["--model.backbone.attention.init_args={stride: 4}"],
    ["--model.backbone.attention", json.dumps([SPARSE, "SoftmaxAttention"])],
    ["--model.backbone.attention", "- class_path: SparseAttention\n  init_args:\n    stride: 4"],
    ["--model.backbone.attention+", json.dumps([SPARSE])],
    ["--model.backbone", json.dumps(TRANSFORMER)],
    ["--model", json.dumps(MODEL)],
    ["--model.backbone.attention", "sparse.yaml"],
    ["--model.backbone", "transformer.yaml"],
    ["--config", "run.yaml"],
    ["--config=run.yaml"],
    ["-c", "run.yaml"],
    ["--config", "run.yaml", "--config", "other.yaml"],
    ["--config", "other.yaml", "--model.seed", "-1", "-c", "run"],
    ["--config", "mine/dotted.yaml"],
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: " ".join(form)[:50])
def test_every_form_gives_the_setting(form: list[str]):
    arguments = parse(*form)
    assert arguments.stated.values(STRIDE) in ([4], ["4"])
    assert not arguments.stated.given("model.backbone.stride")
    assert not arguments.stated.given("data.backbone.attention.stride")
    appended = "attention+" in form[0]  # the list is not given, nor are the options of its items
    assert arguments.stated.given(STRIDE) == (not appended)
    assert appended or arguments.stated.text(STRIDE) == "4"


@pytest.mark.parametrize(
    "flags",
    [
        "--model.backbone.attention SparseAttention",
        "--model.backbone.attention.pattern=strided",
        "--data.root stride",
        "--data.stride 4",
        "--model.front_end.stride 4",
        "--model.backbone.attention my_strides.Sparse",
        "--model.backbone.attention.stride_of 4",
        "--model.backbone.attention.stride.inner 4",
        "--name --model.backbone.attention=stride",
        "--model.backbone.attention missing.yaml",
    ],
)
def test_what_only_looks_like_it_does_not(flags: str):
    arguments = Arguments(["data", *flags.split()])
    assert not arguments.stated.given(STRIDE)
    assert arguments.stated.text(STRIDE) is None


def test_the_options_of_a_class_are_dropped_with_it_and_kept_for_the_same():
    arguments = parse("--config", "run.yaml", "--model.backbone.attention", "mine.SparseAttention", "--model.d=1")
    assert arguments.stated.values(STRIDE) == [4]
    arguments = parse("--config", "run.yaml", "--model.backbone", "LSTM", "--model.backbone.attention.n", "3")
    assert arguments.stated.values(STRIDE) == []
    assert arguments.stated.text("model.backbone.attention.n") == "3"
    over = parse("--model.d", "2").over({"model": MODEL, "data.x": 5})
    assert (over.values(STRIDE), over.text("model.d"), over.text("data.x")) == ([4], "2", "5")


def test_flags_come_after_files_and_the_last_counts():
    arguments = parse("--model.d 1", "--model.d", "3", "--config", "run.yaml", f"--{STRIDE}=9", "--model.d=")
    assert arguments.stated.text(STRIDE) == "9"
    assert arguments.files[0].values(STRIDE) == [4]
    assert arguments.flags.values(STRIDE) == ["9"]
    assert arguments.stated.text("model.d") == ""


def test_the_value_of_a_flag_is_its_text_unless_it_is_a_list_a_mapping_or_null():
    texts = {"a": "007", "b": "1e-3", "c": "-5", "d": "- 5", "e": "{f: [1]}", "g": "null", "h": "[", "i": "a: b: c"}
    arguments = parse(*(arg for key, text in texts.items() for arg in (f"--{key}", text)))
    expected = {**texts, "d": [5], "e": {"f": [1]}, "g": None}
    assert {key: arguments.stated.values(key)[-1] for key in texts} == expected
    assert arguments.stated.given("g")
    assert parse("--trainer.default_root_dir", "run.yaml").stated.text("trainer.default_root_dir") == "run.yaml"
    assert arguments.stated.values("e.f") == [[1]]


def test_a_flag_is_no_value_of_the_flag_before_it():
    arguments = parse("--print_config", "--model", "A", "--x", "-y", "--z", "- a", "--help", "all")
    assert {o.key: o.text for o in arguments.options if o.key} == {
        "print_config": None,
        "model": "A",
        "x": None,
        "z": "- a",
        "help": "all",
    }


def test_what_is_appended_does_not_replace():
    carry = "{class_path: lit_effattn.callbacks.MemoryCarry, init_args: {n: 1}}"
    arguments = parse("--trainer.callbacks+", "FeatureRedraw", f"--trainer.callbacks+={carry}")
    assert not arguments.stated.given("trainer.callbacks")
    assert arguments.stated.classes("trainer.callbacks") == ["FeatureRedraw", "MemoryCarry"]
    assert parse("--trainer.callbacks", "null").stated.given("trainer.callbacks")
    for content in ({"trainer": {"callbacks+": ["FeatureRedraw"]}}, {"trainer.callbacks+": "FeatureRedraw"}):
        file = File("a.yaml", content)
        assert not file.given("trainer.callbacks")
        assert file.classes("trainer.callbacks") == ["FeatureRedraw"]
    for inner in ('{"callbacks": ["FeatureRedraw"]}', '{"callbacks+": ["FeatureRedraw"]}'):
        assert parse("--trainer", inner).stated.classes("trainer.callbacks") == ["FeatureRedraw"]
        assert parse("--trainer", inner).stated.given("trainer.callbacks") == ("+" not in inner)


def test_classes_and_their_places():
    arguments = parse("--model", json.dumps(MODEL), "--model.backbone.attention", '["a.A", {"class_path": "b.B"}]')
    assert [*arguments.stated.named()] == [
        ("model", ["PixelModel"]),
        ("model.backbone", ["Transformer"]),
        ("model.backbone.attention", ["A", "B"]),
    ]
    assert not arguments.stated.given(STRIDE)  # an option of the class that was replaced


@pytest.mark.parametrize(
    ("command", "own"),
    [
        ("fit", {"config", "trust", "name", "ckpt_path", "trainer.default_root_dir"}),
        ("test", {"config", "trust", "name", "ckpt_path", "trainer.default_root_dir", "average"}),
        ("data", {"config", "trust"}),
    ],
)
def test_flags_that_say_which_run_is_meant_are_read_here(command: str, own: set[str]):
    keys = ["config", "trust", "name", "ckpt_path", "trainer.default_root_dir", "average", "model.d"]
    for form in ("--{}=x", "--{} x"):
        args = [arg for key in keys for arg in form.format(key).split()]
        arguments = Arguments([command, "stray", *args, "end"])
        left = [arg for key in keys if key not in own for arg in form.format(key).split()]
        assert arguments.remaining == ["stray", *left, "end"]
        assert arguments.typed == [command, "stray", *args, "end"]
    for key in own:
        with pytest.raises(ValueError, match=f"--{key} has no value: expected one argument"):
            Arguments([command, f"--{key}", "--model.d", "3"])


def test_names_that_are_trusted():
    write("run.yaml", {"trust": ["json.loads", "json.dumps"]})
    write("other.yaml", {"trust": "json.load"})
    flags = ["--trust", "json.dump", "--trust+=os.getcwd", "--trust=[os.fspath, os.walk]"]
    arguments = parse(*flags, "--config", "run", "--config", "other")
    of_flags = ["json.dump", "os.getcwd", "os.fspath", "os.walk"]
    assert arguments.trust.names == ["json.loads", "json.dumps", "json.load", *of_flags]
    assert arguments.remaining == []


def test_files_are_read_once_and_not_for_help():
    arguments = parse("--config", "run", "--config", "nowhere", "--help", "all")
    assert arguments.flags.text("help") == "all"
    assert arguments.files == []
    assert parse("--config", "nowhere", "-h").flags.given("help")
    with pytest.raises(ValueError, match="--config nowhere: there is no such file"):
        _ = parse("--config", "nowhere", "--model.help").files
    arguments = parse("--config", "run")
    assert arguments.files is arguments.files


@pytest.mark.parametrize("flag", ["-cdigits_linear", "-config", "-c=run.yaml"])
def test_a_short_option_is_followed_by_a_space(flag: str):
    with pytest.raises(ValueError, match="options begin with --"):
        parse(flag)


def test_a_file_that_names_itself_ends():
    write("loop.yaml", {"model": "loop.yaml", "init_args": "loop.yaml"})
    assert not parse("--config", "loop.yaml").stated.given("model.model.backbone")
    assert len([*parse("--config", "loop.yaml").stated.named()]) < 100


@pytest.mark.parametrize("flag", ["name", "ckpt_path", "trainer.default_root_dir", "init_weights", "prompt", "trust+"])
def test_a_text_that_is_the_name_of_a_file_of_settings_is_not_read(flag: str):
    Path("broken.yaml").write_text("a: [")
    assert parse(f"--{flag}", "broken.yaml").stated.at(flag.rstrip("+"))
    write("text.yaml", {flag.rstrip("+"): "broken.yaml"} if "." not in flag else {})
    assert parse("--config", "text.yaml").stated.text("model") is None
    with pytest.raises(ValueError, match=r"broken\.yaml is not YAML"):
        _ = parse("--model.backbone", "broken.yaml").stated


def test_the_parser_gets_files_flags_and_the_folder_of_the_runs_in_this_order():
    arguments = parse("--model.d", "3", "--config", "run.yaml", "--name", "a", "--ckpt_path", "b")
    assert arguments.for_parser(root=None) == ["fit", "--config", "run.yaml", "--model.d", "3"]
    *_, flag, folder = arguments.for_parser(root=Path("runs/a"))
    assert (flag, folder) == ("--trainer.default_root_dir", "runs/a")
    (_, _, run, *_) = arguments.for_parser(root=None, run={"model": {"d": 2}})
    assert yaml.safe_load(run) == {"model": {"d": 2}}
    by_flag = parse("--trainer.default_root_dir", "mine", "--model.d", "3").for_parser(root=None)
    assert by_flag == ["fit", "--model.d", "3", "--trainer.default_root_dir", "mine"]


def test_nobody_else_reads_the_command_line():
    """`cli.main` takes it from Python; a program that another process starts has arguments of its own."""
    readers = {
        str(path.relative_to(REPOSITORY))
        for folder in ("lit_effattn", "datamodules", "callbacks")
        for path in (REPOSITORY / folder).rglob("*.py")
        if "argv" in path.read_text()
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Attribute) and node.attr == "argv")
        or (isinstance(node, ast.ImportFrom) and node.module == "sys" and "argv" in {a.name for a in node.names})
    }
    assert readers == {"lit_effattn/cli/__init__.py", "datamodules/speech/espeak_process.py"}
