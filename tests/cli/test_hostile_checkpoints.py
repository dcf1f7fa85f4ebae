"""Checkpoints that were written to do harm: nothing in them is executed, imported, logged to or deleted.

The places are found by walking the annotations of all listed classes, so that a new option is tried by itself.
"""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from jsonargparse import ArgumentParser

from lit_effattn import LanguageModel, PixelModel, SpeechRecognizer
from lit_effattn.checkpoints.allowlist import LIMITS, SCHEDULE, NotAllowedError, Trust, _listed
from lit_effattn.checkpoints.spec_check import ANYTHING, CheckpointJudge, Place, check, parameters
from lit_effattn.cli import main
from lit_effattn.settings.arguments import Arguments
from lit_effattn.settings.saved import checked_settings
from lit_effattn.settings.trainer import Trainer
from lit_effattn.tasks import Task
from tests.cli.test_command import CONFIGS
from tests.support.commands import fails, spec
from tests.support.hostile import ROOTS, beside_evil, nothing_happened, places
from tests.support.small_runs import SETTINGS, checkpoint

COMMANDS = ("fit", "validate", "test", "predict", "generate")
RUN = "runs/2026-01-01_00-00-00/checkpoints"
__all__ = ["beside_evil"]  # a fixture

NAMES = {
    "a command": ("os.system", {"command": "touch pwned"}),
    "a command in another module": ("posix.system", {"command": "touch pwned"}),
    "code": ("builtins.exec", {"source": "open('pwned', 'w')"}),
    "a constructor that runs a command": (
        "torch.distributed.elastic.multiprocessing.subprocess_handler.SubprocessHandler",
        {"entrypoint": "touch", "args": ["pwned"], "env": {}, "stdout": None, "stderr": None, "local_rank_id": 0},
    ),
    "a class of the current folder": ("evil.MyAttention", {}),
    "a function of the current folder": ("evil.function", {}),
    "a class by its bare name": ("MyAttention", {}),
    "a method of a listed class": ("torch.optim.AdamW.step", {}),
    "a class method of ours": ("lit_effattn.PixelModel.load_from_checkpoint", {"checkpoint_path": "evil.ckpt"}),
    "a function of ours": ("lit_effattn.cli.main", {"args": ["--version"]}),
    "an imported module of ours": ("lit_effattn.cli.command.os.system", {"command": "touch pwned"}),
    "a download": ("torch.hub.load", {"repo_or_dir": "somebody/something", "model": "it"}),
    "a pickle": ("torch.load", {"f": "evil.pt", "weights_only": False}),
    "a logger": ("lightning.pytorch.loggers.WandbLogger", {"project": "x"}),
    "a callback of functions": ("lightning.pytorch.callbacks.LambdaCallback", {"on_test_start": "evil.function"}),
    "a callback that deletes": ("lightning.pytorch.callbacks.ModelCheckpoint", {"dirpath": "."}),
    "jsonargparse's settings": ("jsonargparse.set_parsing_settings", {"import_path_allowlist": ["os"]}),
    "nothing": ("", {}),
    "dots": ("..os.system", {}),
    "no string": (7, {}),
}
FORMS = {
    "a spec": lambda name, args: {"class_path": name, "init_args": args},
    "a spec of more arguments": lambda name, args: {"class_path": name, "dict_kwargs": args},
    "a list": lambda name, args: [{"class_path": name, "init_args": args}],
    "a list in a list": lambda name, args: [[{"class_path": name, "init_args": args}]],
    "a mapping": lambda name, args: {"x": {"class_path": name, "init_args": args}},
    "a name": lambda name, args: name,
    "a list of names": lambda name, args: [name],
    "JSON": lambda name, args: json.dumps({"class_path": name, "init_args": args}),
    "YAML": lambda name, args: yaml.safe_dump({"class_path": name, "init_args": args}),
    "a file": lambda name, args: "evil.yaml",
}
PAYLOADS = [(f"{who} as {how}", form(*named)) for who, named in NAMES.items() for how, form in FORMS.items()]


