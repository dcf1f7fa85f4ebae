import json

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks.decoding import CROSS, LINEAR, PERFORMER, PLAIN, SOFTMAX, Decoder, build, n_shapes, random_source
from benchmarks.models import Size

CPU = torch.device("cpu")
SIZE = "--n_layers 2 --n_heads 2 --d_model 8"
TINY = f"decoding --lengths 6 9 --most 6 {SIZE} --tokens 2 --repeats 2 --batch_size 3 --beam 4"
SOURCE = {SOFTMAX: lambda s: 2 * 2 * s * 4, LINEAR: lambda s: 2 * (4 * 4 + 4)}
"""Numbers in a layer's state of a source of s tokens: keys and values, or S and z, of 2 heads of 4 dimensions."""


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """The table: (source's length, kind) to the row."""
    folder = tmp_path_factory.mktemp("decoding")
    command.main([*TINY.split(), "--device", "cpu", "--output", str(folder)])
    assert (folder / "decoding.png").is_file()
    report = json.loads((folder / "decoding.json").read_text(encoding="utf-8"))
    assert report["notes"][-1].count("softmax 100, linear 1, Performer 1") == 1
    return {(row["source"], row["cross-attention"]): row for row in report["rows"]}


def test_each_kind_is_measured_where_it_can_be(rows):
    assert list(rows) == [*((6, kind) for kind in CROSS), *((9, kind) for kind in CROSS if kind != PLAIN)]
    for row in rows.values():
        times = [row[f"{name}ms/token"]["samples"] for name in ("", "beam of 4, ")]
        assert all(len(samples) == 2 and min(samples) > 0 for samples in [*times, row["remember, s"]["samples"]])


@pytest.mark.parametrize("kind", SOURCE)
def test_bytes_of_a_source_are_those_of_the_definition(kind, rows):
    for length in (6, 9):
        # 2 layers of float32 numbers; the length, 8 bytes, and whether there is a source, 1 byte
        assert rows[length, kind]["source's state, bytes"] == 2 * (4 * SOURCE[kind](length) + 9)


def test_beam_search_copies_no_source(rows):
    for (length, kind), row in rows.items():
        target = row["target's state, bytes"]
        hypotheses = 3 * 4  # of 3 sentences
        assert row["reorder copies, bytes/token"] == hypotheses * target
        assert row["select would copy"] == hypotheses * (target + row["source's state, bytes"])
        if kind in (LINEAR, PERFORMER):
            assert row["source's state, bytes"] == rows[6, kind]["source's state, bytes"]
            assert target == rows[length, SOFTMAX]["target's state, bytes"]


@pytest.mark.parametrize("kind", CROSS)
def test_a_token_is_one_step_of_the_decoder(kind, monkeypatch):
    """By a clock that counts the decoder's calls."""
    decoder, rows = Decoder(build(kind, Size(1, 2, 8), CPU), beam=2, tokens=3), []
    forward = decoder.model.backbone.forward
    monkeypatch.setattr(decoder.model.backbone, "forward", lambda *args: rows.append(len(args[0])) or forward(*args))
    monkeypatch.setattr("benchmarks.generation.now", lambda device: float(len(rows)))
    source = random_source(1, 5, CPU)
    with torch.no_grad():
        state = decoder.model.remember(source, max_len=6)
        assert decoder._timed(lambda watch: decoder._generate(source, state, watch)) == 1
        assert rows[-3:] == [1] * 3
        assert decoder._timed(lambda watch: decoder._search(source, state, watch)) == 1
        assert rows[-3:] == [2] * 3


def test_states_of_sums_have_one_shape():
    assert [n_shapes(build(kind, Size(1, 2, 8), CPU)) for kind in (SOFTMAX, LINEAR)] == [100, 1]
