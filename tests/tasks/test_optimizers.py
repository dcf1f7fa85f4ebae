"""Which parameters have weight decay; Muon for hidden matrices and AdamW for the rest, as one optimiser."""

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor, nn

from lit_effattn import LSTM, LanguageModel, PixelModel, SequenceToSequence, SpeechRecognizer, Transformer
from lit_effattn.attention import (
    DeltaNetAttention,
    GatedDeltaNetAttention,
    KimiDeltaAttention,
    Mamba2Attention,
    ShawAttention,
    SoftmaxAttention,
    SoftmaxCrossAttention,
    TransformerXLAttention,
    WindowedLinearAttention,
)
from lit_effattn.attention.positions import LearnedPositions
from lit_effattn.cli import main
from lit_effattn.nn.adaptive import AdaptiveHead
from lit_effattn.nn.encoder_decoder import EncoderDecoder
from lit_effattn.tasks.optimizers import MuonWithAdamW, hidden_matrices, without_decay
from lit_effattn.tasks.schedules import WarmupStableDecay
from tests.support.commands import assert_same_end, last, spec


def names(model: nn.Module, parameters: list[Tensor]) -> set[str]:
    wanted = {id(p) for p in parameters}
    return {name for name, p in model.named_parameters() if id(p) in wanted}


def model(**options) -> PixelModel:
    torch.manual_seed(0)
    return PixelModel(Transformer(8, 2, 1), (2, 2, 1), 4, optimizer=MuonWithAdamW, **options)


def steps(made: PixelModel, optimizer: torch.optim.Optimizer, n: int, first: int = 0) -> None:
    for i in range(first, first + n):
        made.zero_grad()
        generator = torch.Generator().manual_seed(i)
        made.objective(torch.randint(4, (3, 4), generator=generator)).loss.backward()
        optimizer.step()


def test_each_parameter_takes_the_step_of_its_rule():
    """Two steps, beside torch's two optimisers; a step of Muon has 0.2 times the rate as its root mean square."""
    made, twin = model(), model()
    optimizer = MuonWithAdamW(made.parameters(), lr=0.01, weight_decay=0.3, adamw_lr=0.02, betas=(0.8, 0.9), eps=1e-3)
    optimizer.use_muon_for(hidden_matrices(made))
    hidden = names(made, hidden_matrices(made))
    split = [[p for name, p in twin.named_parameters() if (name in hidden) is want] for want in (True, False)]
    muon = torch.optim.Muon(split[0], lr=0.01, weight_decay=0.3, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(split[1], lr=0.02, weight_decay=0.3, betas=(0.8, 0.9), eps=1e-3)
    for i in range(2):
        steps(made, optimizer, 1, first=i)
        before = [p.detach().clone() for p in split[0]]
        steps(twin, muon, 1, first=i)
        adamw.step()
        optimizer, made = copy.deepcopy((optimizer, made))  # goes on
        for p, old in zip(split[0], before, strict=True):
            assert 0.1 < (p - (1 - 0.003) * old).square().mean().sqrt() / 0.01 < 0.3
    for (name, p), q in zip(made.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q), name


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (
            lambda: LanguageModel(Transformer(8, 2, 1, attention=TransformerXLAttention), 9, tie=True),
            {f"backbone.blocks.0.attention.{x}_proj.weight" for x in ("q", "k", "v", "r", "out")}
            | {f"backbone.blocks.0.feed_forward.{x}.weight" for x in ("up", "down")},
        ),
        (
            lambda: LanguageModel(
                Transformer(8, 2, 1, attention=ShawAttention, positions=partial(LearnedPositions, max_len=5)), 9
            ),
            {f"backbone.blocks.0.attention.{x}_proj.weight" for x in ("q", "k", "v", "out")}
            | {f"backbone.blocks.0.feed_forward.{x}.weight" for x in ("up", "down")},
        ),
        (
            lambda: LanguageModel(LSTM(8, 2), 9),
            {f"backbone.layers.{i}.weight_{x}" for i in (0, 1) for x in ("ih", "hh")},
        ),
        (
            lambda: SpeechRecognizer(Transformer(8, 2, 1, attention=DeltaNetAttention), 5, ("a", "b"), look_ahead=2),
            {f"backbone.module.blocks.0.attention.{x}_proj.weight" for x in ("q", "k", "v", "out", "beta")}
            | {f"backbone.module.blocks.0.feed_forward.{x}.weight" for x in ("up", "down")},
        ),
    ],
    ids=["transformer_xl", "shaw", "lstm", "convolutions"],
)
def test_hidden_matrices_are_those_of_the_backbone(made, expected: set[str]):
    task = made()
    assert names(task, hidden_matrices(task)) == expected


