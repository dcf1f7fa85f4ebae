import re
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from lit_effattn import sequence
from lit_effattn.attention import LinearAttention, SoftmaxAttention
from lit_effattn.sequence import SequenceModule, Source


class Inner(NamedTuple):
    loss: Tensor
    memory: Tensor


class Outer(NamedTuple):
    length: Tensor
    layers: tuple


def state(batch: int = 3) -> Outer:
    t = torch.arange(batch * 2.0).view(batch, 2)
    return Outer(torch.arange(batch), (Inner(t[:, 0].clone(), t + 10), None, (t + 20,)))


class Running(SequenceModule):
    """y_i = Σ_{j ≤ i} x_j: the least that keeps the contract, without padding."""

    def __init__(self, width: int, causal: bool = True):
        super().__init__()
        self.d_input = self.d_model = width
        self.causal = causal
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x, state=None, lengths=None):
        self.check(x, state, lengths)
        y = self.scale * x.cumsum(1) + (0 if state is None else state[:, None])
        return y, y[:, -1]

    def empty_state(self, batch_size, max_len, device, dtype):
        return torch.zeros(batch_size, self.d_model, device=device, dtype=dtype)


# ------------------------------------------------------------------------------------------------ the state as a tree


def test_map_tensors_keeps_the_tree():
    mapped = sequence.map_tensors(lambda t: t + 1, state())
    assert isinstance(mapped, Outer)
    assert isinstance(mapped.layers[0], Inner)
    assert mapped.layers[1] is None
    assert type(mapped.layers[2]) is tuple
    for a, b in zip(sequence.tensors(mapped), sequence.tensors(state()), strict=True):
        assert torch.equal(a, b + 1)
    assert sequence.map_tensors(lambda t: t, None) is None


def test_map_tensors_refuses_other_containers():
    for bad in ([torch.zeros(1)], {"a": torch.zeros(1)}, 3):
        with pytest.raises(TypeError, match=type(bad).__name__):
            sequence.map_tensors(lambda t: t, (bad,))


def test_tensors_lists_all():
    assert [tuple(t.shape) for t in sequence.tensors(state())] == [(3,), (3,), (3, 2), (3, 2)]
    assert list(sequence.tensors(None)) == []


def test_detach_cuts_the_graph_and_shares_memory():
    t = torch.ones(2, requires_grad=True)
    cut = sequence.detach((t * 2, (t,)))
    assert not any(s.requires_grad for s in sequence.tensors(cut))
    assert cut[1][0].data_ptr() == t.data_ptr()


def test_to_moves():
    assert all(t.device.type == "meta" for t in sequence.tensors(sequence.to(state(), "meta")))


def test_select_names_rows_in_any_order():
    chosen = sequence.select(state(), torch.tensor([2, 0, 2, 1]))
    assert chosen.length.tolist() == [2, 0, 2, 1]
    assert chosen.layers[0].memory[:, 0].tolist() == [14, 10, 14, 12]
    assert chosen.layers[1] is None


def test_reorder_copies_all_but_a_source():
    source = Source(torch.arange(6.0).view(3, 2), torch.ones(3, dtype=torch.long), torch.ones(3, dtype=torch.bool))
    before = state()._replace(layers=((torch.arange(3), source), None, *state().layers))
    after = sequence.reorder(before, torch.tensor([2, 2, 0]))
    assert after.layers[0][1] is source
    assert after.layers[0][0].tolist() == [2, 2, 0]
    assert after.layers[1] is None
    expected = sequence.select(state(), torch.tensor([2, 2, 0]))
    rest = after._replace(layers=after.layers[2:])
    assert type(rest) is Outer
    assert type(rest.layers[0]) is Inner
    for a, b in zip(sequence.tensors(rest), sequence.tensors(expected), strict=True):
        assert torch.equal(a, b)


def test_nbytes_counts():
    assert sequence.nbytes(state()) == 3 * 8 + 3 * 4 + 3 * 2 * 4 + 3 * 2 * 4
    assert sequence.nbytes((torch.zeros(5, dtype=torch.float16), None)) == 10
    assert sequence.nbytes(None) == 0


def test_losses_are_found_and_summed():
    inner = Inner(torch.tensor([1.0, 2.0]), torch.zeros(2))
    found = sequence.losses(Outer(torch.zeros(2), (inner, None, (inner._replace(loss=torch.tensor([10.0, 20.0])),))))
    assert found.tolist() == [11, 22]
    assert sequence.losses(Outer(torch.zeros(2), ())) is None
    assert sequence.losses(None) is None
    assert sequence.losses(torch.zeros(2)) is None


def test_losses_are_told_apart_by_the_state_that_has_them():
    class Other(NamedTuple):
        loss: torch.Tensor

    inner, other = Inner(torch.tensor([1.0, 2.0]), torch.zeros(2)), Other(torch.tensor([5.0, 6.0]))
    found = sequence.losses_by_kind(Outer(torch.zeros(2), ((inner, other), None, (inner,))))
    assert {kind: loss.tolist() for kind, loss in found.items()} == {"Inner": [2, 4], "Other": [5, 6]}
    assert sequence.losses_by_kind(torch.zeros(2)) == {}


