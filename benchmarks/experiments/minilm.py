"""A real sentence encoder (MiniLM) whose attention is replaced by Performer's, by number of features."""

from __future__ import annotations

import argparse
import ast
import re
import sysconfig
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, normalize

from benchmarks.measuring import Spread, add_options
from benchmarks.report import Report, Row, plot_spreads
from lit_effattn.attention import Attention, PerformerAttention, SoftmaxAttention
from lit_effattn.attention.random_features import Features
from lit_effattn.datamodules.speech import espeak
from lit_effattn.ops.runtime.differences import largest_difference
from lit_effattn.sequence import valid_positions

EQUAL = 1e-5
"""Largest accepted difference between the normalised sentence vectors of both implementations, in float32."""

DIRECTIONS = {"orthogonal": True, "iid": False}

PROJECTIONS = {"q_proj": "self.query", "k_proj": "self.key", "v_proj": "self.value", "out_proj": "output.dense"}
"""The projections of this package's attention and their names in BERT."""

NOTES = [
    "cosine: between the sentence vectors (mean over positions) of softmax attention and of Performer's with the same "
    "weights, nothing trained; mean over the texts, its median (min–max) over the draws of the features.",
    "worst text in 20: the 5 % quantile of the cosine. same neighbour: share of the texts whose nearest other text of "
    "the set stays the same.",
    "sentences: first sentences of docstrings of the standard library; passages: whole docstrings, truncated.",
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, help="folder with config, weights and tokenizer.json")
    about = "default: %(default)s"
    parser.add_argument("--features", choices=get_args(Features), nargs="+", default=["positive"], help=about)
    add_options(parser, 2, n_features=[16, 32, 64, 128, 256, 512, 1024], sentences=200, passages=32)
    add_options(parser, draws=(3, "of the features"))
    add_options(parser, 3, most_tokens=(256, "of a text"))


class Batch(NamedTuple):
    """Texts as token ids."""

    ids: Tensor  # (B, N)
    lengths: Tensor  # (B,)


def run(args: argparse.Namespace) -> Report:
    encoder = Encoder(args.model).to(args.device)
    documents = sorted(docstrings())
    texts = {
        "sentences": spread_out(sorted({s for s in map(first_sentence, documents) if s}), args.sentences),
        "passages": spread_out([d for d in documents if len(d.split()) >= args.most_tokens / 2], args.passages),
    }
    sets = {name: tokenize(args.model, chosen, args.most_tokens, args.device) for name, chosen in texts.items()}
    exact = {name: vectors(encoder, batch) for name, batch in sets.items()}
    encoder.use(SoftmaxAttention)
    notes = [*NOTES, *(_checked(name, batch, vectors(encoder, batch), exact[name]) for name, batch in sets.items())]
    rows: list[Row] = []
    panels: dict[str, dict[tuple[str, str], dict[int, Spread]]] = {name: {} for name in sets}
    for features in args.features:
        for directions, orthogonal in DIRECTIONS.items():
            for n in sorted(args.n_features):
                options = {"n_features": n, "features": features, "orthogonal": orthogonal}
                drawn: dict[str, list[Tensor]] = {name: [] for name in sets}
                for seed in range(args.draws):
                    torch.manual_seed(seed)
                    encoder.use(partial(PerformerAttention, **options))
                    for name, batch in sets.items():
                        drawn[name].append(vectors(encoder, batch))
                for name, estimates in drawn.items():
                    cosines = [cosine_similarity(exact[name], x) for x in estimates]
                    mean = Spread(tuple(c.mean().item() for c in cosines))
                    panels[name].setdefault((features, directions), {})[n] = mean
                    same = [(_neighbours(x) == _neighbours(exact[name])).float().mean().item() for x in estimates]
                    rows.append(
                        {
                            "texts": name,
                            "features": features,
                            "ω": directions,
                            "F": n,
                            "cosine": mean,
                            "worst text in 20": Spread(tuple(c.quantile(0.05).item() for c in cosines)),
                            "same neighbour": Spread(tuple(same)),
                        }
                    )
    rows.sort(key=lambda row: list(sets).index(str(row["texts"])))
    return Report("minilm", rows, notes, partial(_plot, panels, exact))


