"""Speculative decoding: tokens per call and per second, by model, draft and temperature."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.measuring import Spread, add_options, interleaved, now
from benchmarks.models import SMALL
from benchmarks.report import Report, Row
from lit_effattn import LSTM, LanguageModel, Transformer
from lit_effattn import attention as attentions
from lit_effattn.checkpoints.shipped import is_model
from lit_effattn.datamodules.text import sources
from lit_effattn.generation.drafts import NGrams, Proposal, Propose
from lit_effattn.generation.sampling import Sampling
from lit_effattn.generation.speculative import N_DRAFT, Speculated

MODELS = ("model:stdlib", "model:stdlib_linear")
PROMPT = 1000
"""Bytes of a prompt, from the beginning of a document."""

KINDS: dict[str, Any] = {
    "softmax": attentions.SoftmaxAttention,
    "linear": attentions.LinearAttention,
    "Performer": attentions.PerformerAttention,
    "Transformer-XL": partial(attentions.TransformerXLAttention, mem_len=128),
    "DeltaNet": attentions.DeltaNetAttention,
    "LSTM": None,
}
N_TOKENS = 257
PARTS = ("models", "kinds")
_PLAIN = "no draft"

NOTES = [
    "accepted: of the tokens that the draft proposed. Tokens a call: of the model, with the calls that read the prompt "
    "or accepted tokens alone. Both do not depend on the machine.",
    f"models: each continues the first {PROMPT} bytes of the largest test documents of Python's "
    "standard library, one after another.",
    f"random weights: {SMALL}; LSTM: 2 layers, width 256. The draft knows which tokens follow, and proposes a wrong "
    "one after as many right ones as its name says, so it costs nothing. The row shows what calls cost.",
    "÷ plain: tokens/s over those of `generate`, round by round.",
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    about = "draw text with drafts instead: with the shipped models, with kinds of random weights, or (default) both"
    parser.add_argument("--speculative", nargs="*", choices=PARTS, metavar="|".join(PARTS), help=about)
    about = "models of bytes that continue the texts: checkpoints or model:NAME (default: the shipped ones)"
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="CKPT", help=about)
    about = "checkpoints of drafts for these models, beside the text's n-grams"
    parser.add_argument("--drafts", nargs="+", default=[], metavar="CKPT", help=about)
    add_options(parser, documents=(2, "texts that are continued"), text_tokens=(100, "drawn of each text"))


def run(args: argparse.Namespace) -> Report:
    parts, texts = args.speculative or PARTS, _documents(args.documents)
    rows: list[Row] = []
    models = {name: LanguageModel.load_from_checkpoint(name).to(args.device) for name in [*args.models, *args.drafts]}
    for name in args.models if PARTS[0] in parts else ():
        model = models[name].eval()
        drafts: dict[str, Any] = {"n-grams": NGrams()} | {_named(draft): models[draft].eval() for draft in args.drafts}
        for temperature in (0.0, 1.0):
            drawn = _Drawn(model, texts, args, Sampling(temperature=temperature))
            rows += _rows(_named(name), drawn, drafts)
    for kind, attention in KINDS.items() if PARTS[1] in parts else ():
        drawn = _Drawn(_random(kind, attention).to(args.device).eval(), texts[:1], args, Sampling(temperature=0.0))
        text = torch.cat([drawn.prompts[0], drawn.plain()[0]], 1)[0]
        rows += _rows(
            f"{kind}, random weights", drawn, {f"{n} of {N_DRAFT} right": Known(text, n) for n in (0, 2, N_DRAFT)}
        )
    return Report("generation", rows, NOTES)


class Known(NamedTuple):
    """A draft that knows the text (T,). After `right` tokens it proposes wrong ones."""

    text: Tensor
    right: int

    def begin(self, rows: int, room: int, sampling: Sampling) -> Propose:
        """See `Draft.begin`."""
        return self._propose

    def _propose(self, tokens: Tensor, length: Tensor, most: Tensor, uniform: Tensor) -> Proposal:
        begin = int(length)
        known = self.text[begin : begin + int(most)]
        wrong = torch.arange(len(known), device=known.device) >= self.right
        return Proposal(((known + wrong) % N_TOKENS)[None], most)


class _Drawn:
    """Continues each text by `args.text_tokens` tokens, with or without a draft."""

    def __init__(self, model: LanguageModel, texts: list[bytes], args: argparse.Namespace, sampling: Sampling) -> None:
        self.model, self.args, self.sampling = model, args, sampling
        self.prompts = [torch.tensor([[N_TOKENS - 1, *text]], device=args.device) for text in texts]

    def plain(self) -> list[Tensor]:
        """Continue all texts with `generate`."""
        return [self.model.sample(prompt, self.args.text_tokens, sampling=self.sampling) for prompt in self.prompts]

    def with_draft(self, draft: Any) -> list[Speculated]:
        """Continue all texts with a draft."""
        return [self.model.speculate(p, self.args.text_tokens, draft, sampling=self.sampling) for p in self.prompts]


def _rows(name: str, drawn: _Drawn, drafts: dict[str, Any]) -> list[Row]:
    device, repeats, n = drawn.args.device, drawn.args.repeats, drawn.args.text_tokens * len(drawn.prompts)

    def measured(function: Callable[[], Any]) -> tuple[float, Any]:
        start = now(device)
        result = function()
        return now(device) - start, result

    calls = {draft: partial(measured, partial(drawn.with_draft, proposes)) for draft, proposes in drafts.items()}
    rounds = interleaved(f"speculation, {name}", {_PLAIN: partial(measured, drawn.plain), **calls}, repeats)
    seconds = {draft: Spread(tuple(s for s, _ in samples)) for draft, samples in rounds.items()}
    rows: list[Row] = []
    for draft in drafts:
        texts: list[Speculated] = rounds[draft][0][1]
        proposed, accepted = (sum(int(t.sum()) for t in counts) for counts in zip(*[c[2:] for c in texts], strict=True))
        rows.append(
            {
                "model": name,
                "temperature": drawn.sampling.temperature,
                "draft": draft,
                "accepted": accepted / max(1, proposed),
                "tokens a call": n / sum(text.calls for text in texts),
                "tokens/s": seconds[draft].map(lambda s: n / s),
                "plain, tokens/s": seconds[_PLAIN].map(lambda s: n / s),
                "÷ plain": seconds[_PLAIN] / seconds[draft],
            }
        )
    return rows


def _named(model: str) -> str:
    """Return the name of a model in the table, without its folder."""
    return model if is_model(model) else Path(model).stem


def _documents(n: int) -> list[bytes]:
    texts = [b"".join(document.blocks()) for document in sources.stdlib().splits["test"]]
    return [text[:PROMPT] for text in sorted(texts, key=len, reverse=True)[:n]]


def _random(kind: str, attention: Any) -> LanguageModel:
    torch.manual_seed(0)
    if attention is None:
        return LanguageModel(LSTM(2 * SMALL.d_model, 2), N_TOKENS)
    return LanguageModel(Transformer(SMALL.d_model, SMALL.n_heads, SMALL.n_layers, attention=attention), N_TOKENS)
