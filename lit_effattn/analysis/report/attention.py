"""Attention pictures of a report: what each attention of a model does with one sequence, drawn as PNG."""

from __future__ import annotations

import base64
import colorsys
import io
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lit_effattn.attention import Attention, CrossAttention
from lit_effattn.nn.encoder_decoder import EncoderDecoder

LAYERS, HEADS = 4, 4
"""The most attentions of a model, and heads of an attention, that are drawn."""

TIMES = 256
"""Points of [0, 1] at which a density over a continuous memory is drawn."""

_ANCHORS = ((13, 10, 38), (83, 18, 124), (182, 54, 121), (251, 136, 97), (252, 253, 191))
_NOTHING = (128, 128, 128)
_TERMS = {
    "content": "(a) content",
    "position": "(b) position",
    "content_bias": "(c) content bias u",
    "position_bias": "(d) position bias v",
}


class Picture(NamedTuple):
    """A picture of a matrix.

    Attributes:
        caption: What it shows.
        png: The file.
    """

    caption: str
    png: bytes


class Drawn(NamedTuple):
    """The pictures of one attention.

    Attributes:
        name: The module's name in the model.
        kind: Its class.
        note: How to read the pictures, or why there are none.
        pictures: Those of each head in turn.
    """

    name: str
    kind: str
    note: str
    pictures: list[Picture]


@torch.no_grad()
def attention_pictures(model: nn.Module, run: Callable[[], object]) -> list[Drawn]:
    """Draw what the attentions of `model` do while `run` passes one sequence through it, without padding.

    At most `LAYERS` attentions are drawn, the first and the last among them, and `HEADS` heads of each.

    Args:
        model: In evaluation mode.
        run: Calls the model once.
    """
    found: dict[str, Drawn] = {}
    encoded: list[Tensor] = []
    hooks = [
        part.encoder.register_forward_hook(lambda _, given, output: encoded.append(output[0]))
        for part in model.modules()
        if isinstance(part, EncoderDecoder)
    ]
    kinds = [(name, part) for name, part in model.named_modules() if isinstance(part, Attention | CrossAttention)]
    for name, part in _spread(kinds, LAYERS):

        def draw(part: Any, given: tuple[Any, ...], name: str = name) -> None:
            if name not in found:
                found[name] = _drawn(name, part, given, encoded)

        hooks.append(part.register_forward_pre_hook(draw))
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return list(found.values())


def _spread(items: Sequence[Any], most: int) -> list[Any]:
    """Return at most `most` of `items`, evenly spread, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def _drawn(name: str, part: Any, given: tuple[Any, ...], encoded: Sequence[Tensor]) -> Drawn:
    kind = type(part).__name__
    try:
        if isinstance(part, CrossAttention):
            if not encoded:
                return Drawn(name, kind, "Not drawn: what it reads is not the output of an encoder.", [])
            weights = part.attention_weights(given[0][:1], encoded[0][:1])[0]
            pictures = [p for head, w in _heads(weights) for p in _weights(head, w)]
            return Drawn(name, kind, "Rows: positions of the target. Columns: positions of the source.", pictures)
        columns = part.attention_weights(*given).size(-1) - given[0].size(1)
        pictures = [picture for draw in _VIEWS for picture in draw(part, given)]
    except NotImplementedError as error:
        return Drawn(name, kind, str(error), [])
    note = "Rows: positions, the first on top. Columns: the positions that they attend to."
    if columns:
        note += f" The first {columns} columns are what the attention remembers of earlier positions."
    pictures.sort(key=lambda picture: picture.caption.partition(":")[0])  # head by head
    return Drawn(name, kind, note, pictures)


# ------------------------------------------------------------------------------------------------------------- views
# Each takes an attention and the arguments of its `forward`, with one row, and yields what that kind has to show.


def _view_pattern(part: Any, given: tuple[Any, ...]) -> Iterator[Picture]:
    if hasattr(part, "attention_pattern"):
        patterns = part.attention_pattern(*given)[0]
        same = bool((patterns == patterns[:1]).all())
        for head, pattern in [("every head", patterns[0])] if same else _heads(patterns):
            yield Picture(f"{head}: the given pattern", png(pattern.float()))


def _view_weights(part: Any, given: tuple[Any, ...]) -> Iterator[Picture]:
    for head, weights in _heads(part.attention_weights(*given)[0]):
        yield from _weights(head, weights)


def _view_terms(part: Any, given: tuple[Any, ...]) -> Iterator[Picture]:
    if hasattr(part, "attention_terms"):
        terms = part.attention_terms(*given)
        shown = torch.stack([term[0, 0] for term in terms])  # (4, N, M)
        low, high = (float(f(shown[shown > -torch.inf])) for f in (torch.min, torch.max))
        for name, term in zip(terms._fields, shown, strict=True):
            scaled = (term - low) / max(high - low, 1e-30)
            picture = png(scaled.masked_fill(term == -torch.inf, torch.nan))
            yield Picture(f"head 1: term {_TERMS.get(name, name)}, from {low:.2g} to {high:.2g}", picture)


def _view_buckets(part: Any, given: tuple[Any, ...]) -> Iterator[Picture]:
    if hasattr(part, "attention_buckets"):
        for head, buckets in _heads(part.attention_buckets(*given)[0]):
            caption = f"{head}: buckets, a colour each. Rows: rounds of hashing. Columns: positions"
            yield Picture(caption, _coloured(buckets.repeat_interleave(max(1, 32 // len(buckets)), 0)))


def _view_densities(part: Any, given: tuple[Any, ...]) -> Iterator[Picture]:
    if hasattr(part, "attention_densities") and part.n_basis:
        times = torch.linspace(0, 1, TIMES, device=given[0].device)
        for head, density in _heads(part.attention_densities(*given, times=times)[0]):
            most = density.amax(-1, keepdim=True)  # (N, 1), 0 where nothing has been written
            shown = (density / most.clamp(min=1e-30)).masked_fill(most == 0, torch.nan)
            caption = f"{head}: density over the long-term memory. Columns: from its oldest part to its newest"
            yield Picture(caption, png(shown))


_VIEWS = (_view_pattern, _view_weights, _view_terms, _view_buckets, _view_densities)


def _heads(of_heads: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and the parts of the heads that are drawn, of a tensor (H, ·, ·)."""
    for i, head in enumerate(of_heads[:HEADS], 1):
        yield f"head {i}", head


