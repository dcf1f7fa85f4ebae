"""Short documents: padded, packed and joined rows compared in tokens a second and memory, and in their results."""

from __future__ import annotations

import argparse
import ast
import random
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from inspect import isabstract
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from benchmarks.measuring import MIB, add_options, at_least, peak_bytes, timed
from benchmarks.report import Report, Row
from lit_effattn import LSTM, Transformer, sequence
from lit_effattn import attention as attentions
from lit_effattn.datamodules.common.python_library import library_files
from lit_effattn.datamodules.common.tokens import IGNORE, TokenBatch
from lit_effattn.ops.runtime.differences import largest_relative_difference
from lit_effattn.sequence import SequenceModule
from lit_effattn.tasks import LanguageModel

KINDS: dict[str, Any] = {
    "softmax": attentions.SoftmaxAttention,
    "linear": attentions.LinearAttention,
    "Performer": attentions.PerformerAttention,
    "Transformer-XL": attentions.TransformerXLAttention,
}

PACKED, SORTED = "packed", "padded, sorted by length"

CUTS = {
    "1, 511": [1, 511],
    "511, 1": [511, 1],
    "63, 1, 64, 65, 319": [63, 1, 64, 65, 319],
    "127, 129, 256": [127, 129, 256],
    "1 × 32, 480": [*[1] * 32, 480],
}
"""Lengths of the sequences of a row of 512 positions. Chunks, strides and windows are 64 or 128 by default."""

N_BYTES = 256
START = N_BYTES  # the token that is read before a document
N_TOKENS = N_BYTES + 1

SPEED_NOTES = [
    "Forward and backward of a Transformer. Documents: the functions of Python's standard library, or the English "
    "dialogues of the package chatterbot-corpus, in bytes, in random order; longer ones are cut. All methods read the "
    "same documents.",
    "padded: a document in each row, batches of no more positions than a packed one has. packed: `sequence.packed`, "
    "rows filled by first-fit, no document divided. joined: the same rows without borders, so that a document depends "
    "on those before it: a limit, which computes something else.",
    "tokens/s: tokens of documents, without padding. positions ÷ tokens: all positions that an attention reads, with "
    "the padding of rows and of the calls inside `packed`, where the other layers read tokens alone. peak: memory in "
    "addition to the input and the weights.",
]
DIFFERENCE_NOTES = [
    "Largest difference of `sequence.packed` from separate calls, relative to the norm: outputs, gradient of the "
    "input, gradient of the weights, and the outputs of 3 further positions from the last state.",
    "Each kind with its default options, causal, E 64, 4 heads; one row of 512 positions, cut into sequences of these "
    "lengths.",
]
TRAINING_NOTES = [
    "Largest difference of the losses of all steps, relative: the same model on the same documents in the same order, "
    "4 functions of up to 160 bytes a step, in padded rows or end to end in one; float64; AdamW.",
]
PEER_NOTES = [
    "Mean loss over the tokens of 16 functions of up to 160 bytes; random weights; float32, on the CPU. difference: "
    "from the loss of separate documents in transformers, relative.",
    "flattened: DataCollatorWithFlattening, which gives `position_ids` and no mask.",
    "mamba2: a model of transformers alone. tree-recurrence makes its layers follow the borders (absent: not "
    "installed); `sequence.packed` calls its backbone, which carries no state.",
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, rows=(8, "of a batch"), length=(1024, "positions of a row"), batches=(1, "of packed rows"))
    add_options(parser, longest=(1024, "bytes of a document; longer ones are cut"))
    parser.add_argument("--documents", choices=DOCUMENTS, default="functions", help="default: functions")
    add_options(parser, d_model=128, n_heads=4, n_layers=2, repeats=(3, "rounds"))
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=list(KINDS), help="default: all")
    instead = parser.add_mutually_exclusive_group()
    about = "instead: differences of every kind from separate calls"
    instead.add_argument("--differences", action="store_true", help=about)
    about = "instead: differences of the losses of so many steps, padded and packed"
    instead.add_argument("--training", type=at_least(1), metavar="STEPS", help=about)
    about = "instead: losses of a converted GPT-2 and Llama, beside DataCollatorWithFlattening of transformers"
    instead.add_argument("--transformers", action="store_true", help=about)


