"""A real sentence encoder (MiniLM) from our parts, and its attention replaced by Performer's, by number of features."""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import sysconfig
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, normalize

from benchmarks.experiments.swap import replace_attention
from benchmarks.measuring import Spread, add_options
from benchmarks.report import Report, Row, plot_spreads
from lit_effattn import Transformer
from lit_effattn.attention import PerformerAttention, SoftmaxAttention
from lit_effattn.attention.positions import LearnedPositions
from lit_effattn.attention.random_features import Features
from lit_effattn.ops.runtime.differences import largest_difference
from lit_effattn.sequence import valid_positions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EQUAL = 1e-5
"""Largest difference between our sentence vectors of length 1 and the original's, in float32."""

DIRECTIONS = {"orthogonal": True, "iid": False}

OUTSIDE = {
    "embeddings.word_embeddings.weight": "embedding.weight",
    "embeddings.position_embeddings.weight": "positions.table.weight",
    "embeddings.token_type_embeddings.weight": "segments.weight",
    "embeddings.LayerNorm": "norm",
}
LAYER = {
    "attention.self.query": "attention.q_proj",
    "attention.self.key": "attention.k_proj",
    "attention.self.value": "attention.v_proj",
    "attention.output.dense": "attention.out_proj",
    "attention.output.LayerNorm": "norm_1",
    "intermediate.dense": "feed_forward.up",
    "output.dense": "feed_forward.down",
    "output.LayerNorm": "norm_2",
}
"""Their names and ours; a module stands for its weight and its bias."""

UNUSED = ("embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias")
"""Tensors that a mean over positions does not need."""

