"""Convert a folder of Hugging Face weights to a checkpoint, and a checkpoint to such a folder."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import yaml
from torch import Tensor

import lit_effattn
from lit_effattn.attention import SoftmaxAttention
from lit_effattn.attention.positions import n_positions
from lit_effattn.checkpoints.allowlist import listed
from lit_effattn.checkpoints.files import write
from lit_effattn.checkpoints.io import read_checkpoint, with_config
from lit_effattn.checkpoints.model_size import model_of
from lit_effattn.checkpoints.runs import is_checkpoint
from lit_effattn.hparams import defaults, spec
from lit_effattn.interchange.family import Family
from lit_effattn.interchange.gpt2 import GPT2
from lit_effattn.interchange.llama import Llama
from lit_effattn.interchange.tokenizer import read_tokenizer, special_tokens, write_json, write_tokenizer
from lit_effattn.interchange.weights import need_safetensors, read_json, read_tensors, size_of_tensors, write_tensors
from lit_effattn.tasks import LanguageModel

FAMILIES: tuple[Family, ...] = (GPT2(), Llama())

CHECKPOINT, CONFIG = "model.ckpt", "config.yaml"
"""The files of a converted model."""

_LAYERS = 1000
"""Layers that are not too many even if the files can't be read, which is said later."""

_SEGMENT_LEN = 512
_LEARNING_RATE = 5e-5

_OF_TRAINING = {"dropout", "activation_dropout", "output_dropout", "init", "init_std", "zero_init"} | {
    "gradient_checkpointing",
}
_IN_SHAPES = {"d_ff", "n_kv_heads", "head_dim", "bias", "out_bias", "final_norm", "max_len", "norm_eps", "d_source"}
"""Arguments that the tensors' shapes show, and the ε that is read off the modules."""


def convert(source: str | Path, target: str | Path, *, trust: Sequence[str] = ()) -> str:
    """Convert `source` into the new folder `target`, which is whole or absent.

    Args:
        source: A folder with config.json, model.safetensors (or its parts with their index) and tokenizer.json; or a
            checkpoint. Without tokenizer.json, texts are token numbers, and a warning says so.
        target: For a folder, it gets `model.ckpt` and `config.yaml`. For a checkpoint, it gets config.json,
            model.safetensors, in the types of the checkpoint's tensors, and the files of the tokenizer.
        trust: Classes of the user's own that a checkpoint may name: see `Task.load_from_checkpoint`.

    Returns:
        What was written, a sentence.

    Raises:
        FileNotFoundError: there is no `source`.
        FileExistsError: there is something named `target`.
        ValueError: the model is not supported: names what is not, and its value.
    """
    source, target = Path(source), Path(target)
    if not source.exists():
        raise FileNotFoundError(f"FROM={source}: there is no such folder or file")
    if target.exists():
        raise FileExistsError(f"TO={target} exists already; name a new folder")
    need_safetensors()
    return _give_out(source, target, trust) if is_checkpoint(source) else _take_in(source, target)


def _take_in(source: Path, target: Path) -> str:
    content = read_json(source, "config.json", "name a folder of a Hugging Face model")
    family = _family(content)
    size = content.get("vocab_size")
    tokenizer = read_tokenizer(source, content)
    n_bytes, n_tensors = size_of_tensors(source)
    for name in ("n_layer", "num_hidden_layers"):  # families list something for each layer
        if isinstance(layers := content.get(name), int) and layers > max(n_tensors, _LAYERS):
            raise ValueError(
                f"{source} describes a larger model than it holds: {name}={layers:,}, but it has {n_tensors:,} tensors"
            )
    with torch.device("meta"), model_of(source, n_bytes, n_tensors):
        model = family.build(content, tokenizer.to_json())
    state = _ours(read_tensors(source), family, model)
    checkpoint: dict[str, Any] = {
        "state_dict": state,
        "hyper_parameters": dict(model.hparams),
        "pytorch-lightning_version": pl.__version__,
        "epoch": 0,
        "global_step": 0,
    }
    with_config(checkpoint, {}, lit_effattn.__version__)
    settings = _settings(model, target / CHECKPOINT)

    def write_both(folder: Path) -> None:
        write(checkpoint, folder / CHECKPOINT)
        (folder / CONFIG).write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")

    _whole(target, write_both)
    count = sum(p.numel() for p in model.parameters())
    return f"{target / CHECKPOINT}: {content['model_type']}, {count:,} parameters, a vocabulary of {size:,}"


