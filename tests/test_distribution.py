"""What is installed: one package, with all that it needs, whatever folders lie where it is used."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from email import message_from_bytes
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hatchling.build import build_sdist, build_wheel
from readme_renderer import markdown

from tests.support.commands import REPOSITORY

pytestmark = pytest.mark.processes

ADDRESS = "https://example.org/lit-effattn"


def git_files() -> list[str]:
    """Names of the files that git knows."""
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, check=True, capture_output=True, text=True)
    return listed.stdout.splitlines()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An sdist of what git knows, which records the address of the repository, and a wheel made from that sdist."""
    source, out, unpacked = (tmp_path_factory.mktemp(name) for name in ("source", "dist", "unpacked"))
    for name in git_files():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        if (REPOSITORY / name).is_symlink() or (REPOSITORY / name).is_file():
            shutil.copy(REPOSITORY / name, source / name, follow_symlinks=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(source)
        patch.setenv("REPOSITORY_URL", f"{ADDRESS}/")
        shutil.unpack_archive(out / build_sdist(str(out)), unpacked)
        patch.delenv("REPOSITORY_URL")
        (source,) = unpacked.iterdir()
        assert not [path for path in source.rglob("*") if path.is_symlink()]
        patch.chdir(source)
        build_wheel(str(out))
    return out


def names(wheel: Path) -> list[str]:
    return zipfile.ZipFile(wheel).namelist()


def test_the_wheel_holds_one_package(built: Path):
    (wheel,) = built.glob("*.whl")
    tops = {name.split("/")[0] for name in names(wheel)}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"lit_effattn"}
    held = set(names(wheel))
    for folder in ("lit_effattn", "callbacks", "datamodules", "configs"):
        inside = "lit_effattn" if folder == "lit_effattn" else f"lit_effattn/{folder}"
        for path in (REPOSITORY / folder).rglob("*"):
            if (
                path.suffix in (".py", ".cpp", ".gz", ".hpp", ".html", ".safetensors", ".xz", ".yaml")
                and "__pycache__" not in path.parts
            ):
                assert f"{inside}/{path.relative_to(REPOSITORY / folder)}" in held
    assert "lit_effattn/py.typed" in held


class Targets(HTMLParser):
    """The targets of a page's links to other pages, and of its pictures."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.pictures: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        target = dict(attributes).get({"a": "href", "img": "src"}.get(tag, ""))
        if target and not target.startswith("#"):  # a heading links to itself
            (self.links if tag == "a" else self.pictures).append(target)


def test_links_of_the_rendered_long_description_lead_to_files(built: Path):
    """As PyPI renders it. Links within the repository are to files that git knows, at the tag of the version."""
    (wheel,) = built.glob("*.whl")
    (name,) = (name for name in names(wheel) if name.endswith(".dist-info/METADATA"))
    metadata = message_from_bytes(zipfile.ZipFile(wheel).read(name))
    assert dict(url.split(", ") for url in metadata.get_all("Project-URL"))["Source"] == ADDRESS
    page = markdown.render(metadata.get_payload(decode=True).decode())
    assert page is not None
    targets = Targets(page)
    tag, files = f"v{metadata['Version']}", set(git_files())
    assert targets.pictures == [f"{ADDRESS}/raw/{tag}/docs/images/completed.png"]
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert len(targets.links) + len(targets.pictures) == len(re.findall(r"\]\(", readme))
    for target in targets.links + targets.pictures:
        assert target.startswith("https://")
        address, _, path = target.partition(f"/{tag}/")
        if target.startswith(ADDRESS):
            assert address in (f"{ADDRESS}/blob", f"{ADDRESS}/raw")
            assert path.partition("#")[0] in files


USE = """
import lit_effattn, lit_effattn.datamodules, datamodules.mine, callbacks.mine
from lit_effattn import PixelModel
from lit_effattn.cli import main
assert lit_effattn.__file__.startswith({installed!r}), lit_effattn.__file__
mine = ["--data", "datamodules.mine.MyData", "--trainer.callbacks+=callbacks.mine.Mine"]
quick = ["--trainer.fast_dev_run", "1", "--trainer.enable_progress_bar", "false", "--model.backbone.n_layers", "1"]
main(["fit", "--config", "digits_linear", *mine, *quick])
"""


@pytest.mark.exhaustive
def test_it_runs_beside_folders_of_the_same_names(built: Path, tmp_path: Path):
    """The wheel, unpacked where nothing else of ours is, in a folder with the user's own `datamodules` and others."""
    (wheel,) = built.glob("*.whl")
    installed, work = tmp_path / "installed", tmp_path / "work"
    zipfile.ZipFile(wheel).extractall(installed)
    for folder, content in {
        "datamodules": "from lit_effattn.datamodules import PixelSequences\nclass MyData(PixelSequences): pass\n",
        "callbacks": "from lightning.pytorch import Callback\nclass Mine(Callback): pass\n",
        "configs": "",
    }.items():
        (work / folder).mkdir(parents=True)
        (work / folder / "__init__.py").touch()
        (work / folder / "mine.py").write_text(content)
    done = subprocess.run(
        [sys.executable, "-c", USE.format(installed=str(installed))],
        cwd=work,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


SCRIPT = """
import torch
from lit_effattn import Transformer
from lit_effattn.attention import LinearAttention
from lit_effattn.datamodules import PixelSequences

y, state = LinearAttention(8, 2, True)(torch.zeros(1, 2, 8))
reveal_type(y)
reveal_type(Transformer(8, 2, 1)(y)[0])
reveal_type(PixelSequences("digits").n_levels)
"""
TYPES = ["torch._tensor.Tensor", "torch._tensor.Tensor", "int"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("install", ["editable", "wheel"])
def test_type_checkers_find_our_types(install: str, built: Path, tmp_path: Path):
    (tmp_path / "script.py").write_text(SCRIPT)
    python = sys.executable
    if install == "wheel":
        (wheel,) = built.glob("*.whl")
        zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
        python = environment_with(tmp_path / "environment", str(tmp_path / "installed"), sysconfig.get_path("purelib"))
    options = ["--strict", "--python-executable", python, "--cache-dir", str(built / "cache")]
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout
    found = [
        line.split('"')[1].removeprefix("builtins.") for line in checked.stdout.splitlines() if "Revealed type" in line
    ]
    assert found == TYPES


def environment_with(folder: Path, *paths: str) -> str:
    """Make an environment of `paths` alone: not of what is linked into them, our editable install."""
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/*/site-packages")
    (packages / "paths.pth").write_text("\n".join(paths) + "\n")
    return str(folder / "bin" / "python")


def test_help_loads_nothing():
    code = 'import sys; from lit_effattn.cli import main; main(["--help"]); assert "torch" not in sys.modules'
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