def run(args: argparse.Namespace) -> Report:
    if args.differences:
        return Report("packing", [_differences(name) for name in every_kind()], DIFFERENCE_NOTES)
    if args.training:
        rows = [_training(name, args.training) for name in ("linear", "Transformer-XL")]
        return Report("packing", rows, TRAINING_NOTES)
    if args.transformers:
        losses_of = {**{family: peer_losses(family) for family in PEERS}, "mamba2": recurrent_losses()}
        return Report("packing", [row for family in losses_of for row in _peers(family, losses_of[family])], PEER_NOTES)
    documents = DOCUMENTS[args.documents](min(args.longest, args.length))
    batches = packed_rows(documents, args.rows, args.length, args.batches)
    return Report("packing", [row for kind in args.kinds for row in _speeds(kind, batches, args)], SPEED_NOTES)


def functions(longest: int) -> Iterator[bytes]:
    """Yield the functions of Python's standard library, of up to `longest` bytes, in random order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(library_files(root))
    shuffle = random.Random(0).shuffle
    shuffle(files)
    for i in range(0, len(files), 10):
        some = [text[:longest] for path in files[i : i + 10] for text in _functions_of(path)]
        shuffle(some)
        yield from some


def dialogues(longest: int) -> Iterator[bytes]:
    """Yield the English dialogues of the package chatterbot-corpus, of up to `longest` bytes, in random order.

    Raises:
        ModuleNotFoundError: If the package is not installed.
    """
    if (package := find_spec("chatterbot_corpus")) is None or package.origin is None:
        raise ModuleNotFoundError("the dialogues are those of chatterbot-corpus; pip install chatterbot-corpus")
    files = sorted(Path(package.origin).with_name("data").glob("english/*.yml"))
    texts = [turns for path in files for turns in yaml.safe_load(path.read_text("utf-8"))["conversations"]]
    random.Random(0).shuffle(texts)
    for turns in texts:
        yield "".join(f"{turn}\n" for turn in turns).encode()[:longest]


DOCUMENTS = {"functions": functions, "dialogues": dialogues}


def whole_functions(longest: int, count: int) -> list[bytes]:
    """Return `count` functions of Python's standard library that have up to `longest` bytes."""
    return list(islice((text for text in functions(longest + 1) if len(text) <= longest), count))


def _functions_of(path: Path) -> Iterator[bytes]:
    text = path.read_bytes()
    ends = [0]
    for line in text.splitlines(keepends=True):
        ends.append(ends[-1] + len(line))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            yield text[ends[node.lineno - 1] + node.col_offset : ends[node.end_lineno - 1] + node.end_col_offset]


# ---------------------------------------------------------------------------------------------------- speed and memory


class Rows(NamedTuple):
    """Documents in the rows of a batch: tokens (B, N), numbers of valid positions (B,), and starts (B, N)."""

    tokens: Tensor
    lengths: Tensor
    starts: Tensor

    @property
    def documents(self) -> list[Tensor]:
        """The tokens of each document."""
        rows = [row[:n] for row, n in zip(self.tokens, self.lengths, strict=True)]
        cuts = [starts[:n].nonzero()[1:, 0] for starts, n in zip(self.starts, self.lengths, strict=True)]
        return [d for row, cut in zip(rows, cuts, strict=True) for d in row.tensor_split(cut)]


def packed_rows(documents: Iterator[bytes], rows: int, n: int, batches: int) -> list[Rows]:
    """Fill the rows of each batch by first-fit, until the next document fits in none of the last batch.

    Args:
        documents: Of up to `n` tokens.
        rows: Rows of a batch.
        n: Positions of a row.
        batches: Number of batches.
    """
    result: list[Rows] = []
    content: list[list[bytes]] = [[] for _ in range(rows)]
    for document in documents:
        place = next((row for row in content if sum(map(len, row)) + len(document) <= n), None)
        if place is None:
            result.append(_rows(content))
            if len(result) == batches:
                return result
            content = [[] for _ in range(rows)]
            place = content[0]
        place.append(document)
    return [*result, _rows(content)]