pytestmark = pytest.mark.usefixtures("beside_evil")


# ---------------------------------------------------------------------------------------------- every place, every name


def takes_names(place: Place) -> bool:
    return place.holds_names or place.anything


@pytest.mark.parametrize("root", ROOTS)
def test_no_place_takes_what_is_not_listed(root: str, record_property: Any):
    """A payload is refused, or it is text that stays text: jsonargparse then makes nothing of it."""
    judge = CheckpointJudge("it.ckpt", Trust())
    result = {(kind, name): place for kind, name, place in places(ROOTS[root]) if takes_names(place)}
    expected = {
        "model": {(PixelModel, "optimizer"), (LanguageModel, "embedding"), (SpeechRecognizer, "decoder")},
        "data": {(_listed()["SpeechData"], name) for name in ("corpus", "spec_augment", "wave_augment")},
        "callback": set(),
    }
    assert expected[root] <= result.keys()
    tried = 0
    for (kind, name), place in result.items():
        for what, payload in PAYLOADS:
            tried += 1
            try:
                taken = check(copy.deepcopy(payload), place, f"{kind.__name__}.{name}", judge)
            except NotAllowedError:
                continue
            word = place.text and payload in ("", "MyAttention", [""], ["MyAttention"])  # no path to import
            number = what.startswith("no string")
            assert not place.holds_names or word or number, f"{kind.__name__}.{name} takes {what}"
            assert taken == payload
            assert "class_path" not in repr(taken), f"{kind.__name__}.{name} takes {what}"
    assert nothing_happened()
    assert tried >= len(PAYLOADS) * len(expected[root])
    record_property("tried", f"{tried} at {len(result)} places")


def test_what_is_taken_as_text_is_text_to_jsonargparse():
    """At places without names, strings and lists pass; building from them imports nothing."""
    names = [name for name, _ in NAMES.values() if isinstance(name, str)]
    for payload in [*names, names, "evil.yaml"]:
        for option in ("unit", "tokenizer", "embedding_std", "tie", "vocab_size"):
            parser = ArgumentParser(exit_on_error=False)
            parser.add_subclass_arguments(Task, "model", fail_untyped=False)
            spec = {"class_path": "lit_effattn.LanguageModel", "init_args": {"vocab_size": 5, option: payload}}
            try:
                spec = check(spec, ROOTS["model"], "model", CheckpointJudge("it.ckpt", Trust()))
                parser.parse_object({"model": spec})
            except Exception:
                assert nothing_happened()
    assert nothing_happened()


def test_no_option_of_the_trainer_takes_what_is_not_plain():
    for command in COMMANDS:
        options = [name for name in parameters(Trainer) if not name.endswith("help")]
        assert {"callbacks", "logger", "plugins", "profiler", "strategy", "model_registry"} < set(options)
        assert {*LIMITS, *SCHEDULE} < set(options)
        for option in options:
            for what, payload in PAYLOADS:
                try:
                    settings = {"trainer": {option: copy.deepcopy(payload)}}
                    taken = checked_settings(settings, Path("it.ckpt"), Arguments([command])).settings["trainer"]
                except NotAllowedError:
                    continue
                assert not taken or option in (*LIMITS, *SCHEDULE) or what.startswith("no string"), (option, what)
                assert "class_path" not in repr(taken), (option, what)
                if isinstance(payload, str) and option in ("logger", "strategy", "callbacks"):
                    assert not taken, (option, what)
        assert nothing_happened()


def test_the_rest_of_a_configuration_is_plain():
    for form in ["a spec", "a list", "a mapping", "JSON"]:
        for part in ["seed_everything", "checkpoint"]:
            settings = {part: FORMS[form]("os.system", {"command": "touch pwned"})}
            with pytest.raises(NotAllowedError):
                checked_settings(settings, Path("it.ckpt"), Arguments(["fit"]))


def test_what_takes_any_value_takes_no_class():
    """Even a listed one: whatever it is given to might call it."""
    for place in (ANYTHING, Place(function=True)):
        with pytest.raises(NotAllowedError, match=r"where a checkpoint can't name a class"):
            check({"class_path": "torch.optim.SGD"}, place, "there", CheckpointJudge("it.ckpt", Trust()))


