"""A model card: Markdown with metadata about a checkpoint, made from the record of its run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lit_effattn.analysis.records import RunRecord, checkpoint_metrics, read_run
from lit_effattn.analysis.tables import Table, markdown
from lit_effattn.checkpoints.io import read_checkpoint, saved_config
from lit_effattn.checkpoints.runs import run_of
from lit_effattn.hparams import flat
from lit_effattn.settings.defaults import split

_TASKS = {
    "PixelModel": "unconditional-image-generation",
    "LanguageModel": "text-generation",
    "SpeechRecognizer": "automatic-speech-recognition",
}
"""The hub's names of the tasks that it knows."""

_DATA = ("dataset", "source", "path", "corpus")
"""Options of data that name the data set."""


def model_card(checkpoint: Path, name: str, *, file: str, license: str | None = None) -> str:
    """Return the card of a checkpoint.

    Figures of validation are those in the checkpoint; figures of `test` are the last ones in the log of its run. What
    is not recorded is left out.

    Args:
        checkpoint: The checkpoint.
        name: The model's name, USER/NAME.
        file: The name of the published checkpoint.
        license: The model's licence, by the hub's name, such as apache-2.0.

    Raises:
        ValueError: If the checkpoint or the record of its run can't be read.
    """
    config = saved_config(read_checkpoint(checkpoint), checkpoint)
    settings, folder = flat(config), run_of(checkpoint)
    run = RunRecord(checkpoint, settings)
    if folder is not None and (folder / "config.yaml").is_file():
        run = read_run(folder)
    scores = {n: max(c.items())[1] for n, c in checkpoint_metrics(checkpoint).items() if n.startswith("val/")}
    scores |= {n: value for n, value in run.final.items() if n.startswith("test/")}
    task = str(settings["model"])
    data = next((str(settings[f"data.{x}"]) for x in _DATA if settings.get(f"data.{x}")), str(settings.get("data")))
    changed, _ = split(config)
    command = "generate" if task in ("PixelModel", "LanguageModel") else "predict"
    lines = [
        f"# {name.rpartition('/')[2]}",
        f"A `{task}` with the backbone `{settings.get('model.backbone')}` and the attention "
        f"`{settings.get('model.backbone.attention', '—')}`, trained by lit-effattn on `{data}`.",
        "## Use",
        f"    pip install lit-effattn huggingface_hub\n    hf download {name} {file} --local-dir .\n"
        f"    lit-effattn {command} --ckpt_path {file}",
        "The file holds weights and text. lit-effattn builds only classes that it lists, and runs no code from it.",
        *_section("Figures", "metric", scores),
        *_section("Cost", "cost", _cost(run)),
        *_section("Settings that differ from the defaults", "setting", changed),
        "All settings are in `config.yaml`.",
        "## Limits",
        "Not evaluated beyond the figures above.",
    ]
    metadata = _metadata(name, task, data, scores, license)
    header = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)
    return f"---\n{header}---\n\n" + "\n\n".join(lines) + "\n"


def _cost(run: RunRecord) -> dict[str, Any]:
    cost = {
        "parameters": run.parameters,
        "bytes of state of a sequence": run.state_bytes,
        "seconds a step, median": run.seconds_per_step,
        "seconds of training": max(run.seconds.values(), default=None),
        **run.peak_memory,
    }
    return {name: value for name, value in cost.items() if value is not None}


def _section(title: str, what: str, entries: Mapping[str, Any]) -> list[str]:
    rows = [[name, value if isinstance(value, (int, float)) else str(value)] for name, value in entries.items()]
    return [f"## {title}", markdown(Table("", [what, "value"], rows)).strip()] if rows else []


def _metadata(name: str, task: str, data: str, scores: Mapping[str, float], license: str | None) -> dict[str, Any]:
    kind = _TASKS.get(task)
    metadata: dict[str, Any] = {"library_name": "lit-effattn", "tags": ["lit-effattn", task]}
    metadata |= {} if license is None else {"license": license}
    metadata |= {} if kind is None else {"pipeline_tag": kind}
    if scores:
        metrics = [{"type": n.partition("/")[2], "name": n, "value": value} for n, value in scores.items()]
        result = {"task": {"type": kind or "other"}, "dataset": {"name": data, "type": data}, "metrics": metrics}
        metadata["model-index"] = [{"name": name.rpartition("/")[2], "results": [result]}]
    return metadata