def padded_rows(documents: Sequence[Tensor], positions: int) -> list[Rows]:
    """Give each document a row, in batches of at most `positions` positions."""
    batches: list[list[Tensor]] = [[]]
    for document in documents:
        longest = max(map(len, [*batches[-1], document]))
        if longest * (len(batches[-1]) + 1) > positions:
            batches.append([])
        batches[-1].append(document)
    return [_rows([[bytes(d.tolist())] for d in batch]) for batch in batches]


def _rows(content: list[list[bytes]]) -> Rows:
    rows = [torch.tensor(list(b"".join(row))) for row in content]
    marks = [[int(i == 0) for document in row for i in range(len(document))] for row in content]
    starts = pad_sequence([torch.tensor(row, dtype=torch.bool) for row in marks], batch_first=True)
    return Rows(pad_sequence(rows, batch_first=True), torch.tensor([len(row) for row in rows]), starts)


class Reader:
    """Computes gradients of a model from batches of documents. Each token has a random vector.

    Args:
        model: The model.
        batches: The batches.
        call: Calls the model with x, starts and lengths.
        device: The device of the model.
    """

    def __init__(
        self, model: SequenceModule, batches: list[Rows], call: Callable[..., Tensor], device: torch.device
    ) -> None:
        self.model, self.call = model, call
        vectors = torch.randn(N_BYTES, model.d_input, generator=torch.Generator().manual_seed(0))
        self.inputs = [(vectors[b.tokens].to(device), b.starts.to(device), b.lengths.to(device)) for b in batches]

    def __call__(self) -> None:
        """Compute the gradients of each batch."""
        for batch in self.inputs:
            self.model.zero_grad()
            self.call(self.model, *batch)[..., 0].sum().backward()

    @torch.no_grad()
    def positions(self) -> int:
        """Count the positions that the first attention reads."""
        computed: list[int] = []
        attention = next(module for module in self.model.modules() if isinstance(module, attentions.Attention))
        hook = attention.register_forward_pre_hook(lambda _, given: computed.append(given[0][..., 0].numel()))
        for batch in self.inputs:
            self.call(self.model, *batch)
        hook.remove()
        return sum(computed)


