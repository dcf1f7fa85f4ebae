import itertools
import math

import pytest
import torch
from torch import Tensor

from lit_effattn.nn.front_ends import ConvSubsampling, FrameStacking, FrontEnd, FrontEndStream, Projection

FEATURES, WIDTH = 10, 6
MAKERS = {
    "projection": Projection,
    "stacking1": lambda f, e: FrameStacking(f, e, factor=1),
    "stacking3": lambda f, e: FrameStacking(f, e, factor=3),
    "conv2": lambda f, e: ConvSubsampling(f, e, factor=2, channels=3),
    "conv4": lambda f, e: ConvSubsampling(f, e, factor=4, channels=3),
}


def made(name: str) -> FrontEnd:
    torch.manual_seed(4)
    return MAKERS[name](FEATURES, WIDTH).double()


def frames(*shape: int) -> Tensor:
    return torch.randn(*shape, FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_lengths_are_divided_and_rounded_up():
    for name in MAKERS:
        front_end = made(name)
        for t in range(1, 18):
            y, lengths = front_end(frames(1, t), torch.tensor([t]))
            expected = math.ceil(t / front_end.factor)
            assert y.shape == (1, expected, WIDTH)
            assert lengths.tolist() == [expected]


def test_padded_equals_alone():
    """For outputs and gradients, whatever stands in the padding."""
    for name in MAKERS:
        front_end = made(name)
        lengths = torch.tensor([17, 5, 6, 7, 8, 1, 0])
        x = frames(len(lengths), 17)
        for row, n in enumerate(lengths.tolist()):
            x[row, n:] = math.nan
        together, divided = front_end(x, lengths)
        weights = torch.randn(WIDTH, dtype=torch.float64)
        parameters = list(front_end.parameters())
        expected = [torch.zeros_like(p) for p in parameters]
        for row, n in enumerate(lengths.tolist()):
            m = int(divided[row])
            assert (together[row, m:] == 0).all()
            if n:
                (alone,), _ = front_end(x[row : row + 1, :n], torch.tensor([n]))
                torch.testing.assert_close(together[row, :m], alone)
                gradients = torch.autograd.grad((alone @ weights).sin().sum(), parameters)
                expected = [e + g for e, g in zip(expected, gradients, strict=True)]
        found = torch.autograd.grad((together @ weights).sin().sum(), parameters)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)


def test_stacked_frames_stand_side_by_side():
    front_end = made("stacking3")
    x = frames(1, 4)
    y, _ = front_end(x, torch.tensor([4]))
    first = torch.cat([x[0, 0], x[0, 1], x[0, 2]])
    second = torch.cat([x[0, 3], torch.zeros(2 * FEATURES)])
    assert isinstance(front_end, FrameStacking)
    torch.testing.assert_close(y[0], front_end.proj(torch.stack([first, second])))


def test_convolutions_see_the_frames_around_twice_their_own():
    """Frame t of the second layer sees 2t − 1 … 2t + 1 of the first, which see 4t − 3 … 4t + 3 of the input."""
    front_end = made("conv4")
    x = frames(1, 24).requires_grad_()
    y, _ = front_end(x, torch.tensor([24]))
    (gradient,) = torch.autograd.grad(y[0, 3].sum(), x)
    seen = (gradient[0] != 0).any(-1).nonzero().flatten().tolist()
    assert set(seen) <= set(range(9, 16))
    assert {9, 15} <= set(seen)


def test_bad_options_are_named():
    for make, words in [
        (lambda: FrameStacking(4, 4, factor=0), "factor=0"),
        (lambda: ConvSubsampling(4, 4, factor=3), "factor=3"),
        (lambda: ConvSubsampling(4, 4, channels=0), "channels=0"),
    ]:
        with pytest.raises(ValueError, match=words):
            make()


def test_a_stream_gives_the_frames_of_the_whole_as_soon_as_they_are_known():
    for name, pieces in itertools.product(MAKERS, [[1] * 17, [0, 2, 5, 0, 9, 1], [17, 0], [3, 14]]):
        front_end, x = made(name), frames(2, 17)
        whole, _ = front_end(x, torch.tensor([17, 17]))
        stream, streamed, read = FrontEndStream(front_end), [], 0
        for size in pieces:
            streamed.append(stream(x[:, read : read + size]))
            read += size
            n_frames = sum(0 if y is None else y.size(1) for y in streamed)
            changed = x.clone()
            changed[:, read:] += 1  # a frame is known if what follows does not change it
            known = (front_end(changed, torch.tensor([17, 17]))[0] == whole).all(-1).all(0).sum()
            assert n_frames == (known if read < 17 else (17 - 1 - front_end.context[1]) // front_end.factor + 1)
        streamed.append(stream(x[:, :0], last=True))
        torch.testing.assert_close(torch.cat([y for y in streamed if y is not None], 1), whole)


def test_a_stream_keeps_few_feature_vectors():
    front_end = made("conv4")
    stream, x = FrontEndStream(front_end), frames(1, 3)
    for _ in range(50):
        stream(x)
        assert stream._x is not None
        assert stream._x.untyped_storage().nbytes() <= 8 * FEATURES * (4 + 3 + 3 + 3)


def test_a_front_end_without_a_context_can_not_stream():
    front_end = made("projection")
    front_end.context = None
    with pytest.raises(ValueError, match="Projection defines no `context`, which a stream needs"):
        FrontEndStream(front_end)
