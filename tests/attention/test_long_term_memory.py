"""Which positions of a call attend to the same signal, and whose parameters the memory uses."""

import copy

import pytest
import torch

from lit_effattn.attention import InfiniteAttention
from lit_effattn.attention.long_term_memory import groups_of

OPTIONS = {"mem_len": 4, "segment_len": 4, "n_basis": 6, "widths": (0.2,), "n_samples": 5, "gate": True}


@pytest.mark.parametrize("delay", [0, 3])
@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("n", [1, 4, 9])
def test_groups_are_those_of_one_position_after_the_other(n: int, size: int, delay: int):
    """A segment is written before each position that is `delay` and a multiple of `size` after the stream's start."""
    length = torch.tensor([0, 1, 2, 3, 7, 12, 20])
    seen = (torch.arange(len(length)) * 2).clamp(max=n)
    groups = groups_of(length, seen, n=n, size=size, delay=delay)
    room = groups.positions.size(2)
    for row, start in enumerate(length.tolist()):
        written = sum(1 for t in range(1, start) if t - delay > 0 and (t - delay) % size == 0)
        assert groups.written[row].item() == written
        expected, group = {}, 0
        for i in range(int(seen[row])):
            if start + i - delay > 0 and (start + i - delay) % size == 0:
                group += 1
                written += 1
            if written:
                expected.setdefault(group, []).append(i)
        found = {g: groups.positions[row, g][groups.attends[row, g]].tolist() for g in range(groups.positions.size(1))}
        assert {g: positions for g, positions in found.items() if positions} == expected
        for g, positions in expected.items():
            for i in positions:
                place = int(groups.place[row, i])
                assert place // room == g
                assert groups.positions[row].flatten()[place] == i


def test_the_parameters_are_those_of_the_attention():
    """In a copy too, and after parameters were assigned."""
    attention = InfiniteAttention(8, 2, **OPTIONS)
    twin = copy.deepcopy(attention)
    assert twin.long_term.k_proj is twin.ltm_k_proj is not attention.ltm_k_proj
    other = InfiniteAttention(8, 2, **OPTIONS)
    twin.load_state_dict(other.state_dict(), assign=True)
    x = torch.randn(2, 11, 8)
    assert torch.equal(twin(x)[0], other(x)[0])
    assert not torch.equal(twin(x)[0], attention(x)[0])


def test_checkpoints_keep_their_names():
    names = list(InfiniteAttention(8, 2, **OPTIONS).state_dict())
    long_term = [f"ltm_{part}_proj.weight" for part in ("q", "k", "v", "out")]
    assert names[-8:] == [*long_term, "ltm_density.weight", "ltm_density.bias", "gate.weight", "gate.bias"]
