"""The relative effective context length of language models: the context that they make use of."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.measuring import add_options
from benchmarks.report import Report, Row
from lit_effattn.checkpoints.io import read_checkpoint
from lit_effattn.datamodules import IGNORE, TextStream, TokenBatch
from lit_effattn.tasks import LanguageModel

NOTES = [
    "RECL (Dai et al. 2019, section 4.3 and appendix C): the first context c whose next one, c', brings no gain. "
    "g = 1 − exp(f(c, c') − f(c, c)), f(c, c') the mean of min(b(c, t), l(c', t)) over the share r of the positions t "
    "where b(c, t), the least loss of all models at context c, is largest. ≤, ≥: the shortest or longest one tested.",
    "It is relative: figures of one table can be compared; those of models that were not run together, or with other "
    "contexts, cannot. min(b, l) counts only improvements, so that g is never negative.",
    "l(c, t): −ln p of the token t of the test text, after the c tokens before it, all of one document, were read from "
    "an empty state. They are read in segments with the state carried; the last segment may be short.",
    "gain: 100 g ± its standard error over the positions, for given T and models. nats: the mean of l.",
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    about = "checkpoints of language models: the group"
    parser.add_argument("--ckpt_path", type=Path, nargs="+", required=True, help=about)
    about = "contexts c, each one's c' being the next; the paper has them 100 apart"
    add_options(parser, lengths=(list(range(100, 1001, 100)), about), batch_size=(64, "positions at once"))
    add_options(parser, 2, positions=(1000, "number of positions drawn from the test text"))
    about = "shares r; default: %(default)s"
    parser.add_argument("--ratios", type=_share, nargs="+", default=[0.1, 0.5, 1.0], help=about)
    parser.add_argument("--threshold", type=_share, default=0.01, help="least gain that counts; default: %(default)s")


def run(args: argparse.Namespace) -> Report:
    contexts = sorted(set(args.lengths))
    if len(contexts) < 2:
        raise ValueError(f"lengths={args.lengths}: a gain compares two contexts; name two or more")
    group = {str(path): load(path, args.device, "source") for path in args.ckpt_path}
    data = next(iter(group.values()))[1]
    tokenizer = TextStream(**data).tokenizer
    for path, (model, _) in group.items():
        if model.tokenizer != tokenizer:
            raise ValueError(
                f"ckpt_path={path}: its tokens are not those of the first checkpoint, so that their losses can't be "
                "compared; choose models of one vocabulary"
            )
    tokens, positions = _drawn(read_documents(data), contexts[-1], args.positions)
    losses_of_models = []
    for model, options in group.values():
        segment_len = options["eval_segment_len"] or options["segment_len"]
        losses_of_models.append(losses(model, tokens, positions, contexts, segment_len, args.batch_size))
    rows = _rows(list(group), torch.stack(losses_of_models), contexts, args.ratios, args.threshold)
    drawn = f"{len(positions):,} positions of the test text of source {data['source']}, the same for all."
    return Report("recl", rows, [*NOTES, drawn])


def gains(losses: Tensor, ratio: float) -> tuple[Tensor, Tensor]:
    """Return the relative gain of each context over the one before (Dai et al. 2019, appendix C).

        b(c, t) = min_i l_i(c, t),  T(c) = the r · |t| positions t with the largest b(c, t)
        f_i(c, c') = 1/|T(c)| Σ_{t ∈ T(c)} min(b(c, t), l_i(c', t))
        g_i(c, c') = (exp f_i(c, c) − exp f_i(c, c')) / exp f_i(c, c)

    c' = c + Δ in the paper; here, the next context. r · |t| is rounded, and at least 1; among equals T has the first.
    f_i(c, c) is the mean of b, the same for all models, since b is their minimum.

    Args:
        losses: (models, contexts, positions), l_i(c, t) in nats, contexts ascending.
        ratio: r, from above 0 to 1.

    Returns:
        g_i(c, c') and its standard error, that of the mean over T (delta method): (models, contexts − 1) each.
    """
    losses = losses.double()
    baseline = losses.amin(0)[:-1]  # (contexts − 1, positions)
    count = max(1, round(ratio * losses.size(2)))
    hardest = baseline.sort(dim=1, descending=True, stable=True).indices[:, :count]  # (contexts − 1, count)
    improved = torch.minimum(baseline, losses[:, 1:]) - baseline  # (models, contexts − 1, positions), ≤ 0
    improved = improved.gather(2, hardest.expand(len(losses), -1, -1))  # (models, contexts − 1, count)
    ratio_of_perplexities = improved.mean(2).exp()
    return 1 - ratio_of_perplexities, ratio_of_perplexities * improved.std(2, correction=0) / math.sqrt(count)


def effective_length(gains: Sequence[float], contexts: Sequence[int], threshold: float) -> int:
    """Return the first context c whose gain g(c, c') is below `threshold`, or else the last context.

    Args:
        gains: g(c, c') of every context but the last.
        contexts: The contexts, in ascending order.
        threshold: The threshold; 0.01 in the paper.
    """
    return next((c for c, g in zip(contexts, gains, strict=False) if g < threshold), contexts[-1])


def load(path: Path, device: torch.device, *data: str) -> tuple[LanguageModel, dict[str, Any]]:
    """Read a language model, and the arguments of the data that it was trained on.

    Args:
        path: The checkpoint.
        device: The device of the model.
        data: Accepted data, by an argument that only they have: "source" of TextStream.

    Raises:
        ValueError: If the checkpoint is of another task or of other data.
    """
    checkpoint = read_checkpoint(path)
    arguments = checkpoint.get("datamodule_hyper_parameters", {})
    name = checkpoint.get("hyper_parameters", {}).get("_class_path", "").rpartition(".")[2]
    if name != "LanguageModel" or not arguments.keys() & set(data):
        raise ValueError(f"ckpt_path={path} must be of a LanguageModel whose data have {' or '.join(data)}")
    return LanguageModel.load_from_checkpoint(path, map_location=device, weights_only=True).eval(), arguments


def read_documents(data: dict[str, Any]) -> list[Tensor]:
    """Return the tokens of each document of the test text, (n,) each, in order. Joined documents count as one."""
    stream = TextStream(**{**data, "eval_batch_size": 1, "eval_segment_len": 2**16, "num_workers": 0})
    stream.prepare_data()
    documents: list[list[Tensor]] = []
    for batch in stream.test_dataloader():
        if batch.fresh[0]:
            documents.append([])
        documents[-1].append(batch.targets[batch.targets != IGNORE])
    return [torch.cat(pieces) for pieces in documents]


@torch.no_grad()
def losses(
    model: LanguageModel, tokens: Tensor, positions: Tensor, contexts: Sequence[int], segment_len: int, batch_size: int
) -> Tensor:
    """Return l(c, t): −ln p of tokens[t], t in `positions`, after only the c tokens before it.

    The model reads them with its evaluation memory, from an empty state.

    Args:
        model: The model.
        tokens: (n,) tokens.
        positions: (P,) positions t.
        contexts: The contexts c.
        segment_len: Tokens that the model reads at once.
        batch_size: Positions at once.

    Returns:
        (contexts, P) of float64.
    """
    rows = []
    model.on_validation_start()
    try:
        for c in contexts:
            print(f"recl: context {c} of {contexts[-1]}", file=sys.stderr, flush=True)
            rows.append(torch.cat([_loss(model, tokens, at, c, segment_len) for at in positions.split(batch_size)]))
    finally:
        model.on_validation_end()
    return torch.stack(rows)


def _loss(model: LanguageModel, tokens: Tensor, at: Tensor, context: int, segment_len: int) -> Tensor:
    window = tokens[at[:, None] + torch.arange(-context, 0)].to(model.device)  # (P,) -> (P, context)
    memory = model.active_backbone.initial_state(len(at), device=model.device)
    for inputs in window.split(segment_len, 1):
        # (P, segment_len, E); the targets are not used.
        hidden, memory = model.hidden(TokenBatch(inputs, inputs), memory)
    return model.head.nll(hidden[:, -1], tokens[at].to(model.device)).double().cpu()


def _drawn(documents: list[Tensor], longest: int, count: int) -> tuple[Tensor, Tensor]:
    """Concatenate the documents, (n,), and draw positions with `longest` tokens of the same document before them."""
    offsets = torch.cat([torch.arange(len(document)) for document in documents])
    possible = (offsets >= longest).nonzero()[:, 0]
    if len(possible) < count:
        raise ValueError(
            f"positions={count}: only {len(possible)} positions of the test text have {longest} tokens, the longest of "
            "lengths, before them in their document; choose fewer, or shorter lengths"
        )
    chosen = torch.randperm(len(possible), generator=torch.Generator().manual_seed(0))[:count]
    return torch.cat(documents), possible[chosen].sort().values


def _rows(
    names: list[str], losses: Tensor, contexts: Sequence[int], ratios: Sequence[float], threshold: float
) -> list[Row]:
    rows: list[Row] = []
    means = losses.mean(2)  # (models, contexts)
    for ratio in ratios:
        gain, error = gains(losses, ratio)
        for i, name in enumerate(names):
            length = effective_length(gain[i].tolist(), contexts, threshold)
            bound = {contexts[0]: "≤ ", contexts[-1]: "≥ "}.get(length, "")
            row: Row = {"model": name, "r": ratio, "RECL": f"{bound}{length}"}
            for (c, longer), g, e in zip(pairwise(contexts), gain[i].tolist(), error[i].tolist(), strict=True):
                row[f"gain {c} → {longer}, %"] = f"{100 * g:.2f} ± {100 * e:.2f}"
            rows.append(row | {f"nats, c {contexts[j]}": float(means[i, j]) for j in (0, -1)})
    return rows


def _share(text: str) -> float:
    number = float(text)
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"{text} must be above 0 and at most 1")
    return number