def _weights(head: str, weights: Tensor) -> Iterator[Picture]:
    """Draw weights (N, M): in each row from 0 to its largest, by the square root, so that small ones are seen too."""
    most = weights.amax(-1, keepdim=True)  # (N, 1)
    yield Picture(f"{head}: weights", png((weights / most.clamp(min=1e-30)).clamp(0, 1).sqrt()))


# --------------------------------------------------------------------------------------------------------------- PNG


def png(values: Tensor) -> bytes:
    """Return a PNG of values (N, M) from 0, dark, to 1, bright, a pixel each; NaN is grey."""
    there = ~values.isnan()
    index = (1 + 254 * values.nan_to_num().clamp(0, 1)).round() * there
    return _indexed(index, _bytes([_NOTHING, *map(_colour, range(255))]))


def _coloured(classes: Tensor) -> bytes:
    """Return a PNG of integers (N, M), each in a colour of its own as far as there are 256."""
    golden = (math.sqrt(5) - 1) / 2  # turns of the hue by it lie far from each other
    turns = [colorsys.hsv_to_rgb(i * golden % 1, 0.55 + 0.2 * (i % 3), 0.95 - 0.2 * (i % 2)) for i in range(256)]
    return _indexed(classes % 256, _bytes([tuple(round(255 * part) for part in turn) for turn in turns]))


def _indexed(index: Tensor, palette: bytes) -> bytes:
    from PIL import Image

    image = Image.frombytes("P", (index.size(1), index.size(0)), index.to(torch.uint8).cpu().numpy().tobytes())
    image.putpalette(palette)
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return file.getvalue()


def _colour(step: int) -> tuple[int, ...]:
    """Return the colour of a step from 0 to 254, between those of `_ANCHORS`."""
    place = step / 254 * (len(_ANCHORS) - 1)
    low = min(int(place), len(_ANCHORS) - 2)
    pairs = zip(_ANCHORS[low], _ANCHORS[low + 1], strict=True)
    return tuple(round(a + (place - low) * (b - a)) for a, b in pairs)


def _bytes(colours: Sequence[Sequence[int]]) -> bytes:
    return bytes(part for colour in colours for part in colour)


def gradient() -> str:
    """Return the colours of `png` as a CSS gradient."""
    return f"linear-gradient(to right, {', '.join('rgb' + str(anchor) for anchor in _ANCHORS)})"


def data_uri(content: bytes, kind: str = "image/png") -> str:
    """Return a file as a data URI."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
