import json

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks.memory import GROWING, KINDS, N_TOKENS, Stream, sliding, with_memory
from benchmarks.models import Size
from lit_effattn.sequence import nbytes, tensors

CPU = torch.device("cpu")
SIZE = Size(1, 2, 8)
TINY = "--segment_len 8 --mem_len 8 --d_model 8 --n_heads 2 --repeats 2 --device cpu"


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
    command.main(["memory", *TINY.split(), "--lengths", "8", "32", "64", "--most", "32", "--output", str(tmp_path)])
    rows = json.loads((tmp_path / "memory.json").read_text(encoding="utf-8"))["rows"]
    assert [row["attention"] for row in rows] == list(KINDS)
    for row in rows:
        grows = row["attention"] == GROWING
        assert (row["ms after 64"] is None) == (row["after 64 ÷ after 8"] is None) == grows
        assert len(row["after 32 ÷ after 8"]["samples"]) == 2
        assert (row["state after 8, bytes"] == row["state after 32, bytes"]) == (not grows)
    assert "not measured" in capsys.readouterr().out


def test_lengths_in_the_middle_of_a_segment_are_refused():
    with pytest.raises(ValueError, match=r"lengths=\[8, 12\] are not all multiples of segment_len=8"):
        command.main(["memory", *TINY.split(), "--lengths", "8", "12"])


@pytest.mark.parametrize("length", [2, 5, 9])
def test_both_see_equally_far(length):
    for reader in (with_memory(length, SIZE, 4, 1, CPU), sliding(length, SIZE, 2, CPU)):
        model = reader.model
        x = model.embedding(torch.randint(N_TOKENS, (1, 16))).detach().requires_grad_()
        y, _ = model.active_backbone(x, reader.memory)
        y[0, -1, 0].backward()
        seen = x.grad.abs().sum(2)[0]  # (1, 16, E) -> (16,)
        assert (seen[-length:] > 0).all()
        assert (seen[:-length] == 0).all()


def test_memory_is_full_before_the_clock_starts_and_every_call_reads_on():
    for reader, full, n_scored in ((with_memory(9, SIZE, 4, 3, CPU), 9, 12), (sliding(9, SIZE, 2, CPU), 8, 2)):
        assert reader.n_scored == n_scored
        for length in (full, full + n_scored, full + 2 * n_scored):
            assert int(reader.memory.length) == length
            reader()


@torch.no_grad()
def test_sliding_reads_whole_windows():
    reader = sliding(6, SIZE, 2, CPU)
    model, (batch,) = reader.model, reader.batches
    x = torch.cat([reader.memory.inputs, model.embedding(batch.inputs)], 1)  # (1, 5 + 2, E)
    nll = model(batch, reader.memory)
    for i in range(2):
        hidden, _ = model.backbone(x[:, i : i + 6])
        torch.testing.assert_close(nll[:, i], model.head.nll(hidden[:, -1], batch.targets[:, i]))