def _by_borders(model: SequenceModule, x: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
    return sequence.packed(model, x, starts, None, lengths, keep_state=False)[0]


def _without_borders(model: SequenceModule, x: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
    return model(x, None, lengths)[0]


def methods(model: SequenceModule, batches: list[Rows], device: torch.device) -> dict[str, Reader]:
    """Return a reader for each way to lay out the documents of packed batches."""
    documents = [document for batch in batches for document in batch.documents]
    positions = batches[0].tokens.numel()
    by_length = sorted(documents, key=len)
    made = partial(Reader, model, device=device)
    return {
        "padded": made(padded_rows(documents, positions), _without_borders),
        SORTED: made(padded_rows(by_length, positions), _without_borders),
        PACKED: made(batches, _by_borders),
        "joined": made(batches, _without_borders),
    }


def _speeds(kind: str, batches: list[Rows], args: argparse.Namespace) -> list[Row]:
    torch.manual_seed(0)
    model = Transformer(args.d_model, args.n_heads, args.n_layers, attention=KINDS[kind]).to(args.device)
    readers = methods(model, batches, args.device)
    peaks = {name: peak_bytes(reader, args.device) for name, reader in readers.items()}
    seconds = timed(kind, readers, args)
    tokens = sum(int(batch.lengths.sum()) for batch in batches)
    return [
        {
            "kind": kind,
            "rows": name,
            "tokens/s": seconds[name].map(lambda s: tokens / s),
            "packed's tokens/s ÷ this": seconds[name] / seconds[PACKED],
            "positions ÷ tokens": reader.positions() / tokens,
            "peak, MiB": peaks[name] / MIB,
            "packed's peak ÷ this": peaks[PACKED] / peaks[name],
        }
        for name, reader in readers.items()
    ]


# --------------------------------------------------------------------------------------------------------- differences


def every_kind() -> dict[str, Callable[[], SequenceModule]]:
    """Return every attention kind and the LSTM, with their default options."""
    exported = [getattr(attentions, name) for name in attentions.__all__]
    kinds = [k for k in exported if isinstance(k, type) and issubclass(k, attentions.Attention) and not isabstract(k)]
    made = {k.__name__: partial(k, 64, 4) for k in kinds}
    return {**made, "LSTM": partial(LSTM, 64, 1)}


def _differences(name: str) -> Row:
    types = (torch.float64, torch.float32)
    columns = {f"{cut}, {str(t).removeprefix('torch.')}": (sizes, t) for t in types for cut, sizes in CUTS.items()}
    return {"kind": name, **{c: difference(every_kind()[name], *given) for c, given in columns.items()}}


def difference(kind: Callable[[], SequenceModule], sizes: list[int], dtype: torch.dtype) -> float:
    """Return the largest relative difference of a packed row from its sequences, each called by itself."""
    torch.manual_seed(0)
    module = kind().to(dtype).eval()
    x = torch.randn(1, sum(sizes), module.d_input, dtype=dtype, requires_grad=True)
    more, weights = torch.randn(1, 3, module.d_input, dtype=dtype), torch.randn(module.d_model, dtype=dtype)
    parameters = list(module.parameters())

    def results(y: Tensor, state: Any) -> list[Tensor]:
        of_x, *rest = torch.autograd.grad((y * weights).sum(), [x, *parameters], materialize_grads=True)
        # Together: the gradient of softmax attention's key bias is 0 but for rounding.
        return [y, of_x, torch.cat([g.flatten() for g in rest]), module(more, sequence.detach(state))[0]]

    starts = sequence.starts_of(torch.tensor([0, *sizes]).cumsum(0))
    alone = [module(piece) for piece in x.split(sizes, 1)]
    expected = results(torch.cat([y for y, _ in alone], 1), alone[-1][1])
    return largest_relative_difference(results(*sequence.packed(module, x, starts)), expected)


# ------------------------------------------------------------------------------------------------------------ training


def _batch(documents: Sequence[bytes], packed: bool) -> TokenBatch:
    targets = [torch.tensor(list(d)) for d in documents]
    inputs = [torch.tensor([START, *d[:-1]]) for d in documents]
    lengths = torch.tensor([len(d) for d in documents])
    if packed:
        starts = sequence.starts_of(torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]))
        return TokenBatch(torch.cat(inputs)[None], torch.cat(targets)[None], starts=starts)
    padded = partial(pad_sequence, batch_first=True)
    return TokenBatch(padded(inputs), padded(targets, padding_value=IGNORE), lengths)


def losses(kind: str, documents: Sequence[bytes], packed: bool) -> Tensor:
    """Train a small model on 4 documents a step, and return the loss of each step."""
    torch.manual_seed(0)
    model = LanguageModel(Transformer(16, 2, 1, attention=KINDS[kind]), N_TOKENS, unit="byte").double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    values = []
    for i in range(0, len(documents), 4):
        loss = model.objective(_batch(documents[i : i + 4], packed)).loss
        values.append(loss.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return torch.stack(values)


def _training(kind: str, steps: int) -> Row:
    documents = whole_functions(160, 4 * steps)
    padded, packed = (losses(kind, documents, p) for p in (False, True))
    first, last = padded[0].item(), padded[-20:].mean().item()
    gap = ((packed - padded).abs() / padded).max().item()
    return {"kind": kind, "first loss": first, "mean of the last 20": last, "largest difference": gap}


# ------------------------------------------------------------------------------------------------------------ the peer

LLAMA = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
PEERS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_positions": 1024, "n_embd": 16, "n_layer": 2, "n_head": 2},
    "llama": {**LLAMA, "max_position_embeddings": 1024},
}


def _peers(family: str, values: dict[str, float]) -> list[Row]:
    first = next(iter(values.values()))
    return [
        {"model": family, "computed by": name, "loss": f"{loss:.7f}", "difference": abs(loss - first) / first}
        for name, loss in values.items()
    ]


