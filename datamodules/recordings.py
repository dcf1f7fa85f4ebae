"""Recordings that a person names: files, folders of them, and manifests."""

import json
from pathlib import Path

from datamodules.utterances import Utterance

_SUFFIXES = {".aif", ".aiff", ".au", ".flac", ".mp3", ".nist", ".oga", ".ogg", ".opus", ".sph", ".wav", ".wv1", ".wv2"}
_MANIFESTS = {".json", ".jsonl"}


def recordings(path: Path) -> list[Utterance]:
    """The recordings that ``path`` names, without what is said in them.

    A file is one; of a folder, every file in it and its subfolders that ends like a recording, sorted by name; of a
    JSON-lines manifest, each line: ``audio_filepath`` (relative to the manifest), and optionally ``offset`` and
    ``duration`` in seconds, ``speaker`` and ``id`` (default: the file's path, and the offset, if there is one).

    Raises:
        ValueError: If there is no such file, nothing in the folder, or a line of the manifest that says nothing.
    """
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.suffix.lower() in _SUFFIXES and p.is_file())
        if not found:
            raise ValueError(f"audio: {path} has no recordings ({', '.join(sorted(_SUFFIXES))}); name another folder")
        return [Utterance(str(p), p) for p in found]
    if not path.exists():
        raise ValueError(f"audio: {path}: there is no such file or folder; correct the path")
    if path.suffix.lower() not in _MANIFESTS:
        return [Utterance(str(path), path)]
    lines = path.read_text(encoding="utf-8").splitlines()
    return [_of_line(line, f"{path}, line {i}", path.parent) for i, line in enumerate(lines, 1) if line.strip()]


def _of_line(line: str, where: str, folder: Path) -> Utterance:
    try:
        said = json.loads(line)
        audio = folder / said["audio_filepath"]
        start = float(said.get("offset") or 0.0)
        duration = said.get("duration")
        return Utterance(
            str(said.get("id") or (f"{audio}:{start:g}" if start else audio)),
            audio,
            speaker=said.get("speaker"),
            start=start,
            duration=None if duration is None else float(duration),
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f'audio: {where} is not like {{"audio_filepath": "a.wav", "offset": 0.0, "duration": 1.5}} '
            f"({type(error).__name__}: {error}); correct it"
        ) from error
