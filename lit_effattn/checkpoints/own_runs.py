"""The runs of this account, whose `config.yaml` may name any class, as flags may.

The first line of a configuration that a run writes is a comment with an HMAC-SHA256 of the other lines. Its key is
random, is made once, and is in `$XDG_STATE_HOME/lit-effattn/key`, which this account alone can read. Whoever lacks the
key can't write a file that passes, and a copy that somebody sends back holds the words that this account wrote. A run
can be moved and copied; a changed file is no longer the account's own.
"""

import hmac
import os
import re
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_effattn.checkpoints.plain_yaml import parse_yaml
from lit_effattn.checkpoints.runs import run_of, small_text
from lit_effattn.checkpoints.shipped import model_config
from lit_effattn.checkpoints.trust import find, may_name_modules

_MARK = "# written by this account: "
_BYTES = 32


def marked(text: str) -> str:
    """Return the text of a configuration with the mark of this account.

    Without a key, for example because the folder can't be written, the text has none, and a warning says so.
    """
    try:
        key = _key() or _new_key()
    except OSError as error:
        rank_zero_warn(
            f"{error.filename or _file()} can't be written ({error.strerror}), so other commands will not know this "
            "run as yours: give them --config with its config.yaml, or set XDG_STATE_HOME to a folder that is kept"
        )
        return text
    return f"{_MARK}{_sum(key, text)}\n{text}"


def config_file(run: Path) -> Path | None:
    """Return the newest configuration in the folder of a run: `config.yaml`, or the last `config_resumed_N.yaml`."""
    resumed = {int(m[1]): p for p in run.glob("config_resumed_*.yaml") if (m := re.search(r"_(\d+)\.yaml$", p.name))}
    file = resumed[max(resumed)] if resumed else run / "config.yaml"
    return file if file.exists() or file.is_symlink() else None


def own_config(checkpoint: Path) -> dict[str, Any] | None:
    """Return the configuration of the run of a checkpoint, if this account wrote it; else None.

    The configuration of a shipped model, which is part of this package, counts as the account's own.

    Raises:
        ValueError: If the file is not YAML.
    """
    text = model_config(checkpoint)
    if text is None and (run := run_of(checkpoint)) is not None and (file := config_file(run)) is not None:
        with suppress(OSError, ValueError):
            mark, _, body = small_text(file).partition("\n")
            text = body if _is_own(mark, body) else None
    config = None if text is None else parse_yaml(text)
    return config if isinstance(config, dict) else None


def own_classes(checkpoint: Path) -> list[type]:
    """Return the classes that the configuration of a checkpoint's run names, if this account wrote it."""
    config, kinds = own_config(checkpoint), []
    for name in _class_paths({} if config is None else config.get("model")):
        may_name_modules(name)
        with suppress(Exception):  # the user's module may raise any exception
            kinds.append(find(name))
    return [kind for kind in kinds if isinstance(kind, type)]


def _class_paths(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("class_path"), str):
            yield value["class_path"]
        for item in value.values():
            yield from _class_paths(item)
    elif isinstance(value, list):
        for item in value:
            yield from _class_paths(item)


def _is_own(mark: str, body: str) -> bool:
    key = _key()
    return key is not None and hmac.compare_digest(mark.encode(), f"{_MARK}{_sum(key, body)}".encode())


def _sum(key: bytes, text: str) -> str:
    return hmac.new(key, text.encode(), "sha256").hexdigest()


def _file() -> Path:
    # `Path.home` raises an error for a user without a home.
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")  # noqa: PTH111
    return Path(state, "lit-effattn", "key")


def _key() -> bytes | None:
    """Return the key; None without one, or if others can write it."""
    try:
        key = _file().read_bytes()
    except OSError:
        return None
    is_private = os.name == "nt" or _file().stat().st_mode & 0o077 == 0
    return key if is_private and len(key) == _BYTES else None


def _new_key() -> bytes:
    """Write a key. If several processes do so at once, all get the key of the first."""
    file = _file()
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    number, part = tempfile.mkstemp(dir=file.parent)  # of mode 600
    try:
        with os.fdopen(number, "wb") as opened:
            opened.write(secrets.token_bytes(_BYTES))
        with suppress(FileExistsError):
            os.link(part, file)
    finally:
        Path(part).unlink()
    key = _key()
    if key is None:
        raise PermissionError(13, "it is not a private file of 32 bytes", str(file))
    return key
