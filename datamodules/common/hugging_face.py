"""Data sets of Hugging Face, of which only data are read."""

import os
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lit_effattn.datamodules.common.files import regular

_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_FIRST_WITHOUT_SCRIPTS = 4  # major version of `datasets`


def load(option: str, path: str, subset: str | None) -> Any:
    """Load a data set, given as owner/name or as a folder.

    `datasets` takes other names for the builders that it carries, one of which unpickles files, and addresses for
    files to download.

    Raises:
        ValueError: If `datasets` is not installed, `path` is neither owner/name nor a folder, or the folder's README.md
            names files elsewhere. The message begins with `option`.
    """
    if find_spec("datasets") is None:
        raise ValueError(f"{option} needs the package datasets: pip install 'lit-effattn[huggingface]'")
    folder = Path(path)
    if "://" in path or not (folder.is_dir() or _NAME.fullmatch(path)):
        raise ValueError(f"path={path!r} is neither a data set's name, such as Salesforce/wikitext, nor a folder")
    if folder.is_dir() and (folder / "README.md").exists():
        readme = regular(folder / "README.md").read_text(encoding="utf-8", errors="replace")
        if "data_files" in readme and re.search(r"data_files[^\n]*(\n[\s-][^\n]*)*?://", readme):
            raise ValueError(f"{folder / 'README.md'}: its data_files name addresses; get the files into the folder")
    import datasets

    if os.environ.get("HF_HUB_OFFLINE") == "1":  # the libraries read it when they are imported
        import huggingface_hub

        huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    version = int(datasets.__version__.partition(".")[0])
    trust = {} if version >= _FIRST_WITHOUT_SCRIPTS else {"trust_remote_code": False}
    return datasets.load_dataset(str(folder.resolve()) if folder.is_dir() else path, subset, **trust)


def load_splits(
    option: str, path: str, subset: str | None, columns: Sequence[str], remedy: str
) -> tuple[dict[str, Any], Any]:
    """Load columns of a data set: see `load`. The column `translation.en` is the key en of the column translation.

    Returns:
        The rows of "train", and of "val" and "test" if it has them, with classes; and plain data that change if they
        change.

    Raises:
        ValueError: As in `load`, or if there is no split train with these columns.
    """
    loaded = load(option, path, subset)
    has = loaded["train"].column_names if "train" in loaded else []
    top = {column if column in has else column.split(".")[0] for column in columns}
    if not top <= set(has):
        raise ValueError(
            f"path={path!r} has no {' and '.join(map(repr, columns))} in a split 'train'; it has "
            f"{ {name: rows.column_names for name, rows in loaded.items()} }; name the columns with {remedy}"
        )
    names = {"train": "train", "val": "validation", "test": "test"}
    rows = {split: loaded[name].select_columns(sorted(top)) for split, name in names.items() if name in loaded}
    for split, of_one in [*rows.items()]:
        classes = [{*of_one[column]} for column, kind in of_one.features.items() if hasattr(kind, "names")]
        if split != "train" and any(found and found <= {-1, None} for found in classes):
            rank_zero_info(f"{option}: the classes of {names[split]!r} are secret; {split} is taken from train instead")
            del rows[split]
    return rows, [path, subset, list(columns), {name: of_one._fingerprint for name, of_one in loaded.items()}]
