"""Tokenization of a text larger than memory into a prepared folder, in parallel and resumable."""

import hashlib
import json
import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lit_effattn.checks import at_least
from lit_effattn.datamodules.common.faults import Faults
from lit_effattn.datamodules.common.files import not_empty, open_utf8, regular, walk_splits
from lit_effattn.datamodules.common.json_data import parse_json
from lit_effattn.datamodules.common.store import write_text
from lit_effattn.datamodules.text.records import SUFFIXES as RECORDS
from lit_effattn.datamodules.text.records import divisible, is_records, records
from lit_effattn.datamodules.text.sources import Document
from lit_effattn.datamodules.text.text_stream import check_tokenizer_of, saved_tokenizer
from lit_effattn.datamodules.text.token_store import FORMAT, PLAN, TOKENIZER, ShardWriter, shard_name, write_manifest
from lit_effattn.datamodules.text.tokenization import decoded, encoded, progress
from lit_effattn.datamodules.text.tokenizers import KINDS, Tokenizer, check_vocabulary

SUFFIXES = (".txt", ".txt.gz", *RECORDS)  # endings of the files that are read

_BLOCK = 1 << 20  # bytes read at a time
_LEAST_HELD_OUT = 3  # one document each for training, validation and test


class Part(NamedTuple):
    """A part of an input file: the lines that begin from `start` to before `stop`, or a whole file.

    `name` is relative to the input folder.
    """

    name: str
    start: int
    stop: int


class _Work(NamedTuple):
    """A shard that a worker process makes."""

    root: Path
    folder: Path
    field: str
    number: int
    parts: list[Part]


def prepare(
    source: Path,
    folder: Path,
    *,
    tokens: str | None = None,
    vocab_size: int | None = None,
    tokenizer_of: str | Path | None = None,
    field: str = "text",
    held_out: int | None = None,
    shard_bytes: int = 256_000_000,
    learn_bytes: int = 100_000_000,
    workers: int = 1,
) -> tuple[dict[str, Any], Faults]:
    """Tokenize text files into a folder for `TextStream(source="prepared")`.

    The input is divided into shards, which `workers` processes make one by one. The same call resumes an interrupted
    one, and repeats unfinished shards only. The files do not depend on the number of workers, nor on interruptions.

    Args:
        source: A file, or a folder with its subfolders, of which train, val and test are the splits. Each .txt is a
            document, and so is each line of a .jsonl, an object with the text in `field`, and each record of a FASTA
            file (.fasta, .fas, .fa, .faa, .fna, .ffn, .frn). All may be compressed (.gz), or begin with a byte-order
            mark of UTF-8.
        folder: The folder to make.
        tokens: As for `TextStream`. Default: bytes. Characters, words and bpe are learnt from the beginnings of all
            shards; if there are splits, of those of train.
        vocab_size: As for `TextStream`.
        tokenizer_of: As for `TextStream`, in place of `tokens` and `vocab_size`.
        field: Name of the text in a .jsonl.
        held_out: Of so many documents one is for validation and one for test. Default: 200; none if subfolders are the
            splits.
        shard_bytes: Bytes of input for a shard. Files are not divided, except a .jsonl or FASTA that is not compressed.
        learn_bytes: Bytes of text to learn a vocabulary from.
        workers: Number of processes; 1: this one.

    Returns:
        The content of manifest.json, and the files that are left out.

    Raises:
        FileNotFoundError: If there is no input.
        ValueError: If an argument is out of its range, an input is invalid, or the folder was made with other settings
            or other input.
        ChildProcessError: If a worker process was killed.
    """
    at_least(1, shard_bytes=shard_bytes, learn_bytes=learn_bytes, workers=workers)
    if held_out is not None:
        at_least(_LEAST_HELD_OUT, held_out=held_out)
    check_tokenizer_of(tokenizer_of, tokens, vocab_size)
    tokens = tokens or "bytes"
    check_vocabulary(vocab_size, tokens=tokens)
    given = None if tokenizer_of is None else saved_tokenizer(tokenizer_of)
    root = source if source.is_dir() else source.parent
    names, left_out = _inputs(source)
    if "train" in names and held_out is not None:
        raise ValueError(f"held_out={held_out}: {source} has a subfolder for each split; leave it out")
    held_out_of = None if "train" in names else held_out or 200
    plan: dict[str, Any] = {
        "format": FORMAT,
        "settings": {
            "tokens": tokens if given is None else given.kind,
            "vocab_size": vocab_size,
            "tokenizer_of": None if given is None else hashlib.sha256(given.to_json().encode()).hexdigest(),
            **{"field": field, "held_out": held_out_of, "shard_bytes": shard_bytes, "learn_bytes": learn_bytes},
        },
        "files": {
            name: [(root / name).stat().st_size, (root / name).stat().st_mtime_ns]
            for of_split in names.values()
            for name in of_split
        },
    }
    sizes = {split: {name: plan["files"][name][0] for name in of_split} for split, of_split in names.items()}
    divided = {name for name in plan["files"] if divisible(root / name)}
    of_shards = [(split, parts) for split in names for parts in _shards(sizes[split], divided, shard_bytes)]
    splits = None if held_out_of else [split for split, _ in of_shards]
    from filelock import FileLock, Timeout

    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / ".lock", timeout=0):
            _start_or_resume(folder, plan)
            work = [_Work(root, folder, field, number, parts) for number, (_, parts) in enumerate(of_shards)]
            if not (folder / TOKENIZER).is_file():
                learnt_from = [work[number] for number, (split, _) in enumerate(of_shards) if split in ("", "train")]
                tokenizer = given or KINDS[tokens].learn(_sample(learnt_from, KINDS[tokens], learn_bytes), vocab_size)
                write_text(folder / TOKENIZER, tokenizer.to_json())
            _make_all(work, workers)
            settings = {**plan["settings"], "splits": splits}
            return write_manifest(folder, _tokenizer(folder), settings, len(of_shards)), left_out
    except Timeout as error:
        raise ValueError(f"{folder} is being prepared by another process; wait, or use another folder") from error


