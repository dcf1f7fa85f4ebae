"""Recordings given by the user: files, folders and manifests."""

from pathlib import Path

from lit_effattn.datamodules.speech.corpora import read_manifest
from lit_effattn.datamodules.speech.utterances import Utterance

_SUFFIXES = {".aif", ".aiff", ".au", ".flac", ".mp3", ".nist", ".oga", ".ogg", ".opus", ".sph", ".wav", ".wv1", ".wv2"}
_MANIFESTS = {".json", ".jsonl"}


def recordings(path: Path) -> list[Utterance]:
    """Return the recordings that `path` refers to.

    A file is one recording. A folder gives every file in it and its subfolders with a suffix of audio files, sorted by
    name. A manifest gives the utterances of `read_manifest`, without the need for text or phonemes.

    Raises:
        FileNotFoundError: If `path` does not exist.
        ValueError: If the folder has no recordings, or lines of the manifest are invalid.
    """
    if path.is_dir():
        paths = sorted(p for p in path.rglob("*") if p.suffix.lower() in _SUFFIXES and p.is_file())
        if not paths:
            raise ValueError(f"{path}: has no recordings ({', '.join(sorted(_SUFFIXES))}); name another folder")
        return [Utterance(str(p), p) for p in paths]
    if not path.exists():
        raise FileNotFoundError(f"{path}: there is no such file or folder; correct the path")
    if path.suffix.lower() in _MANIFESTS:
        return [line.utterance for line in read_manifest(path, spoken=False)]
    return [Utterance(str(path), path)]