def test_nesting_that_python_cannot_follow_is_an_error():
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(NotAllowedError, match="nested too deeply"):
        check(deep, ANYTHING, "there", CheckpointJudge("it.ckpt", Trust()))
    while deep:
        deep = deep.pop()  # else taking it apart would exhaust the stack too


# ------------------------------------------------------------------------------------------------ as a user would do it


def edited(change: Any, name: str = "pixels") -> Path:
    """Write a checkpoint again, with a change."""
    content = torch.load(checkpoint(name), weights_only=True)
    change(content)
    torch.save(content, "it.ckpt")
    return Path("it.ckpt")


def model_args(content: dict[str, Any]) -> dict[str, Any]:
    return content["hyper_parameters"]


SYSTEM = spec("os.system", command="touch pwned")
EDITS = {
    "optimizer": lambda c: model_args(c).update(optimizer=SYSTEM),
    "attention": lambda c: model_args(c)["backbone"]["init_args"].update(attention=SYSTEM),
    "a class of the current folder": lambda c: model_args(c)["backbone"]["init_args"].update(
        attention="evil.MyAttention"
    ),
    "the model itself": lambda c: model_args(c).update(_class_path="os.system"),
    "a model beside none": lambda c: (c.pop("hyper_parameters"), c["lit_effattn"]["config"].update(model=SYSTEM)),
    "what Python built": lambda c: (c.pop("lit_effattn"), model_args(c).update(optimizer=SYSTEM)),
}


COVER = [*((command, "optimizer") for command in COMMANDS), *(("test", edit) for edit in [*EDITS][1:])]


@pytest.mark.parametrize(
    ("command", "edit"),
    [
        pytest.param(command, edit, marks=[] if (command, edit) in COVER else pytest.mark.exhaustive)
        for command in COMMANDS
        for edit in EDITS
    ],
)
def test_every_command_refuses_it(command: str, edit: str, capsys: pytest.CaptureFixture[str]):
    output = fails(capsys, command, "--ckpt_path", str(edited(EDITS[edit])))
    assert "it.ckpt names" in output
    assert "os.system" in output or "--trust evil.MyAttention" in output
    assert nothing_happened()
    assert not Path("runs").exists()


DOTTED = {
    "class_path": "torch.optim.lr_scheduler.LambdaLR",
    "init_args": {"lr_lambda.class_path": "os.system", "lr_lambda.init_args": {"command": "touch pwned"}},
}
ESCAPED = '{"class\\u005fpath": "evil.MyAttention"}'
HIDDEN = {
    "a dotted key": lambda c: model_args(c).update(lr_scheduler=DOTTED),
    "an escape in an option": lambda c: model_args(c)["backbone"]["init_args"].update(d_model=ESCAPED),
    "an escape for a class": lambda c: model_args(c)["backbone"]["init_args"].update(positions=ESCAPED),
}


def test_every_way_from_a_file_to_a_model_refuses_what_is_hidden(capsys: pytest.CaptureFixture[str]):
    for edit in HIDDEN:
        path = edited(HIDDEN[edit])
        for command in COMMANDS:
            assert "it.ckpt " in fails(capsys, command, "--ckpt_path", str(path))
        assert "it.ckpt " in fails(capsys, "export", "--ckpt_path", str(path), "--output", "out")
        assert "it.ckpt " in fails(capsys, "convert", str(path), "folder")
        fit = ["fit", "--config", "digits_linear", "--trainer.fast_dev_run", "1"]
        assert "it.ckpt " in fails(capsys, *fit, "--transfer_from", str(path))
        with pytest.raises(NotAllowedError, match=r"it\.ckpt "):
            Task.load_from_checkpoint(path)
        folder = Path(RUN)
        folder.mkdir(parents=True, exist_ok=True)
        path.rename(folder / "last.ckpt")
        (folder.parent / "config.yaml").write_text("seed_everything: 0\n")
        for command in ("compare", "report"):
            main([command, str(folder.parent)])  # which say that they can't read the model
        assert nothing_happened()