def _family(content: Mapping[str, Any]) -> Family:
    kind = content.get("model_type")
    for family in FAMILIES:
        if kind in family.model_types:
            return family
    known = ", ".join(name for family in FAMILIES for name in family.model_types)
    raise ValueError(f"config.json has model_type={kind!r}, which is not supported; there are {known}")


def _ours(theirs: dict[str, Tensor], family: Family, model: LanguageModel) -> dict[str, Tensor]:
    """Return the state_dict of `model`, made of their tensors."""
    theirs = {name: t for name, t in theirs.items() if not re.fullmatch(family.buffers, name)}
    if not any(name.startswith(family.prefix) for name in theirs):
        theirs = {name if name.startswith("lm_head.") else family.prefix + name: t for name, t in theirs.items()}
    entries = list(family.entries(model))
    head = "lm_head.weight"
    if head in theirs and head not in (entry.theirs for entry in entries):
        tied = theirs.pop(head)
        if not torch.equal(tied, theirs.get(entries[0].theirs, tied)):
            raise ValueError(f"config.json has tie_word_embeddings=true, but {head} is not the embedding; change one")
    _same_names({entry.theirs for entry in entries}, set(theirs))
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    state: dict[str, Tensor] = {}
    for name, ours, transposed in entries:
        tensor = theirs[name].T if transposed else theirs[name]
        expected = (sum(shapes[part][0] for part in ours), *shapes[ours[0]][1:])
        if tuple(tensor.shape) != expected or not tensor.is_floating_point():
            raise ValueError(
                f"{name} has the shape {tuple(theirs[name].shape)} and the type {theirs[name].dtype}, which is not "
                "what config.json says: the folder's files are of different models"
            )
        state |= zip(ours, (part.contiguous() for part in tensor.split([shapes[p][0] for p in ours])), strict=True)
    if "head.proj.weight" not in state:
        state["head.proj.weight"] = state["embedding.weight"]
    return {name: state[name] for name in shapes}


def _same_names(expected: set[str], found: set[str]) -> None:
    for what, names in (("lack", expected - found), ("also hold", found - expected)):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ValueError(
                f"the weights {what} {', '.join(sorted(names)[:3])}{more}: they are not those of the model that "
                "config.json describes"
            )


def _settings(model: LanguageModel, checkpoint: Path) -> dict[str, Any]:
    """Return a configuration with which `fit` goes on from the checkpoint."""
    settings = spec(model)
    fixed = {name: value for name, value in settings["init_args"].items() if name not in model.fixed_by_data}
    settings["init_args"] = {
        **fixed,
        "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": _LEARNING_RATE}},
    }
    data = {
        "source": "files",
        "tokenizer_of": str(checkpoint),
        "segment_len": min(_SEGMENT_LEN, n_positions(model.backbone) or _SEGMENT_LEN),
        "batch_size": 4,
    }
    return {"model": settings, "data": {"class_path": "TextStream", "init_args": data}}


# ------------------------------------------------------------------------------------------------------------ back


def _give_out(source: Path, target: Path, trust: Sequence[str]) -> str:
    model = LanguageModel.load_from_checkpoint(source, map_location="cpu", trust=trust)
    family = next((family for family in FAMILIES if family.fits(model)), None)
    if family is None:
        raise ValueError(f"{source} is no model of a family that transformers has: {_described_families()}")
    content = _config(model, family)
    ours = model.state_dict()
    types = {name: t.dtype for name, t in read_checkpoint(source)["state_dict"].items()}  # the model's may be others
    theirs = {}
    for name, parts, transposed in family.entries(model):
        tensor = torch.cat([ours[part].to(types.get(part)) for part in parts])
        theirs[name] = tensor.T if transposed else tensor
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in theirs.values()))
    tokenizer = None if model.tokenizer is None else model.text
    content |= {"dtype": str(dtype).removeprefix("torch."), **special_tokens(tokenizer)}
    remarks = []

    def write(folder: Path) -> None:
        write_tensors(theirs, folder)
        write_json(folder / "config.json", content)
        remarks.append(write_tokenizer(tokenizer, folder))

    _whole(target, write)
    return f"{target}: {content['model_type']}, {content['dtype']}{''.join(remarks)}"


