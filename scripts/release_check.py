"""Build the sdist and the wheel, check them, and run the demo from the wheel in new environments.

    python -m scripts.release_check                          # into dist/; what `make release-check` runs
    python -m scripts.release_check --python 3.12            # one version of Python
    python -m scripts.release_check --python                 # build and check the files alone

1. Two builds, of the working tree and of the last commit in another folder, must be equal byte for byte.
2. `twine check --strict` and `check-wheel-contents` must pass. The long description has no relative links, and
   CHANGELOG.md has a section on the version.
3. In an environment for each version of Python and each resolution (the oldest direct dependencies that install without
   a compiler, and the newest), the wheel trains, tests and samples in an empty folder.
4. With torch and pytest alone, `lit_effattn.attention`, `.ops`, `.sequence` and `.laws` run.

Environments are made one at a time and deleted. REPOSITORY_URL is the address that the long description links to.
UV_TORCH_BACKEND=cpu installs PyTorch without CUDA.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
PYTHONS = ("3.10", "3.12", "3.13")
RESOLUTIONS = ("lowest-direct", "highest")
DEMO = (
    ("--version", "--verbose"),
    (
        *("fit", "--config", "digits_linear", "--trainer.max_steps", "10", "--trainer.max_epochs", "1"),
        *("--trainer.limit_val_batches", "1", "--trainer.enable_progress_bar", "false"),
    ),
    ("test", "--ckpt_path", "last", "--trainer.limit_test_batches", "1", "--trainer.enable_progress_bar", "false"),
    ("generate", "--ckpt_path", "last", "--n", "4"),
)
"""The commands that run from the wheel."""
ATTENTION = """
import torch, lit_effattn.ops, lit_effattn.sequence
from lit_effattn.attention import LinearAttention
y, state = LinearAttention(16, 2, causal=True)(torch.randn(2, 100, 16))
assert y.shape == (2, 100, 16) and y.isfinite().all()
"""
LAWS = """
from functools import partial
from torch import nn
from lit_effattn.laws import LawSuite

class TestMine(LawSuite):
    adapter = partial(nn.GRU, 8, 8, batch_first=True)
    laws = ["steps", "padding"]
