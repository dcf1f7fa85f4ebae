"""The tokenizer of a folder of Hugging Face weights, and the files that name its special tokens."""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_effattn.datamodules.text.tokenizers import NumberTokenizer, PretrainedTokenizer, Tokenizer
from lit_effattn.interchange.weights import read_json

SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
"""The keys of config.json and generation_config.json that name special tokens."""

_CONFIG, _GENERATION = "config.json", "generation_config.json"
_TOKENIZER, _TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
_OBJECTS = (_GENERATION, _TOKENIZER_CONFIG, "special_tokens_map.json")
_TEMPLATE = "chat_template.jinja"
_SAVE = "with transformers, AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) writes it"
_CODE = "auto_map"
"""A key that names Python files to run. It is dropped."""


def read_tokenizer(folder: Path, content: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer of a folder, with the files that name special tokens, for `write_tokenizer`.

    Without tokenizer.json, texts are token numbers, and a warning is issued. `content` is that of config.json.

    Raises:
        ValueError: If a file is damaged, or the token at the start of a text is not given.
    """
    files: dict[str, Any] = {
        name: _without_code(read_json(folder, name, "")) for name in _OBJECTS if (folder / name).is_file()
    }
    if (folder / _TEMPLATE).is_file():
        files[_TEMPLATE] = (folder / _TEMPLATE).read_text(encoding="utf-8")
    files[_CONFIG] = {name: content[name] for name in SPECIAL if name in content}
    known = files.get(_GENERATION, {}) | {name: token for name, token in files[_CONFIG].items() if token is not None}
    first, last = (_first(known.get(name)) for name in ("bos_token_id", "eos_token_id"))
    start, size = last if first is None else first, content.get("vocab_size")
    if start is None or not isinstance(size, int):
        missing = "the model's special tokens: bos_token_id or eos_token_id" if start is None else "vocab_size"
        raise ValueError(f"config.json does not give {missing}")
    if (folder / _TOKENIZER).is_file():
        return PretrainedTokenizer(read_json(folder, _TOKENIZER, _SAVE), size, start, last, files)
    warnings.warn(
        f"{folder} has no {_TOKENIZER}: texts of the converted model are token numbers, separated by spaces; {_SAVE}",
        stacklevel=2,
    )
    return NumberTokenizer(size, start, last, files)


def special_tokens(tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return the entries of config.json for a tokenizer's special tokens."""
    if not isinstance(tokenizer, PretrainedTokenizer | NumberTokenizer):
        return {}
    saved = tokenizer.files.get(_CONFIG)
    if not isinstance(saved, dict):  # made in Python, without these files
        return {"bos_token_id": tokenizer.start, "eos_token_id": tokenizer.end}
    return {name: saved[name] for name in SPECIAL if name in saved}


def write_tokenizer(tokenizer: Tokenizer | None, folder: Path) -> str:
    """Write the files that `read_tokenizer` read, except config.json.

    Returns:
        A remark for the user if tokenizer.json is not written, else "".
    """
    if not isinstance(tokenizer, PretrainedTokenizer | NumberTokenizer):
        return ", without a tokenizer: the model's tokenizer has no tokenizer.json"
    files = {name: _without_code(tokenizer.files[name]) for name in _OBJECTS if name in tokenizer.files}
    special = special_tokens(tokenizer)
    files.setdefault(_GENERATION, {"_from_model_config": True, **special})
    if isinstance(tokenizer, PretrainedTokenizer):
        files[_TOKENIZER] = tokenizer.model
        names = {name.removesuffix("_id"): tokenizer.name_of(_first(token)) for name, token in special.items()}
        files.setdefault(_TOKENIZER_CONFIG, {"tokenizer_class": "PreTrainedTokenizerFast", **names})
    for name, content in files.items():
        write_json(folder / name, content)
    if isinstance(tokenizer.files.get(_TEMPLATE), str):
        (folder / _TEMPLATE).write_text(tokenizer.files[_TEMPLATE], encoding="utf-8")
    return "" if _TOKENIZER in files else ", without a tokenizer.json, as the original folder"


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _first(value: Any) -> int | None:
    """Return a token: the value, or the first of a list."""
    value = value[0] if isinstance(value, list) and value else value
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _without_code(content: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in content.items() if name != _CODE}
