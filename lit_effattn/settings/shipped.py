"""The shipped configurations: finding, listing and showing them. Does not import PyTorch, which is slow."""

import re
from difflib import get_close_matches
from pathlib import Path


def shipped() -> dict[str, Path]:
    """Return the files of the shipped configurations by their names."""
    return {path.stem: path for path in sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))}


def find_config(name: str) -> str:
    """Return the file that `--config name` means: the user's own, or else the shipped configuration of that name.

    Raises:
        ValueError: If there is neither, or the file is a pipe.
    """
    stem = name.removeprefix("configs/").removesuffix(".yaml")
    for own in (Path(name), Path(f"{name}.yaml"), Path("configs", f"{stem}.yaml")):
        if own.is_file():
            return str(own)
    if Path(name).is_fifo():
        raise ValueError(f"--config {name} is a pipe, which can be read only once; write its content to a file")
    known = shipped()
    if stem in known:
        return str(known[stem])
    close = get_close_matches(stem, known, n=1)
    problem = "this is a folder, not a file" if Path(name).is_dir() else "there is no such file"
    raise ValueError(
        f"--config {name}: {problem}, nor a shipped configuration of that name"
        + (f"; did you mean {close[0]}?" if close else "; `lit-effattn configs` lists those")
    )


def configs(names: list[str]) -> str:
    """Return the output of `lit-effattn configs`: a line for each shipped configuration, or the text of the named ones.

    Raises:
        ValueError: If there is no configuration of a name.
    """
    if names:
        return "\n".join(Path(find_config(name)).read_text(encoding="utf-8").rstrip() for name in names)
    files = shipped()
    width = max(map(len, files))
    return "\n".join(f"{name:{width}}  {_about(path.read_text(encoding='utf-8'))}" for name, path in files.items())


def _about(text: str) -> str:
    """Return the first sentence of the comment at the head of a configuration."""
    comment = re.match(r"(#.*\n)*", text)
    words = " ".join((comment[0] if comment else "").replace("#", " ").split())
    return re.split(r"(?<! al)\. ", words)[0].removesuffix(".")