"""


def main(args: Sequence[str] | None = None) -> None:
    """Run all checks, and print a line on each."""
    parser = argparse.ArgumentParser("release_check", description="Build, check and try a release.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="Folder for the files. Its content is deleted.")
    parser.add_argument("--tag", help="Tag of the commit, which must be v and the version.")
    parser.add_argument("--python", nargs="*", default=PYTHONS, help="Versions of Python to try.")
    options = parser.parse_args(args)
    sdist, wheel = build_twice(options.out)
    check_files(sdist, wheel, options.tag)
    for python in options.python:
        for resolution in RESOLUTIONS:
            try_wheel(wheel, python, resolution)
    if options.python:
        try_with_torch_alone(wheel, options.python[-1])
    print("release-check: all passed")


def build_twice(out: Path) -> tuple[Path, Path]:
    """Build the working tree into `out`, and the last commit elsewhere; return the sdist and the wheel.

    Raises:
        SystemExit: If the two builds differ.
    """
    shutil.rmtree(out, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        source, second = Path(folder, "source"), Path(folder, "dist")
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", f"--one-top-level={source}"], input=archive, check=True)
        build(ROOT, out)
        umask = os.umask(0o077)
        try:
            build(source, second)
        finally:
            os.umask(umask)
        for path in sorted(out.iterdir()):
            first = sha256(path)
            if first != sha256(second / path.name):
                sys.exit(f"{path.name} differs from a build of the last commit; commit the changes, and compare again")
            print(f"{path.name}: {path.stat().st_size:,} bytes, sha256 {first}, equal in two builds")
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


def build(source: Path, out: Path) -> None:
    """Build the sdist, and the wheel from the sdist. Times in the files are that of the last commit."""
    commit = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, check=True, capture_output=True, text=True)
    run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)],
        env={**os.environ, "SOURCE_DATE_EPOCH": commit.stdout.strip()},
    )


def sha256(path: Path) -> str:
    """Return the hash of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def check_files(sdist: Path, wheel: Path, tag: str | None = None) -> None:
    """Check metadata, contents, long description, changelog and tag.

    Raises:
        SystemExit: If a check fails.
    """
    run([sys.executable, "-m", "twine", "check", "--strict", str(sdist), str(wheel)])
    run([sys.executable, "-m", "check_wheel_contents", str(wheel)])
    with zipfile.ZipFile(wheel) as file:
        (name,) = (name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = file.read(name).decode()
    if links := relative_links(metadata):
        sys.exit(f"the long description has relative links: {', '.join(links)}")
    version = wheel.name.split("-")[1]
    if tag is not None and tag != f"v{version}":
        sys.exit(
            f"the tag is {tag}, but pyproject.toml has the version {version}: tag v{version}, or change the version"
        )
    if not re.search(rf"^## {re.escape(version)}\b", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M):
        sys.exit(f"CHANGELOG.md has no section '## {version}'")
    print("twine check --strict, check-wheel-contents, links, changelog: passed")


def relative_links(text: str) -> list[str]:
    """Return the targets of Markdown links that are neither absolute nor within the page."""
    return re.findall(r"\]\((?![a-z]+:|#)([^)\s]+)\)", text)


def try_wheel(wheel: Path, python: str, resolution: str) -> None:
    """Install the wheel into a new environment, and run the demo in an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        # The wheel's requirements are direct ones in pyproject.toml alone.
        direct = ["--requirement", str(ROOT / "pyproject.toml")]
        environment = make_environment(
            Path(folder), python, *direct, str(wheel), "--no-build", "--resolution", resolution
        )
        installed = time.monotonic()
        work = Path(folder, "work")
        work.mkdir()
        for command in DEMO:
            print(run([str(environment / "bin" / "lit-effattn"), *command], cwd=work, env=clean(Path(folder))), end="")
        ended = time.monotonic()
        print(
            f"Python {python}, {resolution}: installed in {installed - began:.0f} s, {size(environment):,.0f} MB; "
            f"trained, tested and sampled in {ended - installed:.0f} s"
        )


def try_with_torch_alone(wheel: Path, python: str) -> None:
    """Run an attention, and the laws as a command and as tests, in an environment with torch and pytest alone."""
    with tempfile.TemporaryDirectory() as folder:
        environment = make_environment(Path(folder), python, "pytest", "torch>=2.11,<2.15")
        install(environment, "--no-deps", str(wheel))
        Path(folder, "test_mine.py").write_text(LAWS, encoding="utf-8")
        for arguments in (
            ["-c", ATTENTION],
            ["-m", "lit_effattn.laws", "torch.nn:GRU", "LinearAttention"],
            ["-m", "pytest", "test_mine.py"],
        ):
            run([str(environment / "bin" / "python"), *arguments], cwd=Path(folder), env=clean(Path(folder)))
        print(f"Python {python}, torch and pytest alone: {size(environment):,.0f} MB; an attention and the laws run")


def make_environment(folder: Path, python: str, *packages: str) -> Path:
    """Make an environment with `packages`, and return its folder."""
    environment = folder / "environment"
    run([sys.executable, "-m", "uv", "venv", "--quiet", "--python", python, str(environment)])
    install(environment, *packages)
    return environment


def install(environment: Path, *packages: str) -> None:
    """Install packages into an environment."""
    python = str(environment / "bin" / "python")
    run([sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", python, *packages])


def clean(folder: Path) -> dict[str, str]:
    """Return the process environment without Python's variables, and with empty folders for caches."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return {**kept, "XDG_CACHE_HOME": str(folder / "cache")}


def size(folder: Path) -> float:
    """Return the size of a folder's files in MB (10⁶ bytes)."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink()) / 1e6


def run(command: list[str], **options: object) -> str:
    """Run a command and return what it prints.

    Raises:
        SystemExit: If it fails; with all that it printed.
    """
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)  # type: ignore[call-overload]
    if done.returncode:
        sys.exit(f"{done.stdout}\n{' '.join(command)} failed with exit code {done.returncode}")
    return done.stdout


if __name__ == "__main__":
    main()
