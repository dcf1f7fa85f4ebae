"""Files that were written to do harm: nothing that they name is executed, imported, fetched or written to.

Of a checkpoint from somebody else the model alone is used: registered classes, called with values of the annotated
types. The configuration of somebody else's run is not read.
"""

import contextlib
import copy
import json
import random
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from lit_effattn import PixelModel, registry
from lit_effattn.checkpoints import build as building
from lit_effattn.checkpoints import own_runs
from lit_effattn.checkpoints.build import Allowed, build
from lit_effattn.checkpoints.own_runs import marked
from lit_effattn.checkpoints.shipped import metadata
from lit_effattn.checkpoints.trust import NotAllowedError, find
from lit_effattn.checkpoints.weights_files import write_weights_file
from lit_effattn.cli import main
from lit_effattn.hparams import parameters
from lit_effattn.tasks import Task
from tests.support.cases import one_of_each
from tests.support.checkpoint_parts import divide
from tests.support.commands import fails, spec
from tests.support.hostile import NAMES, PAYLOADS, beside_evil, nothing_happened
from tests.support.small_runs import SETTINGS, checkpoint

COMMANDS = ("fit", "validate", "test", "predict", "generate")
RUN = "runs/2026-01-01_00-00-00/checkpoints"
SYSTEM = spec("os.system", command="touch pwned")
ESCAPED = '{"class\\u005fpath": "evil.MyAttention"}'
__all__ = ["beside_evil"]  # a fixture
pytestmark = pytest.mark.usefixtures("beside_evil")


def edited(change: Any, name: str = "pixels") -> Path:
    """Write a checkpoint again, with a change."""
    content = torch.load(checkpoint(name), weights_only=True)
    change(content)
    torch.save(content, "it.ckpt")
    return Path("it.ckpt")


# --------------------------------------------------------------------------------------------------------- every place


@cache
def places() -> list[tuple[type, str]]:
    found = [(k, n) for k in registry.classes() for n in parameters(k)]
    return sorted(found, key=lambda place: (place[0].__module__, place[0].__qualname__, place[1]))


def end_of(kind: type, name: str, payload: Any) -> str:
    """Build a class with a payload as one of its arguments; return how it ends."""
    described = {"class_path": f"{kind.__module__}.{kind.__qualname__}", "init_args": {name: copy.deepcopy(payload)}}
    try:
        build(described, kind, "model", Allowed("it.ckpt"))
    except NotAllowedError:
        return "refused"
    except Exception:  # of a constructor that lacks arguments, or has a text as one
        return "built"
    return "built"


