import io
import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lit_effattn.nn.adaptive import AdaptiveEmbedding, AdaptiveHead
from lit_effattn.nn.heads import CategoricalHead, Head, MixtureOfLogisticsHead
from tests.support.tensor_sizes import Largest

D, V, CUTOFFS = 8, 23, [4, 9, 15]
SETTINGS = [(CUTOFFS, 2.0), (CUTOFFS, 1.0), ([1], 8.0), ([10, 22], 1.5)]
settings = pytest.mark.parametrize(("cutoffs", "div_value"), SETTINGS)


def shaken(module: nn.Module) -> nn.Module:
    """Make every parameter, biases too, of size 1."""
    with torch.no_grad():
        for p in module.parameters():
            p.normal_()
    return module


def make(cutoffs=CUTOFFS, div_value: float = 2.0) -> AdaptiveHead:
    torch.manual_seed(0)
    return shaken(AdaptiveHead(D, V, cutoffs=cutoffs, div_value=div_value).double())


def vector_of(bands: nn.Module, token: int) -> torch.Tensor:
    """Return P_i e_w by the definition."""
    starts = [0, *bands.cutoffs.tolist()]
    band = max(i for i, start in enumerate(starts) if start <= token)
    e = bands.rows[band][token - starts[band]]
    projected = [i for i, rows in enumerate(bands.rows) if rows.size(1) < D]
    return bands.projections[projected.index(band)] @ e if band in projected else e


def composed(head: AdaptiveHead, h: torch.Tensor) -> torch.Tensor:
    """Return p (n_levels) for one hidden state: the two softmaxes, token by token."""
    starts = [0, *head.bands.cutoffs.tolist(), V]

    def scores(band: int) -> list:
        tokens = range(starts[band], starts[band + 1])
        return [vector_of(head.bands, w) @ h + head.biases[band][w - starts[band]] for w in tokens]

    bands = [w @ h + b for w, b in zip(head.band_proj.weight, head.band_proj.bias, strict=True)]
    first = torch.stack(scores(0) + bands).exp()
    first = first / first.sum()
    p = list(first[: starts[1]])
    for band in range(1, len(starts) - 1):
        within = torch.stack(scores(band)).exp()
        p += list(within / within.sum() * first[starts[1] + band - 1])
    return torch.stack(p)


@settings
def test_the_two_softmaxes_by_hand(cutoffs: list[int], div_value: float):
    head = make(cutoffs, div_value)
    h = torch.randn(3, 2, D, dtype=torch.float64)
    expected = torch.stack([composed(head, row) for row in h.flatten(0, 1)]).log().view(3, 2, V)
    torch.testing.assert_close(head.log_probs(h), expected)
    torch.testing.assert_close(expected.exp().sum(-1), torch.ones(3, 2, dtype=torch.float64))


@settings
@pytest.mark.parametrize("targets", ["all", "frequent", "one band"])
def test_the_loss_is_read_off_the_table(cutoffs: list[int], div_value: float, targets: str):
    """With gradients, and where most bands have no target."""
    head = make(cutoffs, div_value)
    last = max(start for start in [0, *cutoffs])
    target = {"all": torch.randperm(V), "frequent": torch.zeros(5), "one band": torch.full((5,), last)}[targets].long()
    target = target[None]
    h = torch.randn(*target.shape, D, dtype=torch.float64, requires_grad=True)
    expected = Head.nll(head, h, target)
    nll = head.nll(h, target)
    assert nll.shape == target.shape
    torch.testing.assert_close(nll, expected)
    wanted = [h, *head.parameters()]
    found = torch.autograd.grad(nll.sin().sum(), wanted)  # None of them is None: DDP waits for every gradient
    torch.testing.assert_close(found, torch.autograd.grad(expected.sin().sum(), wanted))


def test_no_targets_at_all():
    head = make()
    nll = head.nll(torch.empty(0, D, dtype=torch.float64), torch.empty(0, dtype=torch.long))
    assert nll.shape == (0,)
    nll.sum().backward()
    assert all((p.grad == 0).all() for p in head.parameters())


