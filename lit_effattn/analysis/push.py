"""`lit-effattn push`: publish a checkpoint on the Hugging Face hub."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

import lit_effattn
from lit_effattn.analysis.model_card import model_card
from lit_effattn.checkpoints.io import read_checkpoint, saved_config
from lit_effattn.checkpoints.runs import find_checkpoint, short
from lit_effattn.checkpoints.weights_files import write_weights_file
from lit_effattn.settings import parsers
from lit_effattn.settings.saved import homes

FILE = "model.safetensors"
"""The published weights, which all commands read as a checkpoint."""


def push(args: list[str]) -> None:
    """Publish a checkpoint's model, its configuration and a model card.

    Args:
        args: The arguments of the command.

    Raises:
        FileNotFoundError: If there is no such checkpoint.
        ValueError: If huggingface_hub or a token is missing, the name is invalid, or the hub rejects the upload.
    """
    given = parsers.push().parse_args(args)
    checkpoint = find_checkpoint(given.checkpoint, Path(given.root), option="push")
    if find_spec("huggingface_hub") is None:
        raise ValueError("push needs the package huggingface_hub: pip install 'lit-effattn[hub]'")
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError

    api, name = HfApi(), given.name
    if name.count("/") != 1:
        raise ValueError(f"push {name}: the name must be USER/NAME, such as ada/digits-linear")
    if get_token() is None:
        raise ValueError(
            f"push {name}: there is no token: run `hf auth login`, or set HF_TOKEN to a token that may write"
        )
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if paths := _prepare(checkpoint, folder, name, given.license):
            print(f"What is published contains paths of your home folder: {', '.join(paths)}")
        try:
            url = api.create_repo(name, private=given.private or None, exist_ok=True)
            api.upload_folder(repo_id=url.repo_id, folder_path=folder, commit_message=f"lit-effattn push {name}")
        except HFValidationError as error:
            raise ValueError(f"push {name}: the hub does not accept this name: {_first_line(error)}") from error
        except HfHubHTTPError as error:
            status = error.response.status_code
            remedy = "; use a token that may write to it" if status in (401, 403) else ""
            raise ValueError(f"push {name}: the hub answered {status}: {_first_line(error)}{remedy}") from error
        except HTTPError as error:
            raise ValueError(
                f"push {name}: {api.endpoint} can't be reached: {_first_line(error)}; try again later"
            ) from error
    print(f"{short(checkpoint)} is at {url}")


def _prepare(checkpoint: Path, folder: Path, name: str, license: str | None) -> list[str]:
    """Write the files to publish. Return paths of the user's home folder in them."""
    content = read_checkpoint(checkpoint)
    config = saved_config(content, checkpoint)
    write_weights_file(folder / FILE, content["state_dict"], config["model"], lit_effattn.__version__, content)
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True), encoding="utf-8")
    (folder / "README.md").write_text(model_card(checkpoint, name, file=FILE, license=license), encoding="utf-8")
    return list(dict.fromkeys(homes(config)))


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).partition("\n")[0]