def test_values_of_the_trainer_are_those_of_its_options(capsys: pytest.CaptureFixture[str]):
    for values in [
        {"accelerator": ESCAPED},
        {"num_nodes": 9},
        {"devices": 10**9},
        {"devices": "0," * 1000},
        {"max_epochs": "3"},
        {"precision": 17},
    ]:
        path = edited(lambda c, values=values: c["lit_effattn"]["config"]["trainer"].update(values))
        (option,) = values
        assert option in fails(capsys, "fit", "--ckpt_path", str(path))
        assert nothing_happened()


def test_a_theme_is_no_class(capsys: pytest.CaptureFixture[str]):
    """jsonargparse makes options of their own of the fields of a dataclass, so the parser refuses it."""
    bar = spec("lightning.pytorch.callbacks.RichProgressBar", theme=ESCAPED)
    path = edited(lambda c: c["lit_effattn"]["config"]["trainer"].update(callbacks=[bar]))
    assert "theme" in fails(capsys, "fit", "--ckpt_path", str(path), code=2)
    assert nothing_happened()


def test_the_processes_that_a_run_starts_refuse_it_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    path = edited(EDITS["optimizer"])
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LIT_EFFATTN_CKPT_PATH", str(path))
    assert "it.ckpt names" in fails(capsys, "test", "--ckpt_path", "last")
    assert nothing_happened()


def test_weights_to_start_from_are_weights_alone():
    """What else the file holds is not looked at."""
    path = edited(lambda content: [EDITS[edit](content) for edit in ("optimizer", "the model itself")])
    Path("pixels.yaml").write_text(yaml.safe_dump(SETTINGS["pixels"]))
    main(["fit", "--config", "pixels.yaml", "--init_weights", str(path), "--trainer.fast_dev_run", "1"])
    assert nothing_happened()


def test_data_that_recordings_replace_are_not_fixed_by_names(capsys: pytest.CaptureFixture[str]):
    """`--data.audio` takes from `hyper_parameters` what data would fix."""
    path = edited(lambda c: c["hyper_parameters"].update(phones=SYSTEM), "speech")
    assert "it.ckpt names" in fails(capsys, "predict", "--ckpt_path", str(path), "--data.audio", "x.wav")
    assert nothing_happened()


def test_a_callback_of_functions_is_left_out_of_scoring_and_refused_in_training(capsys: pytest.CaptureFixture[str]):
    callback = spec("lightning.pytorch.callbacks.LambdaCallback", on_test_start="os.abort")
    path = edited(lambda c: c["lit_effattn"]["config"]["trainer"].update(callbacks=[callback]))
    main(["test", "--ckpt_path", str(path)])
    assert "test bits/dim: " in capsys.readouterr().out
    assert "LambdaCallback" in fails(capsys, "fit", "--ckpt_path", str(path))
    trusted = ["--trust", "lightning.pytorch.callbacks.LambdaCallback"]
    assert "os.abort" in fails(capsys, "fit", "--ckpt_path", str(path), *trusted)


def test_what_only_the_user_may_say_is_named_with_its_flag(capsys: pytest.CaptureFixture[str]):
    values = {
        "logger": (spec("lightning.pytorch.loggers.CSVLogger", save_dir="pwned"), "true"),
        "profiler": ("advanced", "null"),
        "plugins": ([{"class_path": "lightning.pytorch.plugins.io.TorchCheckpointIO"}], "null"),
        "strategy": ({"class_path": "lightning.pytorch.strategies.SingleDeviceStrategy"}, "auto"),
        "callbacks": ([spec("lit_effattn.callbacks.BestCheckpoint", dirpath="pwned")], "null"),
    }
    flags = [f"--trainer.{option}={flag}" for option, (_, flag) in values.items()]
    changes = {option: value for option, (value, _) in values.items()}
    path = edited(lambda c: c["lit_effattn"]["config"]["trainer"].update(changes))
    fit = ["fit", "--ckpt_path", str(path), "--trainer.max_epochs", "2"]
    for i, option in enumerate(values):
        assert f"give --trainer.{option}" in fails(capsys, *fit, *flags[:i], *flags[i + 1 :])
    assert not Path("runs").exists()
    main([*fit, *flags])
    main(["test", "--ckpt_path", str(path)])
    assert not Path("pwned").exists()


