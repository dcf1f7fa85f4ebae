"""The shipped models: their table and their cards. Does not import PyTorch, which is slow."""

import re
from pathlib import Path
from typing import Any

from lit_effattn.checkpoints.shipped import PREFIX, metadata, model_path, models
from lit_effattn.hparams import flat

_HEADER = ("name", "task", "attention", "parameters", "bytes", "test", "context")


def cards(names: list[str]) -> str:
    """Return the output of `lit-effattn models`: a row for each shipped model, or the cards of the named ones.

    Raises:
        FileNotFoundError: If there is no model of a name.
    """
    if names:
        return "\n\n".join(card(name.removeprefix(PREFIX)) for name in names)
    rows = [_HEADER, *(_row(name, path) for name, path in models().items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, "", f"Use one: --ckpt_path {PREFIX}digits. Its card: lit-effattn models digits"])


def _row(name: str, path: Path) -> tuple[str, ...]:
    about = metadata(path)
    of_card = about["card"]
    metric, value = next(iter(of_card["figures"].items()))
    return (
        f"{PREFIX}{name}",
        about["model"]["class_path"].rpartition(".")[2],
        ", ".join(_attentions(about["model"])),
        f"{of_card['parameters']:,}",
        f"{path.stat().st_size:,}",
        f"{value:.4f} {metric}",
        of_card["context"],
    )


def card(name: str) -> str:
    """Return the card of a shipped model, in Markdown.

    Raises:
        FileNotFoundError: If there is no model of that name.
    """
    path = model_path(PREFIX + name, "models")
    about = metadata(path)
    of_card = about["card"]
    figures = "; ".join(f"{metric} {value:.4f}" for metric, value in of_card["figures"].items())
    lines = {
        "Model": f"{about['model']['class_path'].rpartition('.')[2]}, {', '.join(_attentions(about['model']))}, "
        f"{of_card['parameters']:,} parameters in float16, {path.stat().st_size:,} bytes",
        "Context": of_card["context"],
        "Data": of_card["data"],
        "Licence": of_card["licence"],
        "Training": of_card["training"],
        "Test": figures,
        "Limits": of_card["limits"],
    }
    commands = "\n".join(f"    {command}" for command in of_card["commands"])
    facts = "\n".join(f"- {title}: {text}" for title, text in lines.items())
    return f"## {PREFIX}{name}\n\n{of_card['summary']}\n\n{facts}\n\n{commands}"


def _attentions(model: dict[str, Any]) -> list[str]:
    """Return the different attention classes in a model's spec, in the order of their layers."""
    named = flat(model).items()
    return list(dict.fromkeys(value for name, value in named if re.search(r"attention(\.\d+)?$", name) and value))