class Encoder(nn.Module):
    """The mean over positions of a bidirectional Transformer (BERT, Devlin et al. 2018), as transformers reads it.

    Args:
        folder: The folder of config.json and model.safetensors.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        from transformers import BertModel

        options = {"local_files_only": True, "use_safetensors": True, "add_pooling_layer": False}
        self.model = BertModel.from_pretrained(folder, **options).eval()
        self.original = nn.ModuleList(layer.attention for layer in self.model.encoder.layer)

    def use(self, kind: Callable[[int, int, bool], Attention]) -> None:
        """Replace the attention of every layer by another kind with the same projections."""
        for layer, original in zip(self.model.encoder.layer, self.original, strict=True):
            attention = kind(original.self.query.in_features, original.self.num_attention_heads, False)
            for projection, name in PROJECTIONS.items():
                getattr(attention, projection).load_state_dict(original.get_submodule(name).state_dict())
            layer.attention = _Replaced(attention.to(original.self.query.weight), original.output.LayerNorm)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Return the vectors of texts: (B, N), (B,) -> (B, E)."""
        for layer in self.model.encoder.layer:
            layer.attention.lengths = lengths
        valid = valid_positions(lengths, ids.size(1))
        y = self.model(input_ids=ids, attention_mask=valid.long()).last_hidden_state
        return (y * valid[..., None]).sum(1) / lengths[:, None]  # (B, N, E) -> (B, E)


class _Replaced(nn.Module):
    """An attention, and BERT's residual connection and norm after it."""

    def __init__(self, attention: Attention, norm: nn.Module) -> None:
        super().__init__()
        self.attention, self.norm = attention.eval(), norm

    def forward(self, x: Tensor, *_: Any, **options: Any) -> tuple[Tensor, None]:
        y, _ = self.attention(x, lengths=self.lengths)
        return self.norm(x + y), None


@torch.no_grad()
def vectors(encoder: nn.Module, batch: Batch, rows: int = 16) -> Tensor:
    """Return the normalised vectors of all texts, (B, E), computed in batches of little padding."""
    batches = zip(batch.ids.split(rows), batch.lengths.split(rows), strict=True)
    return normalize(torch.cat([encoder(ids[:, : int(n.max())], n) for ids, n in batches]), dim=-1)


def docstrings() -> set[str]:
    """Return the docstrings of the top-level modules of the standard library, which are parsed, not imported."""
    paths = Path(sysconfig.get_paths()["stdlib"]).glob("*.py")
    return {text for path in paths for text in espeak.docstrings(ast.parse(path.read_bytes())) if text}


def first_sentence(text: str) -> str | None:
    """Return the first sentence if it has at least 6 words."""
    sentence = re.split(r"(?<=[.!?])\s|\n\n", text)[0].replace("\n", " ")
    return sentence if len(sentence.split()) >= 6 and sentence.endswith(".") else None


def spread_out(texts: list[str], n: int) -> list[str]:
    """Return n of the texts, evenly spaced."""
    if len(texts) < n:
        raise ValueError(f"there are only {len(texts)} such texts, not {n}; choose fewer")
    return [texts[i * len(texts) // n] for i in range(n)]


def tokenize(folder: Path, texts: list[str], most_tokens: int, device: torch.device) -> Batch:
    """Return token ids, including those of beginning and end, sorted by length."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(most_tokens)
    rows = sorted((torch.tensor(e.ids) for e in tokenizer.encode_batch(texts)), key=len)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    return Batch(nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device), lengths)


def _checked(name: str, batch: Batch, ours: Tensor, exact: Tensor) -> str:
    """Return a note on the texts, and on the difference between the vectors of both implementations of softmax."""
    difference = largest_difference([ours], [exact], f"the difference of the {name}")
    if difference > EQUAL:
        raise ValueError(f"the vectors of the {name} differ by {difference:.1e} from those of transformers")
    lengths = batch.lengths.tolist()
    return (
        f"{name}: {len(ours)} texts of {lengths[0]} to {lengths[-1]} tokens; largest difference between the vectors "
        f"with lit-effattn's softmax attention and those of transformers: {difference:.1e}; mean cosine of two "
        f"different texts: {_mean_cosine(ours):.3f}."
    )


def _mean_cosine(x: Tensor) -> float:
    """Return the mean cosine of two different texts."""
    n = len(x)
    return ((x @ x.T).sum().item() - n) / (n * (n - 1))


def _neighbours(x: Tensor) -> Tensor:
    return (x @ x.T).fill_diagonal_(-torch.inf).argmax(-1)  # (B, E) -> (B,)


def _plot(panels: Any, exact: dict[str, Tensor], figure: Any) -> None:
    titled = {f"{len(exact[name])} {name}": lines for name, lines in panels.items()}
    for axes, name in zip(plot_spreads(figure, titled, "cosine to softmax attention", sharey=True), exact, strict=True):
        axes.axhline(_mean_cosine(exact[name]), color="gray", linestyle=":")
        axes.grid(alpha=0.3)
    figure.suptitle("MiniLM with Performer's attention, nothing trained; dotted: two different texts")