NOTES = [
    "cosine: between the sentence vectors (mean over positions) of softmax attention and of Performer's with the same "
    "weights, nothing trained; mean over the texts, its median (min–max) over the draws of the features.",
    "worst text in 20: the cosine that 5 % of the texts stay below. same neighbour: share of the texts whose nearest "
    "other text of the set stays the same.",
    "sentences: the first ones of docstrings of the standard library; passages: whole docstrings, cut to the most "
    "tokens.",
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    about = "folder with config.json, model.safetensors and tokenizer.json"
    parser.add_argument("--model", type=Path, required=True, help=about)
    kinds = get_args(Features)
    parser.add_argument("--features", choices=kinds, nargs="+", default=["positive"], help="default: %(default)s")
    add_options(parser, 2, n_features=[16, 32, 64, 128, 256, 512, 1024], sentences=200, passages=32)
    add_options(parser, draws=(3, "of the features"))
    add_options(parser, 3, most_tokens=(256, "of a text"))


class Batch(NamedTuple):
    """Texts as token ids."""

    ids: Tensor  # (B, N)
    lengths: Tensor  # (B,)


def run(args: argparse.Namespace) -> Report:
    encoder = read_encoder(args.model).to(args.device)
    documents = sorted(docstrings())
    texts = {
        "sentences": spread_out(sorted({s for s in map(first_sentence, documents) if s}), args.sentences),
        "passages": spread_out([d for d in documents if len(d.split()) >= args.most_tokens / 2], args.passages),
    }
    sets = {name: tokenize(args.model, chosen, args.most_tokens, args.device) for name, chosen in texts.items()}
    exact = {name: vectors(encoder, batch) for name, batch in sets.items()}
    original = Original(args.model).to(args.device)
    notes = [*NOTES, *(_checked(name, sets[name], exact[name], original) for name in sets)]
    rows: list[Row] = []
    panels: dict[str, dict[tuple[str, str], dict[int, Spread]]] = {name: {} for name in sets}
    for features in args.features:
        for directions, orthogonal in DIRECTIONS.items():
            for n in sorted(args.n_features):
                options = {"n_features": n, "features": features, "orthogonal": orthogonal}
                found: dict[str, list[Tensor]] = {name: [] for name in sets}
                for seed in range(args.draws):
                    torch.manual_seed(seed)
                    replace_attention(encoder.backbone, partial(PerformerAttention, **options))
                    for name, batch in sets.items():
                        found[name].append(vectors(encoder, batch))
                for name, estimates in found.items():
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


class SentenceEncoder(nn.Module):
    """The mean over positions of a bidirectional Transformer with post-norm (BERT, Devlin et al. 2018).

    Args:
        config: What config.json holds.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, eps = config["hidden_size"], config["layer_norm_eps"]
        self.embedding = nn.Embedding(config["vocab_size"], width)
        self.positions = LearnedPositions(width, max_len=config["max_position_embeddings"])
        self.segments = nn.Embedding(config["type_vocab_size"], width)
        self.norm = nn.LayerNorm(width, eps=eps)
        self.backbone = Transformer(
            width,
            config["num_attention_heads"],
            config["num_hidden_layers"],
            config["intermediate_size"],
            attention=SoftmaxAttention,
            causal=False,
            positions=None,  # BERT normalises between the positions and the first layer
            norm="post",
            activation="gelu",
            norm_eps=eps,
        )

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Return the vectors of texts: (B, N), (B,) -> (B, E)."""
        position = torch.arange(ids.size(1), device=ids.device)[None]  # (1, N)
        x = self.embedding(ids) + self.positions(position) + self.segments.weight[0]  # (B, N, E)
        y, _ = self.backbone(self.norm(x), lengths=lengths)  # 0 in padding
        return y.sum(1) / lengths[:, None]  # (B, N, E) -> (B, E)


def read_encoder(folder: Path) -> SentenceEncoder:
    """Read an encoder.

    Raises:
        ValueError: it is no BERT with absolute positions and GELU, or its tensors are others.
    """
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for name, supported in (("model_type", "bert"), ("hidden_act", "gelu"), ("position_embedding_type", "absolute")):
        if config.get(name, supported) != supported:
            raise ValueError(f"{folder} has {name}={config[name]!r}; only {supported!r} is supported")
    encoder = SentenceEncoder(config).eval()
    tensors = {name: t for name, t in load_file(folder / "model.safetensors").items() if name not in UNUSED}
    names = {ours: theirs for theirs, ours in name_map(config["num_hidden_layers"])}
    missing = names.values() ^ tensors.keys()
    if missing:
        raise ValueError(f"{folder}: tensors are missing or left over, such as {min(missing)}")
    encoder.load_state_dict({ours: tensors[theirs] for ours, theirs in names.items()})
    return encoder


def name_map(n_layers: int) -> Iterator[tuple[str, str]]:
    """Yield the name of each tensor, theirs and ours."""
    modules = dict(OUTSIDE)
    for i in range(n_layers):
        modules |= {f"encoder.layer.{i}.{a}": f"backbone.blocks.{i}.{b}" for a, b in LAYER.items()}
    for theirs, ours in modules.items():
        if theirs.endswith(".weight"):
            yield theirs, ours
        else:
            yield from ((f"{theirs}.{kind}", f"{ours}.{kind}") for kind in ("weight", "bias"))


@torch.no_grad()
def vectors(encoder: nn.Module, batch: Batch, rows: int = 16) -> Tensor:
    """Return the vectors of all texts at length 1, (B, E), some at a time and without needless padding."""
    parts = zip(batch.ids.split(rows), batch.lengths.split(rows), strict=True)
    return normalize(torch.cat([encoder(ids[:, : int(n.max())], n) for ids, n in parts]), dim=-1)


def docstrings() -> set[str]:
    """Return the docstrings of the top modules of the standard library, which are parsed, not imported."""
    found = set()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                found.add(inspect.cleandoc(text))
    return found


def first_sentence(text: str) -> str | None:
    """Return the first sentence, where it has 6 words or more."""
    sentence = re.split(r"(?<=[.!?])\s|\n\n", text)[0].replace("\n", " ")
    return sentence if len(sentence.split()) >= 6 and sentence.endswith(".") else None


def spread_out(texts: list[str], n: int) -> list[str]:
    """Return n of the texts, at even distances."""
    if len(texts) < n:
        raise ValueError(f"there are only {len(texts)} such texts, not {n}: ask for fewer")
    return [texts[i * len(texts) // n] for i in range(n)]


def tokenize(folder: Path, texts: list[str], most_tokens: int, device: torch.device) -> Batch:
    """Return token ids with their marks of beginning and end, sorted by length."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(most_tokens)
    rows = sorted((torch.tensor(e.ids) for e in tokenizer.encode_batch(texts)), key=len)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    return Batch(nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device), lengths)


class Original(nn.Module):
    """The encoder that transformers makes of a folder.

    Args:
        folder: See `read_encoder`.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        from transformers import BertModel

        self.model = BertModel.from_pretrained(folder, local_files_only=True, use_safetensors=True).eval()

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Return the vectors of texts: see `SentenceEncoder.forward`."""
        seen = valid_positions(lengths, ids.size(1))
        y = self.model(input_ids=ids, attention_mask=seen.long()).last_hidden_state
        return (y * seen[..., None]).sum(1) / lengths[:, None]  # (B, N, E) -> (B, E)


def _checked(name: str, batch: Batch, ours: Tensor, original: Original) -> str:
    """Return a note on how near our vectors are to the original's, and what the texts are."""
    difference = largest_difference([ours], [vectors(original, batch)], f"the difference of the {name}")
    if difference > EQUAL:
        raise ValueError(f"our vectors of the {name} differ by {difference:.1e} from those of transformers")
    lengths = batch.lengths.tolist()
    return (
        f"{name}: {len(ours)} texts of {lengths[0]} to {lengths[-1]} tokens; largest difference between our softmax "
        f"vectors and those of transformers: {difference:.1e}; mean cosine of two different texts: "
        f"{_of_strangers(ours):.3f}."
    )


def _of_strangers(x: Tensor) -> float:
    """Return the mean cosine of two different texts."""
    n = len(x)
    return ((x @ x.T).sum().item() - n) / (n * (n - 1))


def _neighbours(x: Tensor) -> Tensor:
    return (x @ x.T).fill_diagonal_(-torch.inf).argmax(-1)  # (B, E) -> (B,)


def _plot(panels: Any, exact: dict[str, Tensor], figure: Figure) -> None:
    titled = {f"{len(exact[name])} {name}": lines for name, lines in panels.items()}
    for axes, name in zip(plot_spreads(figure, titled, "cosine to softmax attention", sharey=True), exact, strict=True):
        axes.axhline(_of_strangers(exact[name]), color="gray", linestyle=":")
        axes.grid(alpha=0.3)
    figure.suptitle("MiniLM with Performer's attention, nothing trained; dotted: two different texts")