def _inputs(source: Path) -> tuple[dict[str, list[str]], Faults]:
    """Return by split the names of the files to read, relative to their folder, and what is left out.

    Without subfolders train, val and test, the names are under the key "".
    """
    if source.is_file():
        named = [source] if source.name.lower().endswith(SUFFIXES) else []
        source, paths, faults = source.parent, {"": named}, Faults()
    else:
        paths, faults = walk_splits(source, SUFFIXES)
    paths = not_empty(paths, faults)
    for split, of_split in paths.items():
        if not of_split:
            raise FileNotFoundError(
                f"{source / split}: there is no file with text in it that ends in {', '.join(SUFFIXES)}{faults.counts}"
            )
    return {split: [p.relative_to(source).as_posix() for p in of_split] for split, of_split in paths.items()}, faults


def _shards(sizes: dict[str, int], divided: set[str], shard_bytes: int) -> list[list[Part]]:
    """Divide the files into shards of about `shard_bytes`; several small files share one."""
    shards: list[list[Part]] = []
    filled = math.inf
    for name, size in sizes.items():
        step = shard_bytes if name in divided else size
        for start in range(0, size, step):
            part = Part(name, start, min(start + step, size))
            if filled + part.stop - part.start > shard_bytes:
                shards.append([])
                filled = 0
            shards[-1].append(part)
            filled += part.stop - part.start
    return shards


def _start_or_resume(folder: Path, plan: dict[str, Any]) -> None:
    if not (folder / PLAN).is_file():
        if any(path.name not in (".lock", "plan.unfinished") for path in folder.iterdir()):
            raise ValueError(f"{folder} has other files in it; use a new folder, or an empty one")
        write_text(folder / PLAN, json.dumps(plan))
        return
    earlier = parse_json(regular(folder / PLAN).read_text(encoding="utf-8"))
    for was, now in ((earlier, plan), (earlier["settings"], plan["settings"])):
        for name, value in now.items():
            if not isinstance(value, dict) and was[name] != value:
                raise ValueError(
                    f"{folder} was made with {name}={was[name]!r}, not {value!r}; use that value, or another folder"
                )
    files, now = earlier["files"], plan["files"]
    if changed := sorted(name for name in {*files, *now} if files.get(name) != now.get(name)):
        raise ValueError(
            f"{folder} was made with other input: {changed[0]} was added, removed or changed; restore it, or use "
            "another folder"
        )


def _sample(work: list[_Work], kind: type[Tokenizer], n_bytes: int) -> Iterator[str]:
    """Yield the texts to learn a vocabulary from: the beginning of every shard, equally much of each."""
    with progress("Reading the vocabulary", n_bytes) as advance:
        for shard in work:
            remaining, documents = n_bytes // len(work), _documents(shard, hashlib.sha256())
            for text in (text for document in documents for text in decoded(document, kind, advance)):
                yield text
                remaining -= len(text.encode())
                if remaining <= 0:
                    break


def _make_all(work: list[_Work], workers: int) -> None:
    sizes = [sum(part.stop - part.start for part in shard.parts) for shard in work]
    with progress("Tokenizing", sum(sizes)) as advance:
        unfinished = []
        for shard in work:
            if (shard.folder / f"{shard_name(shard.number)}.json").is_file():
                advance(sizes[shard.number])
            else:
                unfinished.append(shard)
        if workers == 1:
            for shard in unfinished:
                advance(sizes[_make(shard)])
            return
        # Not forked: the tokenizers' threads do not survive that.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(workers, len(unfinished) or 1), context, _start_worker) as pool:
            try:
                for done in as_completed([pool.submit(_make, shard) for shard in unfinished]):
                    advance(sizes[done.result()])
            except BrokenProcessPool as error:
                raise ChildProcessError(
                    f"a worker process was killed, often for lack of memory; resume with the same command and "
                    f"fewer than workers={workers}"
                ) from error
            finally:
                pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the other workers use the other cores
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C lets a worker finish its shard
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process when its parent is killed. The pool's workers would wait forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _make(work: _Work) -> int:
    """Make a shard, and return its number. Its .json is written last."""
    tokenizer = _tokenizer(work.folder)
    digest = hashlib.sha256()
    shard = ShardWriter(work.folder, work.number, tokenizer)
    for document in _documents(work, digest):
        shard.add(encoded(document, tokenizer), document.title)
    shard.close(input_sha256=digest.hexdigest())
    return work.number


def _tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_spec((folder / TOKENIZER).read_text(encoding="utf-8"))


def _documents(work: _Work, digest: Any) -> Iterator[Document]:
    """Yield a shard's documents, and update `digest`, a hash, with the input that is read."""
    for part in work.parts:
        path = work.root / part.name
        if not is_records(part.name):
            yield Document(str(path), 0, partial(_blocks, path, digest))
            continue
        stop = part.stop if divisible(path) else math.inf
        for offset, title, text in records(path, work.field, part.start, stop, digest.update):
            yield Document(f"{path}[{offset}]", 0, partial(iter, (text,)), title)


def _blocks(path: Path, digest: Any) -> Iterator[bytes]:
    with open_utf8(path) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            yield block