def test_losses_keep_their_gradient():
    loss = torch.ones(2, requires_grad=True)
    sequence.losses((Inner(loss * 3, torch.zeros(2)),)).sum().backward()
    assert loss.grad.tolist() == [3, 3]


def test_pack_makes_plain_tuples_and_unpack_undoes_it():
    packed = sequence.pack(state())

    def plain(part):
        return part is None or type(part) is Tensor or (type(part) is tuple and all(map(plain, part)))

    assert plain(packed)
    back = sequence.unpack(packed, like=state(1))
    assert isinstance(back, Outer)
    assert isinstance(back.layers[0], Inner)
    assert back.layers[1] is None
    for a, b in zip(sequence.tensors(back), sequence.tensors(state()), strict=True):
        assert torch.equal(a, b)
    assert sequence.unpack(sequence.pack(None), like=None) is None
    assert sequence.unpack((torch.zeros(2), None), like=(torch.zeros(1), state(1)))[1] is None


def test_unpack_refuses_a_state_of_another_shape():
    with pytest.raises(ValueError, match="a state of 1 parts was expected, and a tuple of 2 parts was found"):
        sequence.unpack(sequence.pack(state()), like=(torch.zeros(1),))
    like = (torch.zeros(1, 2), torch.zeros(1, dtype=torch.long))
    for packed in (
        (None, like[1]),
        (-7.5, like[1]),
        (like[0], {}),
        like[::-1],
        (torch.zeros(2), like[1]),
        "ab",
        [like[0]],
    ):
        with pytest.raises(ValueError, match="was expected"):
            sequence.unpack(packed, like)


def test_reset_zeroes_rows_alone():
    before = torch.arange(6.0).view(3, 2) + 1
    after = Running(2).reset((before, None), torch.tensor([True, False, True]))
    assert after[0].tolist() == [[0, 0], [3, 4], [0, 0]]
    assert before[0].tolist() == [1, 2]


# ------------------------------------------------------------------------------------------------ giving states away


def test_donated_holds_inside_and_without_gradients_alone():
    assert not sequence.may_overwrite()
    with torch.no_grad():
        assert not sequence.may_overwrite()
    with sequence.donated():
        assert not sequence.may_overwrite()
        with torch.no_grad():
            assert sequence.may_overwrite()
            with sequence.donated():
                assert sequence.may_overwrite()
            assert sequence.may_overwrite()
        with torch.inference_mode():
            assert sequence.may_overwrite()
    with pytest.raises(KeyError), sequence.donated():
        raise KeyError
    with torch.no_grad():
        assert not sequence.may_overwrite()


# --------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    "module", [Running(4), LinearAttention(4, 2), SoftmaxAttention(4, 2)], ids=lambda m: type(m).__name__
)
def test_bad_arguments_are_named_with_their_value(module):
    for x, lengths, words in (
        (torch.zeros(2, 3), None, "(2, 3)"),
        (torch.zeros(2, 3, 5), None, "(2, 3, 5)"),
        (torch.zeros(2, 0, 4), None, "(2, 0, 4)"),
        (torch.zeros(0, 3, 4), None, "(0, 3, 4)"),
        *((torch.zeros(2, 3, 4), torch.ones(2, dtype=t), f"{t}") for t in (torch.float32, torch.uint8, torch.bool)),
        (torch.zeros(2, 3, 4), torch.tensor([1, 2, 3]), "(3,)"),
        (torch.zeros(2, 3, 4), torch.tensor([1, 4]), "[1, 4]"),
        (torch.zeros(2, 3, 4), torch.tensor([-1, 2]), "[-1, 2]"),
    ):
        what = "lengths" if lengths is not None else "x has shape"
        with pytest.raises(ValueError, match=f"{type(module).__name__}: {what}.*{re.escape(words)}"):
            module(x, None, lengths)


def test_a_state_needs_a_causal_module():
    module = Running(4, causal=False)
    with pytest.raises(ValueError, match="causal=False"):
        module(torch.zeros(2, 3, 4), module.initial_state(2))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("kind", [SoftmaxAttention, LinearAttention])
def test_lengths_may_be_int32_and_change_after_the_call(kind, dtype):
    module, lengths = kind(4, 2), torch.tensor([6, 2], dtype=dtype)
    x = torch.randn(2, 6, 4)
    z, after = module(x, None, torch.tensor([6, 2]))
    y, state = module(x, None, lengths)
    lengths += 1
    assert torch.equal(y, z)
    assert [t.dtype for t in sequence.tensors(state)] == [t.dtype for t in sequence.tensors(after)]
    assert torch.equal(module(x, state)[0], module(x, after)[0])


def test_defaults_are_the_parameters():
    module = Running(4).half()
    assert module.initial_state(2).dtype == torch.float16
    assert module.initial_state(2, dtype=torch.float64).dtype == torch.float64
    assert module.initial_state(2, device=torch.device("meta")).device.type == "meta"
    assert module.bounded_by is None


def test_valid_positions():
    assert sequence.valid_positions(torch.tensor([0, 2, 3]), 3).tolist() == [[0, 0, 0], [1, 1, 0], [1, 1, 1]]


def test_accumulator():
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert sequence.accumulator(dtype) == torch.float32
    assert sequence.accumulator(torch.float64) == torch.float64