@torch.no_grad()
def peer_losses(family: str) -> dict[str, float]:
    """Return the mean loss of the same documents and weights, first of separate documents in transformers."""
    from lit_effattn.interchange.convert import convert

    model = _random_model(family, **PEERS[family])
    with TemporaryDirectory() as folder:
        model.save_pretrained(Path(folder, "hf"))
        convert(Path(folder, "hf"), Path(folder, "ours"))
        ours = LanguageModel.load_from_checkpoint(Path(folder, "ours", "model.ckpt")).eval()

    documents, flattened = _flattened()
    values = {SEPARATE: _separate_loss(model, documents)}
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        for cache in (True, False):
            how = f"transformers, flattened, {implementation}, use_cache={cache}"
            values[how] = model(**flattened, use_cache=cache).loss.item()
    values |= {
        f"lit-effattn, {how}": ours(_batch([bytes(d[1:]) for d in documents], how == PACKED)).sum().item()
        / sum(len(d) - 1 for d in documents)
        for how in ("padded", PACKED)
    }
    return values


@torch.no_grad()
def recurrent_losses() -> dict[str, float]:
    """Return the mean loss of a Mamba2 on the same documents, first of separate documents."""
    options = {"expand": 2, "num_heads": 4, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 64}
    model = _random_model("mamba2", hidden_size=16, num_hidden_layers=2, **options)
    documents, flattened = _flattened()
    flattened["use_cache"] = False
    borders = torch.tensor([0, *map(len, documents)]).cumsum(0)
    values = {SEPARATE: _separate_loss(model, documents), "transformers, flattened": model(**flattened).loss.item()}
    if find_spec("tree_recurrence") is not None:
        import tree_recurrence

        tree = {"tree_kv_index": torch.arange(int(borders[-1])), "tree_cu_seqlens_q": borders}
        tree_recurrence.install(model)
        values["transformers, flattened, tree-recurrence"] = model(
            **flattened, **tree, tree_cu_seqlens_k=borders
        ).loss.item()
        tree_recurrence.uninstall(model)
    x = model.get_input_embeddings()(flattened["input_ids"])
    hidden, _ = sequence.packed(_Backbone(model.backbone), x, sequence.starts_of(borders))
    logits, labels = model.lm_head(hidden)[0, :-1], flattened["labels"][0, 1:]
    values["transformers, lit-effattn's `sequence.packed`"] = F.cross_entropy(logits, labels).item()
    return values


class _Backbone(torch.nn.Module):
    """The backbone of a model of transformers, as `sequence.packed` calls it; it returns no state."""

    causal = True

    def __init__(self, backbone: torch.nn.Module) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, x: Tensor, state: None, lengths: Tensor) -> tuple[Tensor, None]:
        mask = sequence.valid_positions(lengths, x.size(1)).long()
        return self.backbone(inputs_embeds=x, attention_mask=mask, use_cache=False)[0], state


SEPARATE = "transformers, separate"


def _random_model(family: str, **options: Any) -> Any:
    """Return a tiny model of transformers with random weights."""
    import transformers

    tokens = {"vocab_size": N_TOKENS, "bos_token_id": START, "eos_token_id": START, "pad_token_id": 0}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(family, **tokens, **options)
    ).eval()
    for p in model.parameters():
        p.copy_(0.4 * torch.randn_like(p) + (p.ndim == 1))
    return model


def _flattened() -> tuple[list[list[int]], dict[str, Any]]:
    """Return documents, and the row that DataCollatorWithFlattening makes of them."""
    import transformers

    documents = [[START, *text] for text in whole_functions(160, 16)]
    return documents, transformers.DataCollatorWithFlattening()([{"input_ids": d} for d in documents])


def _separate_loss(model: Any, documents: list[list[int]]) -> float:
    """Return the mean loss over all tokens of documents that are called one by one."""
    total = sum(model(d, labels=d).loss.item() * (d.size(1) - 1) for d in map(torch.tensor, ([d] for d in documents)))
    return float(total) / sum(len(d) - 1 for d in documents)