def test_the_loss_holds_no_position_by_vocabulary_matrix():
    """Of all tensors that the forward pass makes or keeps, none is of that size."""
    n, vocabulary = 300, 5000
    head = AdaptiveHead(16, vocabulary, cutoffs=[100, 1000])
    target = torch.arange(n) % 100
    target[:10] = 4000
    with Largest() as largest:
        head.nll(torch.randn(n, 16), target).sum().backward()
    assert largest.elements == 10 * 4000  # the targets of the rarest band, times its tokens
    with Largest() as largest:
        head.log_probs(torch.randn(n, 16))
    assert largest.elements >= n * vocabulary


def test_loss_and_table_are_float32():
    head = AdaptiveHead(D, V, cutoffs=CUTOFFS, div_value=2.0)
    h, target = torch.randn(50, D), torch.randint(V, (50,))
    expected = head.nll(h, target)
    with torch.autocast("cpu", torch.bfloat16):
        nll, table = head.nll(h, target), head.log_probs(h)
    assert nll.dtype == table.dtype == torch.float32
    torch.testing.assert_close(nll, expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(table.exp().sum(-1), torch.ones(50))
    narrow = head.bfloat16()
    assert narrow.nll(h.bfloat16(), target).dtype == narrow.log_probs(h.bfloat16()).dtype == torch.float32


def test_the_training_loss_is_left_out_of_what_is_compiled():
    """Compiled, it would hold a position × vocabulary matrix."""
    torch._dynamo.reset()
    head, h, target = make(), torch.randn(4, D, dtype=torch.float64), torch.tensor([0, 3, 14, 22])
    seen = []
    compiled = torch.compile(lambda h: head.loss(2 * h, target), backend=lambda graph, _: seen.append(graph) or graph)
    torch.testing.assert_close(compiled(h), head.loss(2 * h, target))
    assert [str(node.target) for graph in seen for node in graph.graph.nodes if node.op == "call_function"] == [
        "<built-in function mul>"
    ]


# ------------------------------------------------------------------------------------------------------ the embedding


@settings
def test_every_token_has_its_vector(cutoffs: list[int], div_value: float):
    embedding = shaken(AdaptiveEmbedding(V, D, cutoffs=cutoffs, div_value=div_value).double())
    tokens = torch.stack([torch.randperm(V), torch.arange(V)])
    y = embedding(tokens)
    expected = torch.stack([torch.stack([vector_of(embedding.bands, w) for w in row]) for row in tokens.tolist()])
    torch.testing.assert_close(y, expected)
    wanted = list(embedding.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(y.sin().sum(), wanted), torch.autograd.grad(expected.sin().sum(), wanted)
    )


def test_a_projection_of_the_first_band():
    """Two of them: the embedding's, and the head's own, through which it reads frequent tokens and bands."""
    for div_value in [1.0, 2.0]:
        options = {"cutoffs": CUTOFFS, "div_value": div_value, "project_first": True}
        embedding, head = AdaptiveEmbedding(V, D, **options), AdaptiveHead(D, V, **options)
        head.tie(embedding)
        model = shaken(nn.ModuleList([embedding, head]).double())
        bands, tokens = embedding.bands, torch.arange(V)
        h = torch.randn(D, dtype=torch.float64)
        vectors = [vector_of(bands, w) for w in range(V)]
        expected = torch.stack([embedding.first_proj.weight @ v if w < 4 else v for w, v in enumerate(vectors)])
        seen = head.first_proj.weight @ h  # P_0ᵀ h
        frequent = torch.stack([v @ seen + b for v, b in zip(vectors, head.biases[0], strict=False)])
        first = torch.cat([frequent, head.band_proj.weight @ seen + head.band_proj.bias]).log_softmax(-1)
        rare = [
            torch.stack([vectors[w] @ h for w in range(start, end)]).add(bias).log_softmax(-1) + of_band
            for start, end, bias, of_band in zip(CUTOFFS, [*CUTOFFS[1:], V], head.biases[1:], first[4:], strict=True)
        ]
        log_probs = torch.cat([first[:4], *rare])
        torch.testing.assert_close(embedding(tokens), expected)
        torch.testing.assert_close(head.log_probs(h), log_probs)
        torch.testing.assert_close(head.nll(h.expand(V, D), tokens), -log_probs)
        wanted = list(model.parameters())
        found = torch.autograd.grad(
            embedding(tokens).sin().sum() + head.nll(h.expand(V, D), tokens).sin().sum(), wanted
        )
        torch.testing.assert_close(
            found, torch.autograd.grad(expected.sin().sum() - log_probs.sin().sum(), wanted), rtol=1e-9, atol=1e-9
        )


def test_projections_as_small_as_in_transformer_xls_code():
    options = {"cutoffs": [1000, 2000], "project_first": True, "proj_init_std": 0.01}
    for module in (AdaptiveEmbedding(3000, 256, **options), AdaptiveHead(256, 3000, **options)):
        for projection in (module.first_proj.weight, *module.bands.projections):
            assert projection.std().item() == pytest.approx(0.01, rel=0.05)
    default = AdaptiveEmbedding(3000, 256, cutoffs=[1000, 2000], project_first=True)
    assert default.first_proj.weight.std().item() == pytest.approx(1 / 16, rel=0.05)


def test_widths():
    bands = AdaptiveEmbedding(V, 410, cutoffs=CUTOFFS, div_value=4.0).bands
    assert [tuple(rows.shape) for rows in bands.rows] == [(4, 410), (5, 102), (6, 25), (8, 6)]
    assert [tuple(p.shape) for p in bands.projections] == [(410, 102), (410, 25), (410, 6)]
    bands = AdaptiveEmbedding(V, 410, cutoffs=CUTOFFS, div_value=1.0).bands
    assert [tuple(rows.shape) for rows in bands.rows] == [(4, 410), (5, 410), (6, 410), (8, 410)]
    assert len(bands.projections) == 0


def test_every_band_starts_equally_large():
    embedding = AdaptiveEmbedding(4000, 256, cutoffs=[1000, 2000, 3000])
    for tokens in torch.arange(4000).split(1000):
        assert embedding(tokens).std().item() == pytest.approx(0.02, rel=0.1)


def test_bands_without_a_token_have_a_gradient():
    embedding = AdaptiveEmbedding(V, D, cutoffs=CUTOFFS, div_value=2.0)
    embedding(torch.zeros(1, 2, dtype=torch.long)).sum().backward()
    assert all(p.grad is not None for p in embedding.parameters())
    assert not any(p.grad.any() for p in embedding.parameters() if p is not embedding.bands.rows[0])


def test_a_token_of_another_vocabulary():
    for token in [-1, V]:
        with pytest.raises(IndexError):
            AdaptiveEmbedding(V, D, cutoffs=CUTOFFS, div_value=2.0)(torch.tensor([0, token]))


def test_embedding_and_loss_compile():
    model, tokens = tied(), torch.arange(V)

    def loss(tokens: torch.Tensor) -> torch.Tensor:
        return model["head"].nll(model["embedding"](tokens), tokens)

    torch.testing.assert_close(torch.compile(loss, backend="aot_eager", fullgraph=True)(tokens), loss(tokens))


# ---------------------------------------------------------------------------------------------------------------- tied


def tied() -> nn.ModuleDict:
    head = AdaptiveHead(D, V, cutoffs=CUTOFFS, div_value=2.0)
    embedding = AdaptiveEmbedding(V, D, cutoffs=CUTOFFS, div_value=2.0)
    head.tie(embedding)
    return nn.ModuleDict({"embedding": embedding, "head": head})


def test_tied_means_one_set_of_vectors():
    model = shaken(tied())
    own = {name for name, _ in model["head"].named_parameters()} - {
        f"bands.{name}" for name, _ in model["embedding"].bands.named_parameters()
    }
    assert len(list(model.parameters())) == len(own) + len(list(model["embedding"].parameters()))
    h = torch.randn(2, D)
    vectors = model["embedding"](torch.arange(V))
    rare = torch.arange(15, V)  # within a band, log p(w) is e_w · h + b_w but for a constant
    expected = vectors[rare] @ h.T + model["head"].biases[3][:, None]
    found = model["head"].log_probs(h)[:, rare].T
    torch.testing.assert_close(found - found[0], expected - expected[0], rtol=1e-4, atol=1e-4)


def test_tied_stays_tied_through_a_checkpoint():
    model, fresh = shaken(tied()), tied()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert fresh["head"].bands is fresh["embedding"].bands
    torch.testing.assert_close(fresh["head"].log_probs(torch.ones(D)), model["head"].log_probs(torch.ones(D)))


def test_a_categorical_head_is_tied():
    head, embedding = CategoricalHead(D, V), nn.Embedding(V, D)
    before = embedding.weight.clone()
    head.tie(embedding)
    assert head.proj.weight is embedding.weight
    assert torch.equal(embedding.weight, before)
    h = torch.randn(3, D)
    torch.testing.assert_close(head.log_probs(h), (h @ before.T + head.proj.bias).log_softmax(-1))


@pytest.mark.parametrize(
    ("head", "embedding", "words"),
    [
        (CategoricalHead(D, V), nn.Embedding(V, D + 1), ["(23, 8)", "(23, 9)", "d_input"]),
        (CategoricalHead(D, V), nn.Embedding(V + 1, D), ["(23, 8)", "(24, 8)"]),
        (CategoricalHead(D, V), AdaptiveEmbedding(V, D, cutoffs=[9]), ["Embedding", "AdaptiveEmbedding"]),
        (AdaptiveHead(D, V, cutoffs=[9]), nn.Embedding(V, D), ["AdaptiveEmbedding", "not to Embedding"]),
        (
            AdaptiveHead(D, V, cutoffs=[9]),
            AdaptiveEmbedding(V, D, cutoffs=[9], div_value=2.0),
            ["9 × 8, 14 × 2", "9 × 8, 14 × 4", "cutoffs"],
        ),
        (AdaptiveHead(D, V, cutoffs=[9]), AdaptiveEmbedding(V, D, cutoffs=[8]), ["9 × 8, 14 × 2", "8 × 8, 15 × 2"]),
        (MixtureOfLogisticsHead(D, V), nn.Embedding(V, D), ["MixtureOfLogisticsHead"]),
    ],
)
def test_what_does_not_fit_is_not_tied(head: Head, embedding: nn.Module, words: list[str]):
    with pytest.raises(ValueError, match=".*".join(map(re.escape, words))):
        head.tie(embedding)


# ----------------------------------------------------------------------------------------------------- label smoothing


def test_smoothing_spreads_the_target():
    """The cross-entropy with a distribution: 1 − ε on the target, and ε / n_levels on every level, the target too."""
    for kind in [CategoricalHead, MixtureOfLogisticsHead, partial(AdaptiveHead, cutoffs=CUTOFFS, div_value=2.0)]:
        head = kind(D, V).double()
        h, target = torch.randn(2, 3, D, dtype=torch.float64), torch.randint(V, (2, 3))
        share = 0.1
        q = (1 - share) * F.one_hot(target, V).double() + share / V
        expected = -(q * head.log_probs(h)).sum(-1)
        torch.testing.assert_close(head.loss(h, target, label_smoothing=share), expected)
        assert torch.equal(head.loss(h, target), head.nll(h, target))
        for bad in (-0.1, 1.0):
            with pytest.raises(ValueError, match=f"label_smoothing={bad}"):
                head.loss(h, target, bad)


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("kind", [AdaptiveEmbedding, lambda n, d, **options: AdaptiveHead(d, n, **options)])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cutoffs": []}, r"cutoffs=\[\].*23"),
        ({"cutoffs": [0, 4]}, r"cutoffs=\[0, 4\]"),
        ({"cutoffs": [4, 4]}, r"cutoffs=\[4, 4\]"),
        ({"cutoffs": [9, 4]}, r"cutoffs=\[9, 4\]"),
        ({"cutoffs": [4, 23]}, r"cutoffs=\[4, 23\] .*23"),
        ({"cutoffs": [4], "div_value": 0.5}, r"div_value=0\.5"),
        ({"cutoffs": [4], "proj_init_std": 0.0}, r"proj_init_std=0\.0 must be above 0"),
        ({"cutoffs": [4, 9], "div_value": 4.0}, r"div_value=4\.0 with d_model=8 and 2 cutoffs"),
    ],
)
def test_bad_options_are_named(kind, options: dict, words: str):
    with pytest.raises(ValueError, match=words):
        kind(V, D, **options)