def _described_families() -> str:
    return "GPT-2 has learned positions, Llama, Mistral, Qwen2 and Qwen3 have rotary ones; all have softmax attention"


def _config(model: LanguageModel, family: Family) -> dict[str, Any]:
    """Return the config.json from which an equal model is built.

    Raises:
        ValueError: there is none: names what differs from the nearest.
    """
    try:
        content = family.config(model) | {
            "vocab_size": model.vocab_size,
            "tie_word_embeddings": model.head.proj.weight is model.embedding.weight,  # type: ignore[union-attr]
        }
    except AttributeError as error:
        raise ValueError(f"the model is none that transformers has ({error}): {_described_families()}") from error
    with torch.device("meta"):
        nearest = family.build(content, None)
    specs = [spec(m) for m in (model, nearest)]
    _by_layer([s["init_args"]["backbone"]["init_args"] for s in specs], len(model.backbone.blocks))  # type: ignore[arg-type]
    here, there = map(_computed, specs)
    shapes, of_nearest = ({name: tuple(t.shape) for name, t in m.state_dict().items()} for m in (model, nearest))
    here |= {name: shape for name, shape in shapes.items() if of_nearest.get(name) != shape}
    there |= {name: shape for name, shape in of_nearest.items() if shapes.get(name) != shape}
    for name in dict.fromkeys([*here, *there]):
        if here.get(name) != there.get(name):
            raise ValueError(
                f"the model has {name}={here.get(name)!r}, where {content['model_type']} has {there.get(name)!r}: "
                "transformers would compute other logits; only a model of its shape can go back"
            )
    return content


def _by_layer(backbones: list[dict[str, Any]], n_layers: int) -> None:
    """If one of the backbones lists attentions, let all list that of each layer."""
    if any(isinstance(args.get("attention"), list) for args in backbones):
        for args in backbones:
            kinds = args.get("attention", {"class_path": _path(SoftmaxAttention)})
            kinds = kinds if isinstance(kinds, list) else [kinds]
            args["attention"] = [kinds[i % len(kinds)] for i in range(n_layers)]


def _path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _computed(value: Any, name: str = "model") -> dict[str, Any]:
    """Return what of a spec decides on the logits, by path, with the defaults of all classes."""
    if isinstance(value, list) and any(isinstance(part, dict) for part in value):
        return {k: v for i, part in enumerate(value) for k, v in _computed(part, f"{name}[{i}]").items()}
    if isinstance(value, dict) and "class_path" in value:
        kind = listed(value["class_path"])
        found = {name: value["class_path"] if kind is None else _path(kind)}
        for part, inner in {**_defaults(kind), **(value.get("init_args") or {})}.items():
            if part in _OF_TRAINING | _IN_SHAPES or (name == "model" and part not in _OF_MODEL):
                continue
            found |= _computed(inner, f"{name}.{part}" if name != "model" else part)
        return found
    return {name: value}


_OF_MODEL = {"backbone", "vocab_size", "head", "embedding", "embedding_scale"}


def _defaults(kind: type | None) -> dict[str, Any]:
    if kind is None:
        return {}
    return {
        name: {"class_path": _path(default)} if isinstance(default, type) else default
        for name, default in defaults(kind).items()
    }


def _whole(target: Path, write: Callable[[Path], None]) -> None:
    """Write a folder beside its place, and move it there when it is whole."""
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        part.mkdir(parents=True)
        write(part)
        part.rename(target)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
