"""Configurations of the papers' sizes have as many parameters as the papers and the authors' code say, and train."""

from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import yaml
from torch.fx.experimental import _config
from torch.utils._pytree import tree_map

from lit_effattn.cli.command import CLI
from tests.cli.test_command import CONFIGS, built
from tests.support.variants import variants

PAPERS = ("cifar", "enwik8", "iwslt14", "mnist", "sorting", "text8", "wikitext103", "wmt14", "wsj")
OTHERS = {f"enwik8_{kind}" for kind in ("compressive", "linear", "lstm", "performer", "softmax")}
"""Of no paper: made to be compared with enwik8_xl."""
_RUNS: dict[str, tuple[Path, list[str]]] = {**{path.stem: (path, []) for path in CONFIGS}, **variants()}
SIZED = {name: run for name, run in _RUNS.items() if name.startswith(PAPERS) and "small" not in name}
WORDS, STEPPED = (
    267_735,
    ("cifar_linear", "enwik8_xl", "sorting_sticky", "wmt14_en_de_base", "wsj_linear"),
)
"""WikiText-103's words, <eos> and <unk> among them; and the configurations whose step is tested every time."""
COUNTED = (*STEPPED, "enwik8_al_rfou", "enwik8_sparse", "sorting_compressive", "wikitext103_infinite", "wsj_bilstm")
"""Those whose parameters are counted every time: one of each formula."""


def linear(a: int, b: int) -> int:
    """A matrix and a bias."""
    return a * b + b


def softmax(d: int, d_qk: int | None = None) -> int:
    """Vaswani et al. 2017, section 3.2.2, with biases: queries, keys, values, output."""
    return 2 * linear(d, d_qk or d) + 2 * linear(d, d)


def xl(d: int) -> int:
    """Dai et al. 2019, section 3.3: queries, keys, values, positions, output, without biases; without u and v."""
    return 5 * d * d


def long_term(d: int, n_basis: int) -> int:
    """Martins et al. 2022, section 3.1: queries, keys, values, output; μ and σ of N scores."""
    return 4 * d * d + 2 * linear(n_basis, 1)


def authors_long_term(d: int, n_basis: int) -> int:
    """The authors' code: Transformer-XL's queries, no biases of μ and σ; and a gate, a convolution of 3."""
    return 3 * d * d + 2 * n_basis + linear(3 * d, d)


def stack(n_layers: int, d: int, d_ff: int, attention: int, *more: int) -> int:
    """Layers of attentions and a feed-forward, each with a LayerNorm."""
    attentions = (attention, *more)
    return n_layers * (sum(attentions) + linear(d, d_ff) + linear(d_ff, d) + (len(attentions) + 1) * 2 * d)


def translation(vocab_size: int, d: int, d_ff: int) -> int:
    """Vaswani et al. 2017, section 3: 6 + 6 layers and one matrix for embeddings and output."""
    return stack(6, d, d_ff, softmax(d)) + stack(6, d, d_ff, softmax(d), softmax(d)) + vocab_size * d


def images(n_layers: int) -> int:
    """Katharopoulos et al. 2020, section 4.2: embedding of 128 (and of <start>), final LayerNorm, 10 logistics."""
    return (256 + 1) * 128 + stack(n_layers, 256, 1024, softmax(256)) + 2 * 256 + linear(256, 3 * 10)


def speech(attention: int) -> int:
    """Katharopoulos et al. 2020, section 4.3: 9 layers of 6 heads of 32, 40 filters; here 2 phones and the blank."""
    return linear(40, 192) + stack(9, 192, 768, attention) + 2 * 192 + linear(192, 3)


def sorting(attention: int) -> int:
    """Martins et al. 2022, section 4.1: 3 layers with one u and v; 20 types, separator and padding; no output bias."""
    return 22 * 300 + stack(3, 300, 300, attention) + 2 * 300 + 300 * 22


class Size(NamedTuple):
    """How many parameters a configuration has, and who says so."""

    parameters: int
    source: str
    vocab_size: int = 300
    rounded_to: int = 1


