"""Recordings that a person names: files, folders of them, and manifests."""

from pathlib import Path

from lit_effattn.datamodules.corpora import read_manifest
from lit_effattn.datamodules.utterances import Utterance

_SUFFIXES = {".aif", ".aiff", ".au", ".flac", ".mp3", ".nist", ".oga", ".ogg", ".opus", ".sph", ".wav", ".wv1", ".wv2"}
_MANIFESTS = {".json", ".jsonl"}


def recordings(path: Path) -> list[Utterance]:
    """The recordings that ``path`` names.

    A file is one; of a folder, every file in it and its subfolders that ends like a recording, sorted by name; of a
    manifest, those of `read_manifest`, whose lines need not say what is said.

    Raises:
        FileNotFoundError: If there is no such file or folder.
        ValueError: If the folder has none, or lines of the manifest are bad.
    """
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.suffix.lower() in _SUFFIXES and p.is_file())
        if not found:
            raise ValueError(f"{path}: has no recordings ({', '.join(sorted(_SUFFIXES))}); name another folder")
        return [Utterance(str(p), p) for p in found]
    if not path.exists():
        raise FileNotFoundError(f"{path}: there is no such file or folder; correct the path")
    if path.suffix.lower() in _MANIFESTS:
        return [line.utterance for line in read_manifest(path, spoken=False)]
    return [Utterance(str(path), path)]
