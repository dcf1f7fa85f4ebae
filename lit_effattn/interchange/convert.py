"""Convert a folder of Hugging Face weights to a checkpoint, and a checkpoint to such a folder."""

import re
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import yaml
from torch import Tensor

from lit_effattn.attention import SoftmaxAttention
from lit_effattn.attention.positions import n_positions
from lit_effattn.checkpoints.files import whole, write
from lit_effattn.checkpoints.io import read_checkpoint
from lit_effattn.checkpoints.loading import load_model
from lit_effattn.checkpoints.model_size import model_of
from lit_effattn.checkpoints.runs import is_checkpoint, short
from lit_effattn.checkpoints.shipped import model_path
from lit_effattn.checkpoints.trust import imported
from lit_effattn.hparams import defaults, spec
from lit_effattn.interchange.family import Family
from lit_effattn.interchange.gpt2 import GPT2
from lit_effattn.interchange.llama import Llama
from lit_effattn.interchange.tokenizer import read_tokenizer, special_tokens, write_json, write_tokenizer
from lit_effattn.interchange.weights import read_json, read_tensors, size_of_tensors, write_tensors
from lit_effattn.tasks import LanguageModel

FAMILIES: tuple[Family, ...] = (GPT2(), Llama())

CHECKPOINT, CONFIG = "model.ckpt", "config.yaml"  # the files of a converted model
_LAYERS = 1000  # number of layers that is accepted before the files are read, which checks it

_SEGMENT_LEN = 512
_LEARNING_RATE = 5e-5

_NOT_COMPARED = {
    *("dropout", "activation_dropout", "output_dropout", "init", "init_std", "zero_init", "gradient_checkpointing"),
    *("d_ff", "n_kv_heads", "head_dim", "bias", "out_bias", "final_norm", "max_len", "norm_eps", "d_source"),
}
"""Arguments of training only; arguments that are compared as shapes; and ε, which is read from the modules."""

_OF_MODEL = {"backbone", "vocab_size", "head", "embedding", "embedding_scale"}
"""Arguments of `LanguageModel` that determine its logits."""


def convert(source: str | Path, target: str | Path, *, trust: Sequence[str] = ()) -> str:
    """Convert `source` into the new folder `target`. If that fails, `target` is not created.

    Args:
        source: A folder with config.json, model.safetensors (or its parts with their index) and tokenizer.json; or a
            checkpoint. Without tokenizer.json, texts are token numbers, and a warning says so.
        target: The new folder. From a folder, `model.ckpt` and `config.yaml` are written; from a checkpoint,
            config.json, model.safetensors with the types of the checkpoint's tensors, and the tokenizer's files.
        trust: Classes of the user's own that a checkpoint may name: see `Task.load_from_checkpoint`.

    Returns:
        A description of the written files.

    Raises:
        FileNotFoundError: If `source` does not exist.
        FileExistsError: If `target` exists.
        ValueError: If the model is not supported, with the unsupported setting and its value.
    """
    source, target = model_path(source, "FROM"), Path(target)
    if not source.exists():
        raise FileNotFoundError(f"FROM={source}: there is no such folder or file")
    if target.exists():
        raise FileExistsError(f"TO={target} exists already; name a new folder")
    return _to_folder(source, target, trust) if is_checkpoint(source) else _to_checkpoint(source, target)


def _to_checkpoint(source: Path, target: Path) -> str:
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
    checkpoint: dict[str, Any] = {
        "state_dict": _state_dict(read_tensors(source), family, model),
        "hyper_parameters": dict(model.hparams),
        "pytorch-lightning_version": pl.__version__,
        "epoch": 0,
        "global_step": 0,
    }
    settings = yaml.safe_dump(_settings(model, target / CHECKPOINT), sort_keys=False)
    with whole(target) as folder:
        folder.mkdir()
        write(checkpoint, folder / CHECKPOINT)
        (folder / CONFIG).write_text(settings, encoding="utf-8")
    count = sum(p.numel() for p in model.parameters())
    return f"{target / CHECKPOINT}: {content['model_type']}, {count:,} parameters, a vocabulary of {size:,}"


def _family(content: Mapping[str, Any]) -> Family:
    kind = content.get("model_type")
    for family in FAMILIES:
        if kind in family.model_types:
            return family
    known = ", ".join(name for family in FAMILIES for name in family.model_types)
    raise ValueError(f"config.json has model_type={kind!r}, which is not supported; supported are {known}")