GATES = {
    Mamba2Attention: ("a_log", "dt_bias", "skip"),
    GatedDeltaNetAttention: ("a_log", "dt_bias"),
    KimiDeltaAttention: ("a_log", "dt_bias"),
    WindowedLinearAttention: ("mixing",),
    SoftmaxAttention: (),
}


def without(made: LanguageModel) -> set[str]:
    """Return the names of the parameters that steps without gradients leave as they are, and check all the others."""
    configured = made.configure_optimizers()
    optimizer = configured["optimizer"] if isinstance(configured, dict) else configured
    before = {name: p.detach().clone() for name, p in made.named_parameters()}
    for p in made.parameters():
        p.data += 1  # decay leaves zeros alone
        p.grad = torch.zeros_like(p)
    optimizer.step()
    rate = 0.5 * 0.25
    for name, p in made.named_parameters():
        if not torch.equal(p, before[name] + 1):
            torch.testing.assert_close(p.detach(), (1 - rate) * (before[name] + 1))
    return {name for name, p in made.named_parameters() if torch.equal(p, before[name] + 1)}


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, MuonWithAdamW])
def test_weight_decay_does_not_apply_to_gates(kind, optimizer):
    """Nor to biases and gains, if the option says so."""
    backbone = Transformer(8, 2, 2, attention=partial(kind, bias=True))
    adamw = partial(optimizer, lr=0.5, weight_decay=0.25)
    gates = {f"backbone.blocks.{i}.attention.{name}" for i in (0, 1) for name in GATES[kind]}
    assert without(LanguageModel(backbone, 9, optimizer=adamw)) == gates
    made = LanguageModel(backbone, 9, optimizer=adamw, decay_biases_and_gains=False)
    vectors = {name for name, _ in made.named_parameters() if name.split(".")[-1] in ("bias", "gain") or "norm" in name}
    assert without(made) == gates | vectors


def test_biases_and_gains_are_those_of_every_kind_of_layer():
    made = LanguageModel(Transformer(8, 2, 1, attention=TransformerXLAttention, norm_kind="rms"), 9)
    exempt = names(made, without_decay(made, decay_biases_and_gains=False))
    assert {"backbone.blocks.0.attention.u", "backbone.blocks.0.attention.v", "backbone.norm.weight"} < exempt
    assert not [name for name in exempt if name.endswith("weight") and "norm" not in name]
    made = LanguageModel(LSTM(8, 1), 9, head=partial(AdaptiveHead, cutoffs=[4, 6], div_value=2))
    exempt = names(made, without_decay(made, decay_biases_and_gains=False))
    assert {name for name in exempt if name.startswith("head.biases")} == {f"head.biases.{i}" for i in range(3)}
    made = LanguageModel(LSTM(8, 1), 9)
    assert names(made, without_decay(made, decay_biases_and_gains=False)) == {
        "backbone.layers.0.bias",
        "head.proj.bias",
    }


def test_groups_are_divided_only_where_there_is_decay():
    made = LanguageModel(Transformer(8, 2, 1, attention=Mamba2Attention), 9)
    sizes = []
    for optimizer in (torch.optim.RAdam, partial(torch.optim.AdamW, weight_decay=0.1), torch.optim.Rprop):
        made._optimizer = optimizer
        sizes.append([len(group["params"]) for group in made.configure_optimizers().param_groups])
    n = len(list(made.parameters()))
    assert sizes == [[n], [n - 3, 3], [n]]


def test_a_module_can_name_only_its_own_parameters():
    class Misspelt(Mamba2Attention):
        no_weight_decay = ("a_logs",)

    class OneName(Mamba2Attention):
        no_weight_decay = "skip"

    for kind in (Misspelt, OneName):
        with pytest.raises(ValueError, match=rf"{kind.__name__}\.no_weight_decay=.*a_log, dt_bias, skip"):
            without_decay(Transformer(8, 2, 1, attention=kind))


