"""Sequences in parts on three processes: outputs, states and gradients are those of one process."""

from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lit_effattn import Transformer, sequence
from lit_effattn.attention import (
    LinearAttention,
    LinearCrossAttention,
    LSHAttention,
    PerformerAttention,
    ReluFeatureMap,
    ShawAttention,
    SoftmaxAttention,
    SparseAttention,
    TransformerXLAttention,
    WindowedLinearAttention,
)
from lit_effattn.attention.kv_cache import Cache
from lit_effattn.attention.positions import SinusoidalPositions
from lit_effattn.distributed.sequence_parallel import Parts, _as_numbers, _unflattened, sequence_parallel
from lit_effattn.nn.lstm import LSTM
from lit_effattn.settings.kinds import attention_kinds
from tests.support.processes import in_processes

E, H, B, P = 8, 2, 3, 3
LINEAR, PERFORMER = partial(LinearAttention, chunk_size=4), partial(PerformerAttention, n_features=16, chunk_size=4)
WINDOW, WINDOWED = partial(SoftmaxAttention, window=6, n_kv_heads=1), partial(WindowedLinearAttention, window=4)
XL = partial(TransformerXLAttention, mem_len=7, same_length=True)
STACKS: dict[str, dict[str, Any]] = {
    "linear, rotary": {"attention": LINEAR, "positions": "auto"},
    "linear, checkpointed": {"attention": LINEAR, "positions": SinusoidalPositions, "gradient_checkpointing": True},
    "relu features": {"attention": partial(LINEAR, feature_map=ReluFeatureMap), "positions": None},
    "Performer, rotary": {"attention": PERFORMER, "positions": "auto"},
    "hyperbolic": {"attention": partial(PERFORMER, features="hyperbolic"), "positions": SinusoidalPositions},
    "with eps": {"attention": partial(PERFORMER, eps=1e-3), "positions": "auto"},
    "window, rotary": {"attention": WINDOW, "positions": "auto"},
    "softmax, rotary": {"attention": partial(SoftmaxAttention, n_kv_heads=1), "positions": "auto"},
    "softmax, checkpointed": {"attention": SoftmaxAttention, "positions": None, "gradient_checkpointing": True},
    "relative": {"attention": ShawAttention, "positions": None},
    "window of 1": {"attention": partial(SoftmaxAttention, window=1), "positions": "auto"},
    "relative, window": {"attention": partial(ShawAttention, window=5), "positions": None},
    "Transformer-XL": {"attention": XL, "positions": None, "norm_memory": True},
    "windowed linear": {"attention": WINDOWED, "positions": "auto"},
    "not in log space": {"attention": partial(PERFORMER, features="relu"), "positions": None},
}
SEGMENTS = [  # lengths (P, B) of each part in each row: uneven, and not there at all
    torch.tensor([[5, 0, 7], [6, 2, 0], [9, 4, 1]]),
    torch.tensor([[3, 3, 0], [0, 5, 0], [2, 0, 8]]),
]


def model(name: str) -> Transformer:
    torch.manual_seed(0)
    return Transformer(E, H, 2, init="pytorch", **STACKS[name]).double()


def numbers(segment: int) -> Tensor:
    """The inputs of a segment, for one process: (B, N, E), each row's valid positions first."""
    n = int(SEGMENTS[segment].sum(0).max())
    return torch.randn(B, n, E, dtype=torch.float64, generator=torch.Generator().manual_seed(segment))


def part_of(x: Tensor, lengths: Tensor, rank: int) -> Tensor:
    """Each row's positions of a part, and NaN on the right: (B, N, E) -> (B, N_p, E)."""
    part = torch.full((B, int(lengths[rank].max()), E), torch.nan, dtype=x.dtype)
    for row, (start, n) in enumerate(zip(lengths[:rank].sum(0).tolist(), lengths[rank].tolist(), strict=True)):
        part[row, :n] = x[row, start : start + n]
    return part


