"""Data sets of Hugging Face, of which only data are read."""

import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

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
        raise ValueError(
            f"path={path!r} is neither a data set's name, owner/name such as Salesforce/wikitext, nor a folder"
        )
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