def test_encoder_and_decoder_are_hidden_and_their_embeddings_are_not():
    backbone = EncoderDecoder(
        Transformer(8, 2, 1, causal=False), Transformer(8, 2, 1, cross_attention=SoftmaxCrossAttention)
    )
    task = SequenceToSequence(backbone, 7, 9)
    hidden = names(task, hidden_matrices(task))
    assert {name.split(".")[1] for name in hidden} == {"encoder", "decoder"}
    assert not [name for name in hidden if "embedding" in name or "bias" in name or "norm" in name]
    assert len(hidden) == 3 * 4 + 2 * 2  # three attentions and two feed-forward networks


def test_a_task_gives_muon_its_hidden_matrices_alone():
    made = model()
    muon, adamw = made.configure_optimizers().param_groups
    assert names(made, muon["params"]) == names(made, hidden_matrices(made))
    assert len(muon["params"]) + len(adamw["params"]) == len(list(made.parameters()))
    assert {"embedding.weight", "head.proj.weight"} < names(made, adamw["params"])


def test_a_schedule_changes_both_rates():
    made = model(lr_scheduler=partial(WarmupStableDecay, total_steps=8, warmup_steps=2, decay_steps=4, decay="linear"))
    made._optimizer = lambda p: MuonWithAdamW(p, lr=1.0, adamw_lr=0.1)
    configured = made.configure_optimizers()
    optimizer, schedule = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    taken = []
    for _ in range(8):
        taken.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    factors = [0.5, 1, 1, 1, 1, 0.75, 0.5, 0.25]
    assert [of_muon for of_muon, _ in taken] == pytest.approx(factors)
    assert [of_adamw for _, of_adamw in taken] == pytest.approx([0.1 * f for f in factors])


def test_the_command_resumes_it_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    config = {
        "model": spec(
            "PixelModel",
            backbone=spec("Transformer", d_model=8, n_heads=2, n_layers=1),
            optimizer="MuonWithAdamW",
            lr_scheduler=spec("WarmupStableDecay", total_steps=4, warmup_steps=1, decay_steps=0.5),
        ),
        "data": spec("PixelSequences", dataset="digits", batch_size=64),
        "trainer": {"limit_val_batches": 0, "enable_progress_bar": False, "logger": False},
    }
    Path("muon.yaml").write_text(yaml.safe_dump(config))
    main(["fit", "--config", "muon.yaml", "--trainer.max_steps", "4", "--trainer.default_root_dir", "whole"])
    main(["fit", "--config", "muon.yaml", "--trainer.max_steps", "2", "--trainer.default_root_dir", "halves"])
    main(["fit", "--ckpt_path", str(last("halves")), "--trainer.max_steps", "4"])
    assert_same_end(last("whole"), last("halves"))
    states = torch.load(last("halves"), weights_only=True)["optimizer_states"][0]["state"].values()
    assert {frozenset(state) for state in states} == {
        frozenset({"momentum_buffer"}),
        frozenset({"step", "exp_avg", "exp_avg_sq"}),
    }


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": -1.0}, r"lr=-1\.0"),
        ({"adamw_lr": -1.0}, r"adamw_lr=-1\.0"),
        ({"momentum": 1.0}, r"momentum=1\.0"),
        ({"ns_steps": 0}, "ns_steps=0"),
        ({"weight_decay": float("nan")}, "weight_decay=nan"),
    ],
)
def test_bad_options_are_named(options: dict, words: str):
    with pytest.raises(ValueError, match=words):
        MuonWithAdamW([torch.zeros(2, 2)], **options)


def test_a_model_without_matrices_is_refused():
    with pytest.raises(ValueError, match=r"no matrices in hidden layers.*AdamW"):
        MuonWithAdamW(nn.LayerNorm(3).parameters())
    embedding = nn.Embedding(3, 2)
    with pytest.raises(ValueError, match="no matrices in hidden layers"):
        MuonWithAdamW(embedding.parameters()).use_muon_for(hidden_matrices(embedding))
    with pytest.raises(ValueError, match="must be tensors"):
        MuonWithAdamW([{"params": list(embedding.parameters())}])
