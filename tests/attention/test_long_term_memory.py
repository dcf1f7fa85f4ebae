"""Which positions of a call attend to the same signal, and whose parameters the memory uses."""

import copy
import gc
import itertools

import torch
from torch import Tensor, nn

from lit_effattn.attention import InfiniteAttention
from lit_effattn.attention.long_term_memory import groups_of
from lit_effattn.sequence import donated, map_tensors, tensors

OPTIONS = {"mem_len": 4, "segment_len": 4, "n_basis": 6, "widths": (0.2,), "n_samples": 5, "gate": True}


def test_groups_are_those_of_one_position_after_the_other():
    """A segment is written before each position that is `delay` and a multiple of `size` after the stream's start."""
    for delay, size, n in itertools.product([0, 3], [1, 3, 4], [1, 4, 9]):
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
            found = {
                g: groups.positions[row, g][groups.attends[row, g]].tolist() for g in range(groups.positions.size(1))
            }
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


class Step(nn.Module):
    """Reads a position in a donated state, whose tensors it overwrites, as compiled generation does."""

    def __init__(self, attention: InfiniteAttention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor, state: list[Tensor]) -> Tensor:
        values = iter(state)
        with donated():
            y, after = self.attention(x, map_tensors(lambda _: next(values), self.attention.initial_state(len(x))))
        for old, new in zip(state, tensors(after), strict=True):
            if new is not old:
                old.copy_(new)
        return y


@torch.no_grad()
def test_a_traced_step_writes_the_segments_that_are_due():
    """With rows at different positions, so that some of them are due; through several segments of each row."""
    options = {**OPTIONS, "sticky": True, "n_bins": 5, "sampling": "bins", "writes": "segment"}
    attention = InfiniteAttention(8, 2, **options).double().eval()
    x, lengths = torch.randn(3, 30, 8, dtype=torch.double), torch.tensor([1, 4, 6])
    expected = attention(x[:, :6], lengths=lengths)[1]
    found = [t.clone() for t in tensors(expected)]
    step = torch.export.export(Step(attention), (x[:, :1], found), strict=False).module()
    for position in x[:, 6:].split(1, 1):
        y, expected = attention(position, expected)
        assert torch.allclose(step(position, found), y, atol=1e-10)
        for a, b in zip(found, tensors(expected), strict=True):
            assert torch.allclose(a.double(), b.double(), atol=1e-10)
    assert expected.length.tolist() == [25, 28, 30]
    del step
    gc.collect()  # torch.export derives a class of the kind's name, which configurations would find
