"""Starting a model from a checkpoint of another attention kind: missing parameters, and messages for unused ones."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from lit_effattn.attention import Attention

_OPTIONS_OF_THAT_RUN = "Give the model the options of that run: they are in its config.yaml"
_BIASES = tuple(f"{part}_proj.bias" for part in ("q", "k", "v", "out"))


def add_missing(model: nn.Module, weights: dict[str, Any]) -> list[str]:
    """Add to `weights` the model's buffers and its attention's `extra_parameters` that they lack.

    These are random features, feature maps, mixing factors, relative positions, compressors and long-term memories,
    which a checkpoint of softmax attention lacks.

    If the checkpoint is of another task, which lacks the model's `new_modules`, these are added too, and all that is
    neither embedding nor backbone is removed, such as a head.

    Returns:
        Their names, each with the number of modules that have it.
    """
    extra = {}
    new = tuple(f"{name}." for name in getattr(model, "new_modules", ()))
    if new and not any(name.startswith(new) for name in weights):
        for name in [name for name in weights if not name.startswith(("embedding.", "backbone."))]:
            del weights[name]
        extra = {name: name for name in model.state_dict() if name.startswith(new)}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    extra |= {name: name.rpartition(".")[2] for name in model.state_dict() if name not in parameters}
    for path, module in _attentions(model):
        for own, _ in module.named_parameters(remove_duplicate=False):
            if any(f"{own}.".startswith(f"{name}.") for name in module.extra_parameters):
                extra[f"{path}.{own}"] = own
    missing = {name: t for name, t in model.state_dict().items() if name in extra and name not in weights}
    weights.update(missing)
    return [f"{name} ({n}×)" for name, n in Counter(extra[name] for name in missing).items()]


def remedy(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> str:
    """Return advice, one or two sentences, for a checkpoint whose weights do not fit `model`."""
    expected = model.state_dict()
    here, there = expected.get("embedding.weight"), weights.get("embedding.weight")
    if here is not None and there is not None and len(here) != len(there):
        return "The vocabularies differ: --data.tokenizer_of CHECKPOINT reads the texts with that of the checkpoint"
    for path, module in _attentions(model):
        own, kind = f"{path}.", type(module).__name__
        surplus = [name.removeprefix(own) for name in weights if name.startswith(own) and name not in expected]
        for name in surplus:
            if reason := module.lacks.get(name.partition(".")[0]):
                return (
                    f"{kind} has no {name.partition('.')[0]}: {reason}. It can't start from the weights of a kind that "
                    "has one; choose another kind, or train it from the start"
                )
        if surplus and all(name in _BIASES for name in surplus):
            return (
                f"The checkpoint's attention has biases: give {kind} bias=true (--model.backbone.attention.bias true)"
            )
        if not surplus and any(own + name in expected and own + name not in weights for name in _BIASES):
            return (
                f"The checkpoint's attention has no biases where {kind} has: give it bias=false "
                "(--model.backbone.attention.bias false)"
            )
        unused = dict.fromkeys(name.partition(".")[0] for name in surplus if name not in _BIASES)
        if unused:
            return f"{kind} has no {', '.join(unused)}, which the checkpoint's attention has: choose a kind with them"
    return _OPTIONS_OF_THAT_RUN


def _attentions(model: nn.Module) -> Iterator[tuple[str, Attention]]:
    return ((path, module) for path, module in model.named_modules() if isinstance(module, Attention))