def train(module: Transformer, rank: int | None) -> dict[str, Any]:
    """Two segments with a carried memory: outputs, the last state, and gradients; of one process with None."""
    outputs, state = [], None
    for i, lengths in enumerate(SEGMENTS):
        x, seen = numbers(i), lengths.sum(0)
        if rank is not None:
            x, seen = part_of(x, lengths, rank), lengths[rank]
        y, state = module(x, sequence.detach(state), seen)
        outputs.append(y)
    sum(y.sin().sum() for y in outputs).backward()
    return {"outputs": outputs, "state": sequence.pack(sequence.detach(trimmed(state))), "grads": grads(module)}


def trimmed(state: Any) -> Any:
    """Without the slots that no row has filled, whose number depends on how the sequence was cut."""
    if isinstance(state, Cache):
        most = min(int(state.length.max()), state.keys.size(2))
        there = sequence.valid_positions(state.length, most)[:, None, :, None]
        keys, values = (t[:, :, :most].masked_fill(~there, 0) for t in (state.keys, state.values))
        return Cache(keys, values, state.length)
    return state._replace(layers=tuple(map(trimmed, state.layers))) if hasattr(state, "layers") else state


def grads(module: Transformer) -> list[Tensor]:
    return [p.grad for p in module.parameters()]


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=P)
    found: dict[str, Any] = {}
    for name in STACKS:
        module = model(name)
        with sequence_parallel():
            found[name] = train(module, rank)
        for grad in found[name]["grads"]:
            dist.all_reduce(grad)
    sent = []
    for n in (4, 64):
        with sequence_parallel() as parts, torch.no_grad():
            model("Performer, rotary")(torch.randn(B, n, E, dtype=torch.float64))
        sent.append((parts.n_messages, parts.n_bytes))
    torch.save({**found, "sent": sent}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def assert_close(name: str, found: Any, expected: Any, **tolerance: float) -> None:
    torch.testing.assert_close(found, expected, **tolerance, msg=lambda message: f"{name}: {message}")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process found."""
    folder: Path = tmp_path_factory.mktemp("parts")
    in_processes(work, str(folder), n=P)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(P)]


def test_parts_are_the_whole(found: list[dict[str, Any]]):
    wholes = {name: train(model(name), None) for name in STACKS}
    for (name, whole), rank in product(wholes.items(), range(P)):
        of_rank = found[rank][name]
        for i, lengths in enumerate(SEGMENTS):
            expected = part_of(whole["outputs"][i].detach(), lengths, rank).nan_to_num(0)
            assert_close(name, of_rank["outputs"][i].detach(), expected)
        assert_close(name, of_rank["state"], whole["state"])
        assert_close(name, of_rank["grads"], whole["grads"])


def test_messages_do_not_grow_with_the_sequence(found: list[dict[str, Any]]):
    state = model("Performer, rotary").initial_state(B)
    short, long = found[0]["sent"]
    # One a layer, and with rotary positions one more, of a number for each row; one of these for the whole stack.
    assert short == long == (5, sequence.nbytes(state.layers) + 3 * B * 8)


def test_integers_may_begin_anywhere_in_a_message():
    """After an odd number of numbers, which are half as wide."""
    state = LinearAttention(6, 3, d_qk=9).initial_state(1)._replace(length=torch.tensor([2**40 + 5]))
    assert sum(t.numel() for t in state[:2]) % 2
    message = torch.cat([_as_numbers(t, torch.float32) for t in state])
    torch.testing.assert_close(tuple(_unflattened(state, message)), tuple(state), rtol=0, atol=0)


# --------------------------------------------------------------------------------------------------------- the algebra

KINDS = {
    "linear": LINEAR,
    "relu features": partial(LINEAR, feature_map=ReluFeatureMap),
    "positive": PERFORMER,
    "hyperbolic": partial(PERFORMER, features="hyperbolic"),
    "trigonometric": partial(PERFORMER, features="trigonometric"),
    "with eps": partial(PERFORMER, eps=1e-2),
    "window": partial(SoftmaxAttention, window=4),
    "softmax": SoftmaxAttention,
    "windowed linear": WINDOWED,
}


def states(attention: Any, n: int) -> list[sequence.State]:
    """States of different positions, each from an empty one; keys differ much in norm, and a row may have none."""
    torch.manual_seed(2)
    made = []
    for i in range(n):
        k, v = 3.0**i * torch.randn(B, H, 5, E // H), torch.randn(B, H, 5, E // H)
        made.append(attention.summarise(k.double(), v.double(), torch.tensor([5, i, 0])))
    return made


def test_a_summary_is_the_state_after_the_call():
    for name, kind in KINDS.items():
        attention = kind(E, H).double()
        q, k, v = torch.randn(3, B, H, 11, E // H, dtype=torch.float64)
        for lengths in (None, torch.tensor([11, 4, 0])):
            assert_close(name, attention.summarise(k, v, lengths), attention.attend(q, k, v, None, lengths)[1])


def test_combining_is_associative_and_an_empty_state_is_neutral():
    for name, kind in KINDS.items():
        attention = kind(E, H).double()
        a, b, c = states(attention, 3)
        combine, empty = attention.combine_states, attention.initial_state(B)
        assert_close(name, trimmed(combine(combine(a, b), c)), trimmed(combine(a, combine(b, c))))
        for pair in ((empty, b), (b, empty)):
            assert_close(name, trimmed(combine(*pair)), trimmed(b), rtol=0, atol=0)
        assert_close(name, combine(empty, empty), empty, rtol=0, atol=0)


def test_sums_of_an_earlier_draw_count_as_empty_but_for_their_length():
    attention = PERFORMER(E, H).double()
    (before,) = states(attention, 1)
    attention.redraw(torch.Generator().manual_seed(3))
    _, after = states(attention, 2)
    expected = after._replace(length=before.length + after.length)
    torch.testing.assert_close(attention.combine_states(before, after), expected, rtol=0, atol=0)


# -------------------------------------------------------------------------------------------------------- the refusals


PRETENDED: Any = SimpleNamespace(count=lambda seen: (seen, seen), unsupported=Parts.unsupported)


def test_what_does_not_support_parts_says_so():
    stack = Transformer(E, H, 1, attention=LSHAttention)
    with sequence.in_parts(PRETENDED):
        for module, name in (
            (LSTM(E, 1), "LSTM"),
            (SparseAttention(E, H, pattern="fixed", stride=2), "SparseAttention"),
            (stack, "LSHAttention"),
            (TransformerXLAttention(E, H), "TransformerXLAttention"),
        ):
            with pytest.raises(NotImplementedError, match=f"{name} does not support sequence_parallel"):
                module(torch.randn(1, 4, E))
        with pytest.raises(NotImplementedError, match="LinearAttention: sequence_parallel needs causal=True; set it"):
            LinearAttention(E, H, causal=False)(torch.randn(1, 4, E))
        cross = LinearCrossAttention(E, H)
        x = torch.randn(1, 4, E)
        assert cross(x, cross.remember(x))[0].shape == x.shape  # reads a source, position by position
    assert sequence.parts() is None


def test_the_kinds_that_support_parts_are_those_that_the_message_names():
    kinds = attention_kinds()
    able = {name for name, kind in kinds.items() if kind.takes_parts} | {"TransformerXLAttention"}
    message = Parts.unsupported(LSTM(E, 1))
    assert able == {name for name in kinds if name in message}
    assert TransformerXLAttention(E, H, same_length=True).takes_parts


def test_every_other_kind_names_those_in_one_line():
    """Alone and in a Transformer."""
    for name, kind in attention_kinds().items():
        for module in () if kind.takes_parts else (kind(E, H), Transformer(E, H, 1, attention=kind, positions=None)):
            with (
                sequence.in_parts(PRETENDED),
                pytest.raises(
                    NotImplementedError, match=rf"^{name} does not support .*; causal LinearAttention, [^\n]*$"
                ),
            ):
                module(torch.randn(1, 4, E))


def test_processes_are_needed():
    with pytest.raises(RuntimeError, match="init_process_group"), sequence_parallel():
        pass
