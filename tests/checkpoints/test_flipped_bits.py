"""One flipped bit of a checkpoint, in every region of its file: noticed, or the same content is read."""

import random
import struct
import zipfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_effattn.checkpoints.files import DamagedError, read, write
from tests.faults.comparison import first_difference

REGIONS = (
    "local headers",
    "padding",
    "data",
    "directory",
    "zip64 end record",
    "zip64 locator",
    "end record",
    "checksum",
)


def content() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    weights = {f"layers.{i}.weight": torch.randn(7, 5 + i, generator=generator) for i in range(12)}
    states = {i: {"step": torch.tensor(3.0), "exp_avg": t + 1} for i, t in enumerate(weights.values())}
    return {"state_dict": weights, "optimizer_states": [{"state": states}], "global_step": 12, "name": "é🙂"}


def spans(file: Path) -> dict[str, list[tuple[int, int]]]:
    """Return where each region's bytes are, from the format's definition."""
    data = file.read_bytes()
    result: dict[str, list[tuple[int, int]]] = {name: [] for name in REGIONS}
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            n_name, n_extra = struct.unpack_from("<HH", data, entry.header_offset + 26)
            extra = entry.header_offset + 30 + n_name
            result["local headers"].append((entry.header_offset, extra))
            result["padding"].append((extra, extra + n_extra))
            result["data"].append((extra + n_extra, extra + n_extra + entry.file_size))
        directory = archive.start_dir
    ends = [directory, *(data.rindex(magic) for magic in (b"PK\6\6", b"PK\6\7", b"PK\5\6"))]
    ends += [ends[-1] + 22, len(data)]
    result |= {name: [span] for name, span in zip(REGIONS[3:], pairwise(ends), strict=True)}
    return result


def unnoticed(file: Path, region: str, n: int) -> Iterator[str | None]:
    """Flip `n` bits of a region, or all if it has fewer; yield of each that is not noticed what is read otherwise."""
    bits = [(byte, bit) for span in spans(file)[region] for byte in range(*span) for bit in range(8)]
    data = file.read_bytes()
    for byte, bit in bits if len(bits) <= n else random.Random(0).sample(bits, n):
        flipped = bytearray(data)
        flipped[byte] ^= 1 << bit
        file.write_bytes(flipped)
        try:
            yield first_difference(content(), read(file), f"byte {byte}, bit {bit}")
        except DamagedError:
            continue


@pytest.mark.parametrize("n", [60, pytest.param(2000, marks=pytest.mark.exhaustive)])
def test_with_a_checksum_each_is_noticed(n: int, tmp_path: Path):
    for region in REGIONS:
        write(content(), tmp_path / "last.ckpt")
        assert list(unnoticed(tmp_path / "last.ckpt", region, n)) == []


@pytest.mark.parametrize("n", [60, pytest.param(4000, marks=pytest.mark.exhaustive)])
def test_in_a_file_of_torch_itself_each_is_noticed_or_harmless(n: int, tmp_path: Path):
    for region in REGIONS[:-1]:
        torch.save(content(), tmp_path / "last.ckpt")
        harmless = list(unnoticed(tmp_path / "last.ckpt", region, n))
        assert set(harmless) <= {None}
        assert len(harmless) < n or region in ("padding", "end record")


def test_an_entry_that_the_directory_calls_a_folder(tmp_path: Path):
    """For such an entry torch returns memory that was never written."""
    file = tmp_path / "last.ckpt"
    torch.save(content(), file)
    with zipfile.ZipFile(file) as archive:
        places = [archive.start_dir]
        for entry in archive.infolist():
            places.append(places[-1] + 46 + len(entry.filename) + len(entry.extra))
    data = file.read_bytes()
    for place in places[:-1]:
        assert data[place : place + 4] == b"PK\1\2"
        flipped = bytearray(data)
        flipped[place + 38] ^= 0x10
        file.write_bytes(flipped)
        with pytest.raises(DamagedError, match=r"does not describe .* as a file"):
            read(file)


def test_a_file_whose_end_is_missing(tmp_path: Path):
    for kept in [-1, -27, -28, -49, -50]:
        file = tmp_path / "last.ckpt"
        write(content(), file)
        file.write_bytes(file.read_bytes()[:kept])
        with pytest.raises(DamagedError):
            read(file)


def test_torch_reads_a_file_with_a_checksum(tmp_path: Path):
    write(content(), tmp_path / "last.ckpt")
    for mmap in False, True:
        loaded = torch.load(tmp_path / "last.ckpt", weights_only=True, mmap=mmap)
        assert first_difference(content(), loaded) is None