MILLION = 10**6
DAI, RUN = "Dai et al. 2019, Table", "the authors' code prints, with the symbols that its data have"
OURS = "no figure is published: by the paper's sizes"
SIZES = {
    "enwik8_xl": Size(41_055_436, RUN, 204),
    "enwik8_xl_large": Size(277 * MILLION, f"{DAI} 2", 204, MILLION),
    "text8_xl": Size(41_055_436 - (204 - 27) * (512 + 1), f"{RUN}; enwik8's, with 27 symbols", 27),
    "text8_xl_large": Size(277 * MILLION, f"{DAI} 3", 27, MILLION),
    "wikitext103_xl": Size(151_107_538, RUN, WORDS),
    "wikitext103_xl_large": Size(285_170_506, f"{RUN}; {DAI} 1 says 257 million", WORDS),
    "wikitext103_infinite": Size(151_107_538 + 16 * long_term(410, 150), OURS, WORDS),
    "enwik8_al_rfou": Size(
        44 * MILLION, "Al-Rfou et al. 2018, 12 layers: 256 outputs of each of 24 heads", 256, MILLION
    ),
    "enwik8_sparse": Size(95 * MILLION, "Child et al. 2019, section 7.2", 257, MILLION),
    "cifar_sparse": Size(59 * MILLION, "Child et al. 2019, Table 1", rounded_to=MILLION),
    **dict.fromkeys(("mnist_linear", "mnist_linear_repository"), Size(images(8), OURS)),
    **dict.fromkeys(("cifar_linear", "cifar_linear_repository", "cifar_softmax"), Size(images(16), OURS)),
    **dict.fromkeys(("wsj_linear", "wsj_performer"), Size(speech(softmax(192)), OURS)),
    "wsj_xl": Size(speech(xl(192) + 2 * 192), f"{OURS}; u and v in every layer"),
    # A cell has 4 gates, which we give one bias each; torch's LSTM has two.
    "wsj_bilstm": Size(
        linear(40, 40) + sum(2 * 4 * linear(d + 320, 320) for d in (40, 640, 640)) + linear(640, 3), OURS
    ),
    "sorting_xl": Size(sorting(xl(300)), OURS, 22),
    "sorting_compressive": Size(sorting(xl(300) + 4 * 300 * 300), OURS, 22),
    **dict.fromkeys(
        ("sorting_infinite", "sorting_sticky"), Size(sorting(xl(300) + authors_long_term(300, 512)), OURS, 22)
    ),
    "wmt14_en_de_base": Size(
        translation(37_000, 512, 2048), "Vaswani et al. 2017, section 3; Table 3: 65 million", 37_000
    ),
    "wmt14_en_de_big": Size(translation(37_000, 1024, 4096), "the same; Table 3: 213 million", 37_000),
    "wmt14_en_fr_big": Size(translation(32_000, 1024, 4096), "the same", 32_000),
    "iwslt14_de_en": Size(translation(10_000, 512, 1024), OURS, 10_000),
}


@cache
def made(name: str) -> CLI:
    """Build a configuration for any data: on the meta device, which computes nothing, unless the loss is CTC's."""
    config, variant = SIZED[name]
    task = yaml.safe_load(config.read_text())["model"]["class_path"]
    flags = ["--data", "tests.support.any_data.AnyData", "--data.batch", task]
    flags += ["--data.vocab_size", str(SIZES[name].vocab_size)]
    if name.startswith("cifar"):
        flags += ["--data.colours", "3", "--data.side", "32"]
    return built(config, *variant, *flags, device="cpu" if name.startswith("wsj") else "meta")


def test_every_configuration_of_a_papers_size_has_its_figure():
    assert SIZES.keys() == SIZED.keys() - OTHERS


@pytest.mark.filterwarnings("ignore:LightningCLI's args")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in COUNTED else pytest.mark.exhaustive) for name in SIZES]
)
def test_parameters_are_as_many_as_the_source_says(name: str):
    figure, source, _, unit = SIZES[name]
    assert abs(sum(p.numel() for p in made(name).model.parameters()) - figure) <= (unit - 1) / 2, source


@pytest.mark.filterwarnings("ignore:LightningCLI's args")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in STEPPED else pytest.mark.exhaustive) for name in SIZES]
)
def test_a_step_of_training(name: str, monkeypatch: pytest.MonkeyPatch):
    """At the paper's size, so on the meta device, which torch.autocast and torch.nonzero do not know as they are."""
    model, data = made(name).model, made(name).datamodule
    device = next(model.parameters()).device
    if device.type == "meta":
        monkeypatch.setattr("torch.autocast", lambda *_, **__: nullcontext())
    batch = tree_map(lambda t: t.to(device) if isinstance(t, torch.Tensor) else t, next(iter(data.train_dataloader())))
    carries = "MemoryCarry" in SIZED[name][0].read_text()
    memory = model.backbone.initial_state(2, device=device) if carries else None
    configured = model.configure_optimizers()
    with torch.device(device), _config.patch(meta_nonzero_assume_all_nonzero=True):
        model.objective(batch, memory)[0].backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    (configured["optimizer"] if isinstance(configured, dict) else configured).step()
