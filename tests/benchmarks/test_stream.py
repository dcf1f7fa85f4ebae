import json

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks.stream import GROWING, KINDS, Stream
from lit_effattn.sequence import nbytes, tensors

SMALL = "--segment_len 8 --mem_len 8 --d_model 8 --n_heads 2 --repeats 2 --device cpu"


@pytest.mark.parametrize("kind", KINDS)
def test_states_are_those_after_so_many_tokens_and_stay_as_they_are(kind: str):
    stream = Stream(KINDS[kind](8, 2, 8), 8)
    stream.read([8, 32, 64])
    before = {n: [t.clone() for t in tensors(state)] for n, state in stream.states.items()}
    for n, state in stream.states.items():
        if hasattr(state, "length"):
            assert state.length.tolist() == [n]
        stream.segment(n)
    for n, state in stream.states.items():
        assert all(torch.equal(a, b) for a, b in zip(tensors(state), before[n], strict=True))
    sizes = [nbytes(state) for state in stream.states.values()]
    assert (sizes[0] == sizes[1] == sizes[2]) == (kind != GROWING)


def test_table(tmp_path, capsys):
    command.main(["stream", *SMALL.split(), "--lengths", "8", "32", "64", "--most", "32", "--output", str(tmp_path)])
    rows = json.loads((tmp_path / "stream.json").read_text(encoding="utf-8"))["rows"]
    assert [row["attention"] for row in rows] == list(KINDS)
    for row in rows:
        grows = row["attention"] == GROWING
        assert (row["ms after 64"] is None) == (row["after 64 ÷ after 8"] is None) == grows
        assert len(row["after 32 ÷ after 8"]["samples"]) == 2
        assert (row["state after 8, bytes"] == row["state after 32, bytes"]) == (not grows)
    assert "not measured" in capsys.readouterr().out
    assert (tmp_path / "stream.png").stat().st_size > 10_000


def test_lengths_in_the_middle_of_a_segment_are_refused():
    with pytest.raises(ValueError, match=r"lengths=\[8, 12\] are not all multiples of segment_len=8"):
        command.main(["stream", *SMALL.split(), "--lengths", "8", "12"])
