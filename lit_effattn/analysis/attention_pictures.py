"""Attention pictures of a report: the weights of a model's attentions for one sequence, as PNG."""

import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lit_effattn.attention import Attention, CrossAttention
from lit_effattn.nn.encoder_decoder import EncoderDecoder
from lit_effattn.sequence import State, select

LAYERS, HEADS = 4, 4  # largest numbers of attentions of a model, and of heads of an attention, that are drawn
TIMES = 256  # points of [0, 1] at which a density over a continuous memory is drawn

_TERMS = {
    "content": "(a) content",
    "position": "(b) position",
    "content_bias": "(c) content bias u",
    "position_bias": "(d) position bias v",
}


class Picture(NamedTuple):
    """A caption and a PNG file."""

    caption: str
    png: bytes


class Drawn(NamedTuple):
    """The pictures of one attention."""

    name: str  # the module's name in the model
    kind: str  # its class
    note: str  # how to read the pictures, or why there are none
    pictures: list[Picture]  # the pictures, ordered by head


@torch.no_grad()
def attention_pictures(model: nn.Module, run: Callable[[], object]) -> list[Drawn]:
    """Draw the attention of `model`, in evaluation, while `run` passes one sequence through it, without padding.

    At most `LAYERS` attentions are drawn, including the first and the last, and `HEADS` heads of each. If a call has
    several rows, as in a `SlidingWindow`, the last one is drawn.
    """
    drawn: dict[str, Drawn] = {}
    encoded: list[Tensor] = []
    modules = [(name, m) for name, m in model.named_modules() if isinstance(m, Attention | CrossAttention)]
    if len(modules) > LAYERS:
        modules = [modules[round(i * (len(modules) - 1) / (LAYERS - 1))] for i in range(LAYERS)]

    def draw(name: str, module: Any, args: tuple[Any, ...]) -> None:
        if name not in drawn:
            drawn[name] = _drawn(name, module, _of_last_row(*args), encoded)

    with contextlib.ExitStack() as hooks:
        for module in model.modules():
            if isinstance(module, EncoderDecoder):
                hook = module.encoder.register_forward_hook(lambda _, args, output: encoded.append(output[0]))
                hooks.callback(hook.remove)
        for name, module in modules:
            hooks.callback(module.register_forward_pre_hook(partial(draw, name)).remove)
        run()
    return list(drawn.values())


def _of_last_row(x: Tensor, state: State | None = None, lengths: Tensor | None = None) -> tuple[Any, ...]:
    """Return the arguments of a call for its last row, without padding."""
    last = torch.tensor([len(x) - 1], device=x.device)
    n = x.size(1) if lengths is None else int(lengths[-1])
    return x[-1:, :n], select(state, last), None


def _drawn(name: str, module: Any, args: tuple[Any, ...], encoded: Sequence[Tensor]) -> Drawn:
    """Return the pictures of one attention, called with `args`. `encoded` has the output of the encoder, if any."""
    kind = type(module).__name__
    try:
        if isinstance(module, CrossAttention):
            if not encoded:
                return Drawn(name, kind, "Not drawn: what it reads is not the output of an encoder.", [])
            pictures = list(_weights(module.attention_weights(args[0][:1], encoded[0][:1])[0]))
            return Drawn(name, kind, "Rows: positions of the target. Columns: positions of the source.", pictures)
        columns = module.attention_weights(*args).size(-1) - args[0].size(1)
        pictures = sorted(_pictures(module, args), key=lambda picture: picture.caption.partition(":")[0])  # by head
    except NotImplementedError as error:
        return Drawn(name, kind, str(error), [])
    note = "Rows: positions, the first on top. Columns: the positions that they attend to."
    if columns:
        note += f" The first {columns} columns are what the attention remembers of earlier positions."
    return Drawn(name, kind, note, pictures)


def _pictures(module: Any, args: tuple[Any, ...]) -> Iterator[Picture]:
    """Yield the pictures of an attention that is called with `args`, of one row, in the order of each head."""
    if hasattr(module, "attention_pattern"):
        patterns = module.attention_pattern(*args)[0]
        same = bool((patterns == patterns[:1]).all())
        for head, pattern in [("every head", patterns[0])] if same else _heads(patterns):
            yield Picture(f"{head}: the given pattern", png(pattern.float()))
    yield from _weights(module.attention_weights(*args)[0])
    if hasattr(module, "attention_terms"):
        terms = module.attention_terms(*args)
        values = torch.stack([term[0, 0] for term in terms])  # (4, N, M)
        low, high = (float(f(values[values > -torch.inf])) for f in (torch.min, torch.max))
        for name, term in zip(terms._fields, values, strict=True):
            scaled = (term - low) / max(high - low, 1e-30)
            picture = png(scaled.masked_fill(term == -torch.inf, torch.nan))
            yield Picture(f"head 1: term {_TERMS.get(name, name)}, from {low:.2g} to {high:.2g}", picture)
    if hasattr(module, "attention_buckets"):
        for head, buckets in _heads(module.attention_buckets(*args)[0]):
            caption = f"{head}: buckets, a colour each. Rows: rounds of hashing. Columns: positions"
            yield Picture(caption, _indexed(buckets.repeat_interleave(max(1, 32 // len(buckets)), 0) % 20, "tab20", 20))
    if hasattr(module, "attention_densities") and module.n_basis:
        times = torch.linspace(0, 1, TIMES, device=args[0].device)
        for head, density in _heads(module.attention_densities(*args, times=times)[0]):
            largest = density.amax(-1, keepdim=True)  # (N, 1), 0 where nothing has been written
            scaled = (density / largest.clamp(min=1e-30)).masked_fill(largest == 0, torch.nan)
            caption = f"{head}: density over the long-term memory. Columns: from its oldest part to its newest"
            yield Picture(caption, png(scaled))


def _heads(values: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and values of the first `HEADS` heads of a tensor (H, ·, ·)."""
    for i, head in enumerate(values[:HEADS], 1):
        yield f"head {i}", head


def _weights(weights: Tensor) -> Iterator[Picture]:
    """Draw weights (H, N, M): each row from 0 to its largest, by the square root, which makes small ones visible.

    Negative weights, which some kinds have, are drawn by their size.
    """
    for head, of_head in _heads(weights.abs()):
        largest = of_head.amax(-1, keepdim=True)  # (N, 1)
        yield Picture(f"{head}: weights", png((of_head / largest.clamp(min=1e-30)).clamp(0, 1).sqrt()))


def png(values: Tensor) -> bytes:
    """Return a PNG of values (N, M) from 0, dark, to 1, bright, a pixel each; NaN is grey."""
    return _indexed((254 * values.nan_to_num().clamp(0, 1)).round().masked_fill(values.isnan(), 255), "magma", 255)


def _indexed(index: Tensor, colormap: str, n: int) -> bytes:
    """Return a PNG of numbers (N, M) of colours: those below `n` of a colormap of matplotlib, 255 is grey."""
    from matplotlib import colormaps
    from PIL import Image

    palette = np.full((256, 3), 128)
    palette[:n] = 255 * colormaps[colormap](np.linspace(0, 1, n))[:, :3]
    image = Image.fromarray(index.to(torch.uint8).cpu().numpy())
    image.putpalette(palette.astype(np.uint8).tobytes())
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return file.getvalue()