def test_no_folder_that_a_checkpoint_names_is_written_to():
    edit = lambda c: c["lit_effattn"]["config"]["trainer"].update(default_root_dir="pwned")  # noqa: E731
    path = edited(edit)
    main(["test", "--ckpt_path", str(path)])
    main(["fit", "--ckpt_path", str(path), "--trainer.max_epochs", "2"])
    assert not Path("pwned").exists()
    assert len(list(Path("runs").iterdir())) == 1  # scoring leaves nothing there


@pytest.mark.parametrize("hide", ["precious", RUN])
def test_no_folder_that_a_callback_remembers_is_deleted(hide: str):
    """Lightning deletes `kth_best_model_path`, and all that is in it, when it has saved a better one."""
    Path("precious").mkdir()
    Path("precious/thesis.txt").write_text("years")
    run = Path(RUN)
    run.mkdir(parents=True)
    path = str(Path.cwd() / hide)

    def change(content: dict[str, Any]) -> None:
        (key,) = (key for key in content["callbacks"] if key.startswith("ModelCheckpoint"))
        worst = torch.tensor(99.0)
        content["callbacks"][key].update(
            dirpath=str(run.resolve()),
            best_k_models={path: worst},
            kth_best_model_path=path,
            kth_value=worst,
            best_model_path=path,
            last_model_path=path,
        )

    edited(change).rename(run / "last.ckpt")
    main(["fit", "--ckpt_path", str(run / "last.ckpt"), "--trainer.max_epochs", "2"])
    assert sorted(path.name for path in run.iterdir()) == ["best.ckpt", "last.ckpt", "previous.ckpt"]
    assert Path("precious/thesis.txt").read_text() == "years"


def test_only_our_own_function_builds_a_model(capsys: pytest.CaptureFixture[str]):
    for instantiator in ["os.system", "evil.function", "lit_effattn.cli.main", 7, None]:
        changes = {"_instantiator": instantiator}
        path = edited(lambda c, changes=changes: (c.pop("lit_effattn"), c["hyper_parameters"].update(changes)))
        with pytest.raises(NotAllowedError, match="to build its model"):
            PixelModel.load_from_checkpoint(path)
        assert "to build its model" in fails(capsys, "test", "--ckpt_path", str(path))
        assert nothing_happened()


def test_python_refuses_it_too():
    for change in [
        {"optimizer": SYSTEM},
        {"optimizer": "evil.function"},
        {"backbone": {"class_path": "evil.MyAttention"}},
        {"_class_path": "evil.MyAttention"},
        {"_class_path": "lit_effattn.tasks.LanguageModel"},
    ]:
        path = edited(lambda c, change=change: c["hyper_parameters"].update(change))
        with pytest.raises(NotAllowedError, match=r"it\.ckpt names"):
            PixelModel.load_from_checkpoint(path)
        assert nothing_happened()


# ----------------------------------------------------------------------------------------------------- what still works


def test_checkpoints_of_shipped_configurations_need_no_new_flag(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.cpu_count", lambda: 8)  # the most devices that one of them states
    for config, command in ((config, command) for config in CONFIGS for command in COMMANDS):
        settings = yaml.safe_load(config.read_text())
        taken = checked_settings(copy.deepcopy(settings), Path("it.ckpt"), Arguments([command])).settings
        assert taken["model"]["init_args"].keys() == settings["model"]["init_args"].keys()
        assert taken["data"]["init_args"].keys() >= settings["data"].get("init_args", {}).keys()
        carries = "MemoryCarry" in repr(settings["trainer"].get("callbacks"))
        assert ("MemoryCarry" in repr(taken["trainer"].get("callbacks"))) == carries
