"""Recordings given by the user: files, folders and manifests."""

from pathlib import Path

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lit_effattn.datamodules.common.files import walk
from lit_effattn.datamodules.speech.corpora import read_manifest
from lit_effattn.datamodules.speech.utterances import Utterance

_SUFFIXES = (".aif", ".aiff", ".au", ".flac", ".mp3", ".nist", ".oga", ".ogg", ".opus", ".sph", ".wav", ".wv1", ".wv2")
_MANIFESTS = (".json", ".jsonl", ".json.gz", ".jsonl.gz")


def recordings(path: Path) -> list[Utterance]:
    """Return the recordings that `path` refers to.

    A file is one recording. A folder gives every file in it and its subfolders with a suffix of audio files, sorted by
    name; a message counts what is left out: see `walk`. A manifest gives the utterances of `read_manifest`, without
    the need for text or phonemes.

    Raises:
        FileNotFoundError: If `path` does not exist.
        ValueError: If the folder has no recordings, or lines of the manifest are invalid.
    """
    if path.is_dir():
        found = walk(path, _SUFFIXES)
        left_out = f"{path}: {len(found.faults)} left out:\n  {found.faults}" if found.left_out else ""
        if not found.files:
            message = f"{path}: has no recordings ({', '.join(_SUFFIXES)}); name another folder"
            raise ValueError(f"{message}\n{left_out}" if left_out else message)
        if left_out:
            rank_zero_info(left_out)
        return [Utterance(str(p), p) for p in found.files]
    if not path.exists():
        raise FileNotFoundError(f"{path}: there is no such file or folder; correct the path")
    if path.name.lower().endswith(_MANIFESTS):
        return [line.utterance for line in read_manifest(path, spoken=False)]
    return [Utterance(str(path), path)]