def _state_dict(pretrained: dict[str, Tensor], family: Family, model: LanguageModel) -> dict[str, Tensor]:
    pretrained = {name: t for name, t in pretrained.items() if not re.fullmatch(family.buffers, name)}
    if not any(name.startswith(family.prefix) for name in pretrained):
        pretrained = {n if n.startswith("lm_head.") else family.prefix + n: t for n, t in pretrained.items()}
    entries = list(family.entries(model))
    head = "lm_head.weight"
    if head in pretrained and head not in (entry.name for entry in entries):
        tied = pretrained.pop(head)
        if not torch.equal(tied, pretrained.get(entries[0].name, tied)):
            raise ValueError(f"config.json has tie_word_embeddings=true, but {head} is not the embedding; change one")
    expected_names = {entry.name for entry in entries}
    for verb, names in (
        ("lack", expected_names - pretrained.keys()),
        ("also hold", pretrained.keys() - expected_names),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ValueError(
                f"the weights {verb} {', '.join(sorted(names)[:3])}{more}: they are not those of the model that "
                "config.json describes"
            )
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    state: dict[str, Tensor] = {}
    for name, parts, transposed in entries:
        tensor = pretrained[name].T if transposed else pretrained[name]
        expected = (sum(shapes[part][0] for part in parts), *shapes[parts[0]][1:])
        if tuple(tensor.shape) != expected or not tensor.is_floating_point():
            raise ValueError(
                f"{name} has the shape {tuple(pretrained[name].shape)} and the type {tensor.dtype}, which does not "
                "match config.json: the folder's files are of different models"
            )
        state |= zip(parts, (t.contiguous() for t in tensor.split([shapes[p][0] for p in parts])), strict=True)
    if "head.proj.weight" not in state:
        state["head.proj.weight"] = state["embedding.weight"]
    return {name: state[name] for name in shapes}


def _settings(model: LanguageModel, checkpoint: Path) -> dict[str, Any]:
    """Return a configuration with which `fit` continues from the checkpoint."""
    settings = spec(model)
    arguments = {name: value for name, value in settings["init_args"].items() if name not in model.fixed_by_data}
    optimizer = {"class_path": "torch.optim.AdamW", "init_args": {"lr": _LEARNING_RATE}}
    settings["init_args"] = {**arguments, "optimizer": optimizer}
    data = {
        "source": "files",
        "tokenizer_of": str(checkpoint),
        "segment_len": min(_SEGMENT_LEN, n_positions(model.backbone) or _SEGMENT_LEN),
        "batch_size": 4,
    }
    return {"model": settings, "data": {"class_path": "TextStream", "init_args": data}}


# ---------------------------------------------------------------------------------------------- from a checkpoint


def _to_folder(source: Path, target: Path, trust: Sequence[str]) -> str:
    content = read_checkpoint(source)
    types = {name: t.dtype for name, t in content["state_dict"].items()}  # the model's may differ
    model = load_model(LanguageModel, source, map_location="cpu", trust=trust, content=content)
    family = next((family for family in FAMILIES if family.fits(model)), None)
    if family is None:
        raise ValueError(
            f"{short(source)} can't be converted, as its model is of no family of transformers: {_DESCRIPTION}"
        )
    config = _config(model, family)
    state = model.state_dict()
    tensors = {}
    for name, parts, transposed in family.entries(model):
        tensor = torch.cat([state[part].to(types.get(part)) for part in parts])
        tensors[name] = tensor.T if transposed else tensor
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors.values()))
    tokenizer = None if model.tokenizer is None else model.text
    config |= {"dtype": str(dtype).removeprefix("torch."), **special_tokens(tokenizer)}
    with whole(target) as folder:
        folder.mkdir()
        write_tensors(tensors, folder)
        write_json(folder / "config.json", config)
        remark = write_tokenizer(tokenizer, folder)
    return f"{target}: {config['model_type']}, {config['dtype']}{remark}"


_DESCRIPTION = "GPT-2 has learned positions, Llama, Mistral, Qwen2 and Qwen3 rotary ones; all have softmax attention"


def _config(model: LanguageModel, family: Family) -> dict[str, Any]:
    """Return the config.json from which an equal model is built.

    Raises:
        ValueError: If none exists, with a setting that differs from the nearest model of the family.
    """
    try:
        content = family.config(model) | {
            "vocab_size": model.vocab_size,
            "tie_word_embeddings": model.head.proj.weight is model.embedding.weight,  # type: ignore[union-attr]
        }
    except AttributeError as error:
        raise ValueError(f"transformers has no such model ({error}): {_DESCRIPTION}") from error
    with torch.device("meta"):
        nearest = family.build(content, None)
    specs = [spec(m) for m in (model, nearest)]
    _by_layer([s["init_args"]["backbone"]["init_args"] for s in specs], len(model.backbone.blocks))  # type: ignore[arg-type]
    actual, expected = (
        _computed(s) | {name: tuple(t.shape) for name, t in m.state_dict().items()}
        for s, m in zip(specs, (model, nearest), strict=True)
    )
    for name in dict.fromkeys([*actual, *expected]):
        if actual.get(name) != expected.get(name):
            raise ValueError(
                f"the model has {name}={actual.get(name)!r}, where {content['model_type']} has {expected.get(name)!r}: "
                "transformers would compute other logits; only a model of this family can be converted"
            )
    return content


def _by_layer(backbones: list[dict[str, Any]], n_layers: int) -> None:
    """If one of the backbones lists attentions, list the attention of each layer in all."""
    if any(isinstance(args.get("attention"), list) for args in backbones):
        for args in backbones:
            kinds = args.get("attention", {"class_path": _path(SoftmaxAttention)})
            kinds = kinds if isinstance(kinds, list) else [kinds]
            args["attention"] = [kinds[i % len(kinds)] for i in range(n_layers)]


def _path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _computed(value: Any, name: str = "model") -> dict[str, Any]:
    """Return the settings of a spec that determine the logits, by path, with the defaults of all classes."""
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return {k: v for i, item in enumerate(value) for k, v in _computed(item, f"{name}[{i}]").items()}
    if not isinstance(value, dict) or "class_path" not in value:
        return {name: value}
    kind = imported(value["class_path"])
    computed = {name: value["class_path"] if kind is None else _path(kind)}
    known = {} if kind is None else defaults(kind)
    known = {k: {"class_path": _path(v)} if isinstance(v, type) else v for k, v in known.items()}
    for argument, inner in {**known, **(value.get("init_args") or {})}.items():
        if name == "model" and argument in _OF_MODEL:
            computed |= _computed(inner, argument)
        elif name != "model" and argument not in _NOT_COMPARED:
            computed |= _computed(inner, f"{name}.{argument}")
    return computed
