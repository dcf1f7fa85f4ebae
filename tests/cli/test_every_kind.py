"""One flag gives any run another kind of attention: every form of a task with every kind, in every configuration."""

import operator
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_effattn.cli import main
from tests.cli.test_command import CONFIGS, built
from tests.support.commands import fails

KINDS = (
    "Softmax",
    "Shaw",
    "TransformerXL",
    "Compressive",
    "Infinite",
    "Linear",
    "WindowedLinear",
    "Performer",
    "LSH",
    "Sparse",
    "Retention",
    "GatedLinear",
    "Mamba2",
    "DeltaNet",
    "GatedDeltaNet",
    "KimiDelta",
)
QUICK = {
    "LanguageModel": ("Softmax", "Shaw", "TransformerXL", "Infinite", "LSH", "GatedDeltaNet"),
    "SpeechRecognizer": ("Linear", "Performer", "Sparse", "Compressive", "WindowedLinear", "KimiDelta"),
}
"""Tasks and kinds that are tested every time: each kind once, with memory or in both directions. Two of the six kinds
with a recurrent state, which share their code, are among them."""


@cache
def model_of(config: Path) -> dict[str, Any]:
    return yaml.safe_load(config.read_text())["model"]


def stacks(config: Path) -> dict[str, dict[str, Any]]:
    """Return the options of each Transformer in a configuration by their place."""
    backbone = model_of(config)["init_args"]["backbone"]
    if backbone["class_path"] == "Transformer":
        return {"model.backbone": backbone["init_args"]}
    if backbone["class_path"] != "EncoderDecoder":
        return {}
    return {f"model.backbone.{part}": backbone["init_args"][part]["init_args"] for part in ("encoder", "decoder")}


def refusal(config: Path, place: str, kind: str) -> str | None:
    """Return what is said of a kind that can't be in a place; None: it can."""
    options = stacks(config)[place]
    if not options.get("causal", True) and kind in ("Compressive", "Infinite", "WindowedLinear"):
        return f"causal=False: {kind}Attention"
    if "MemoryCarry" not in repr(yaml.safe_load(config.read_text())["trainer"].get("callbacks")):
        return None
    attention = options["attention"]
    stays = isinstance(attention, dict) and "window" in attention.get("init_args", {})
    bounded = stays or "mem_len" in repr(attention)
    if kind in ("LSH", "Sparse") or (kind in ("Softmax", "Shaw") and not bounded):
        return f"MemoryCarry: the state of {kind}Attention grows with every segment"
    return None


def small(config: Path) -> list[str]:
    """Return flags for a narrow model and synthetic batches, in one process."""
    flags = ["--trainer.fast_dev_run", "1", "--trainer.enable_progress_bar", "false"]
    flags += ["--trainer.precision", "32", "--trainer.devices", "1"]
    for place, options in stacks(config).items():
        width = "64" if "div_value" in repr(model_of(config)) else "16"  # the rarest words have d_model / 64
        flags += [f"--{place}.d_model", width, f"--{place}.n_heads", "2", f"--{place}.n_layers", "2"]
        flags += [f"--{place}.d_ff", "16"]
        if options.get("position_width"):
            flags += [f"--{place}.position_width", "8"]
    return flags + synthetic(config)


def synthetic(config: Path) -> list[str]:
    """Return flags for data that is drawn."""
    flags = ["--data", "tests.support.any_data.AnyData", "--data.batch", model_of(config)["class_path"]]
    return [*flags, "--data.colours", "3"] if config.stem.startswith("cifar") else flags


def cases() -> Iterator[Any]:
    """Yield each kind in each form of a task, in the form's configurations by turns, so that each of these has some.

    A form is a task, a place in it, whether that is causal, whether it carries a memory, and whether that is bounded.
    """
    forms: dict[tuple[Any, ...], list[tuple[Path, str]]] = {}
    for config in CONFIGS:
        for place, options in stacks(config).items():
            refused = [refusal(config, place, kind) is not None for kind in ("LSH", "Softmax")]
            form = (model_of(config)["class_path"], place, options.get("causal", True), *refused)
            forms.setdefault(form, []).append((config, place))
    for (task, _, _, carries, unbounded), members in forms.items():
        for i, kind in enumerate(KINDS):
            config, place = members[i % len(members)]
            quick = kind in QUICK.get(task, ()) and (task != "LanguageModel" or carries) and not unbounded
            name = f"{config.stem}-{place.removeprefix('model.backbone').strip('.')}-{kind}"
            yield pytest.param(config, place, kind, id=name, marks=[] if quick else [pytest.mark.exhaustive])


CASES = list(cases())
every_case = pytest.mark.parametrize(("config", "place", "kind"), CASES)


@every_case
@pytest.mark.filterwarnings("ignore")
def test_every_form_takes_every_kind(
    config: Path,
    place: str,
    kind: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
):
    """A step of training and of validation; what can't be is said in one line."""
    monkeypatch.chdir(tmp_path)
    given = ["fit", "--config", str(config), *small(config), f"--{place}.attention", f"{kind}Attention"]
    words = refusal(config, place, kind)
    if words is None:
        main(given)
    else:
        assert words in fails(capsys, *given)


@pytest.mark.exhaustive  # every kind takes a step above; full sizes are built in test_paper_sizes.py
@every_case
@pytest.mark.filterwarnings("ignore")
def test_every_form_can_be_built_with_every_kind_at_full_size(
    config: Path, place: str, kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Without numbers, on the meta device."""
    monkeypatch.chdir(tmp_path)
    if (refusal(config, place, kind) or "").startswith("causal"):
        pytest.skip("refused, see test_every_form_takes_every_kind")
    made = built(config, *synthetic(config), f"--{place}.attention", f"{kind}Attention").model
    made.configure_optimizers()
    stack = operator.attrgetter(place.removeprefix("model."))(made)
    assert {type(block.attention).__name__ for block in stack.blocks} == {f"{kind}Attention"}
    assert (stack.d_model, len(stack.blocks)) == tuple(stacks(config)[place][name] for name in ("d_model", "n_layers"))