def test_10_000_payloads_at_the_places_of_a_model():
    """Each place has some of the payloads, and each payload is at some of the places."""
    choose, ends = random.Random(0), Counter[str]()
    each = -(-10_000 // len(places()))
    for place in places():
        for payload in choose.sample(PAYLOADS, each):
            ends[end_of(*place, payload)] += 1
            assert nothing_happened(), f"{payload!r} at {place}"
    assert sum(ends.values()) >= 10_000
    assert ends["refused"] > 5_000


every_part = pytest.mark.parametrize("n", [12, pytest.param(60, marks=pytest.mark.exhaustive)])
EVERYTHING = ["hyper_parameters", "callbacks", "loops", "optimizer_states", "lr_schedulers", "state_dict", "logged"]


@every_part
def test_every_part_of_a_checkpoint_in_every_container(n: int):
    """A file, a sharded folder, safetensors: `load_from_checkpoint` and `generate` refuse, or use the model alone."""
    original = torch.load(checkpoint("pixels"), weights_only=True)
    assert {*EVERYTHING} <= original.keys() | {"logged"}
    choose, parts = random.Random(1), sorted(original)
    for i, payload in enumerate(choose.sample(PAYLOADS, n)):
        content = {**original, parts[i % len(parts)]: payload}
        torch.save(content, "it.ckpt")
        folder = divide(content, Path(f"{i}.ckpt"), 2) if isinstance(content["state_dict"], dict) else None
        for path in filter(None, (Path("it.ckpt"), folder)):
            with contextlib.suppress(ValueError):
                Task.load_from_checkpoint(path)
            assert nothing_happened(), (parts[i % len(parts)], payload)


@every_part
def test_every_part_of_the_metadata_of_a_safetensors_file(n: int):
    content = torch.load(checkpoint("pixels"), weights_only=True)
    arguments = {k: v for k, v in content["hyper_parameters"].items() if not k.startswith("_")}
    model = {"class_path": content["hyper_parameters"]["_class_path"], "init_args": arguments}
    path = Path("x.safetensors")
    write_weights_file(path, content["state_dict"], model, "0", content)
    about, weights = metadata(path), load_file(path)
    for payload in random.Random(2).sample(PAYLOADS, n):
        for changed in (
            {**about, "model": payload},
            {**about, "checkpoint": payload},
            {**about, "model": {**model, "init_args": {**arguments, "head": payload}}},
            {**about, "checkpoint": {"callbacks": {"x": payload}, "hyper_parameters": payload}},
        ):
            save_file(weights, path, {"lit_effattn": json.dumps(changed)})
            with contextlib.suppress(ValueError):
                Task.load_from_checkpoint(path)
            assert nothing_happened(), payload


# ------------------------------------------------------------------------------------------------ as a user would do it


EDITS = {
    "optimizer": lambda h: h.update(optimizer=SYSTEM),
    "attention": lambda h: h["backbone"]["init_args"].update(attention="evil.MyAttention"),
    "the model itself": lambda h: h.update(_class_path="os.system"),
    "a dotted key": lambda h: h.update(
        lr_scheduler=spec("torch.optim.lr_scheduler.LambdaLR", **{"lr_lambda.class_path": "os.system"})
    ),
    "a function": lambda h: h.update(lr_scheduler=spec("torch.optim.lr_scheduler.LambdaLR", lr_lambda="evil.function")),
    "an escape in an option": lambda h: h["backbone"]["init_args"].update(d_model=ESCAPED),
    "an escape for a class": lambda h: h["backbone"]["init_args"].update(positions=ESCAPED),
}


@pytest.mark.parametrize("edit", one_of_each(EDITS, lambda _: "", str))
def test_every_way_from_a_file_to_a_model_refuses_it(edit: str, capsys: pytest.CaptureFixture[str]):
    path = edited(lambda content: EDITS[edit](content["hyper_parameters"]))
    Path("data.yaml").write_text(yaml.safe_dump({"data": SETTINGS["pixels"]["data"]}))
    for command in COMMANDS[1:]:
        assert "it.ckpt " in fails(capsys, command, "--ckpt_path", str(path), "--config", "data.yaml")
    assert "it.ckpt " in fails(capsys, "export", "--ckpt_path", str(path), "--output", "out")
    assert "it.ckpt " in fails(capsys, "convert", str(path), "folder")
    fit = ["fit", "--config", "digits_linear", "--trainer.fast_dev_run", "1"]
    assert "it.ckpt " in fails(capsys, *fit, "--transfer_from", str(path))
    with pytest.raises(NotAllowedError, match=r"it\.ckpt "):
        PixelModel.load_from_checkpoint(path)
    assert nothing_happened()
    assert not Path("runs").exists()


def test_what_only_the_user_may_say_is_not_taken_from_a_file(capsys: pytest.CaptureFixture[str]):
    path = edited(lambda content: content.update(lit_effattn={"config": SETTINGS["pixels"]}))
    for command in ("validate", "test", "predict"):
        output = fails(capsys, command, "--ckpt_path", str(path))
        assert "of such a file only the model is used: give --config with the data" in output
    assert "give --config with the model, the data" in fails(capsys, "fit", "--ckpt_path", str(path))
    output = fails(capsys, "generate", "--ckpt_path", str(path), "--model.backbone.dropout", "0.1")
    assert "--model.backbone.dropout: it.ckpt is outside of your runs" in output
    main(["generate", "--ckpt_path", str(path), "--n", "1"])
    main(["test", "--ckpt_path", str(path), "--data", "PixelSequences", "--data.dataset", "digits"])
    assert "test bits/dim" in capsys.readouterr().out
    other = ["--data", "PixelSequences", "--data.dataset", "digits", "--data.n_levels", "3"]
    assert "was trained on other data: its n_levels is 17, and that of these data 3" in fails(
        capsys, "test", "--ckpt_path", str(path), *other
    )


def test_weights_to_start_from_are_weights_alone():
    """What else the file holds is not looked at."""
    path = edited(lambda content: [EDITS[edit](content["hyper_parameters"]) for edit in ("optimizer", "attention")])
    Path("pixels.yaml").write_text(yaml.safe_dump(SETTINGS["pixels"]))
    main(["fit", "--config", "pixels.yaml", "--init_weights", str(path), "--trainer.fast_dev_run", "1"])
    assert nothing_happened()


def hostile_run(config: dict[str, Any]) -> Path:
    """Write the folder of a run with this configuration, as another account could, in every way."""
    folder = Path(RUN)
    folder.mkdir(parents=True)
    edited(lambda content: None).rename(folder / "best.ckpt")
    text = yaml.safe_dump(config)
    mark, _, _ = marked("another: 1\n").partition("\n")
    (folder.parent / "config.yaml").write_text(marked("seed_everything: 0\n"))
    (folder.parent / "config_resumed_1.yaml").write_text(text)
    (folder.parent / "config_resumed_2.yaml").write_text(f"{mark}\n{text}")
    return folder / "best.ckpt"


HOSTILE = [
    {**SETTINGS["pixels"], "model": spec("evil.MyAttention")},
    {**SETTINGS["pixels"], "data": spec("evil.function")},
    {**SETTINGS["pixels"], "trainer": {"callbacks": [spec("evil.function")], "logger": [spec("evil.function")]}},
    {**SETTINGS["pixels"], "trainer": {"default_root_dir": "pwned"}},
    {**SETTINGS["pixels"], "ckpt_path": "evil.ckpt", "transfer_from": "evil.ckpt", "trust": ["evil"]},
]


@pytest.mark.parametrize("config", one_of_each(HOSTILE, lambda _: "", lambda config: f"{HOSTILE.index(config)}"))
def test_the_configuration_of_somebody_elses_run_is_not_read(config: Any, capsys: pytest.CaptureFixture[str]):
    path = hostile_run(config)
    for command in ("fit", "validate", "test", "predict"):
        assert "this account did not write" in fails(capsys, command, "--ckpt_path", "best")
    main(["generate", "--ckpt_path", "best", "--n", "1"])
    for command in ("compare", "report"):
        main([command, str(path.parent.parent), *(["--samples", "0"] if command == "report" else [])])
    main(["export", "--ckpt_path", "best", "--format", "safetensors"])
    assert nothing_happened()


@pytest.mark.parametrize("hide", ["precious", pytest.param(RUN, marks=pytest.mark.exhaustive)])
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
    (run.parent / "config.yaml").write_text(marked(yaml.safe_dump(SETTINGS["pixels"])))
    main(["fit", "--ckpt_path", str(run / "last.ckpt"), "--trainer.max_epochs", "2"])
    assert sorted(path.name for path in run.iterdir()) == ["best.ckpt", "last.ckpt", "previous.ckpt"]
    assert Path("precious/thesis.txt").read_text() == "years"


# ---------------------------------------------------------------------------------------------------- walls, one by one


def test_without_the_registry_a_class_of_a_file_would_be_imported(monkeypatch: pytest.MonkeyPatch):
    """The payloads are live: the tests above can fail."""
    monkeypatch.setattr(Allowed, "find", lambda self, name, where: find(name))
    with pytest.raises(ValueError, match="holds another model"):
        PixelModel.load_from_checkpoint(edited(lambda content: EDITS["attention"](content["hyper_parameters"])))
    assert "evil" in sys.modules
    assert Path("called").exists()


def test_without_types_a_constructor_gets_other_values_and_nothing_is_executed(monkeypatch: pytest.MonkeyPatch):
    """This wall makes one message of the errors that constructors would raise; the registry alone guards names."""
    monkeypatch.setattr(building, "_fits", lambda value, condition: value)
    choose = random.Random(3)
    for place in places():
        end_of(*place, choose.choice(PAYLOADS))
    assert nothing_happened()


def test_without_the_mark_a_strangers_configuration_would_be_parsed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    hostile_run(HOSTILE[1])
    monkeypatch.setattr(own_runs, "_is_own", lambda *_: True)
    fails(capsys, "test", "--ckpt_path", "best", code=2)
    assert "evil" in sys.modules


def test_every_name_is_one_that_is_not_registered():
    for name, _ in NAMES.values():
        assert not isinstance(name, str) or registry.entered(name) is None
