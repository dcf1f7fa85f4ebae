import math
import warnings
from functools import partial
from itertools import product
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.cli import ReduceLROnPlateau
from torch.utils.data import DataLoader

from lit_effattn import Transformer
from lit_effattn.attention import LinearAttention, SoftmaxAttention
from lit_effattn.attention.positions import GridPositions, LearnedPositions
from lit_effattn.callbacks import LastCheckpoint
from lit_effattn.nn.heads import CategoricalHead, MixtureOfLogisticsHead
from lit_effattn.tasks import PixelModel
from lit_effattn.tasks.schedules import WarmupCosine
from tests.callbacks.tiny import trainer

SHAPE, LEVELS = (2, 3, 1), 4


def model(shape=SHAPE, n_levels: int = LEVELS, attention=SoftmaxAttention, **options) -> PixelModel:
    """Return a small model far from uniform, always the same, in float64 and without dropout."""
    torch.manual_seed(5)
    backbone = Transformer(8, 2, 2, attention=attention, positions=GridPositions, init="pytorch")
    made = PixelModel(backbone, shape, n_levels, **options)
    with torch.no_grad():
        made.head.proj.weight.mul_(4)
    return made.double().eval()


def images(n: int, dims: int = 6, n_levels: int = LEVELS) -> torch.Tensor:
    return torch.randint(n_levels, (n, dims), dtype=torch.uint8)


def conditionals(made: PixelModel, image: torch.Tensor) -> list[float]:
    """log2 p(x_t | x_1 … x_{t−1}) one by one, each from a sequence that ends before x_t: start token, x_1 … x_{t−1}."""
    logs = []
    for t, level in enumerate(image.tolist()):
        tokens = torch.tensor([[made.n_levels, *image[:t].tolist()]])
        h, _ = made.backbone(made.embedding(tokens))
        logs.append(made.head.log_probs(h[0, -1])[level].item() / math.log(2))
    return logs


KINDS = {"softmax": SoftmaxAttention, "linear": partial(LinearAttention, chunk_size=2)}
HEADS = [CategoricalHead, partial(MixtureOfLogisticsHead, n_mixtures=2)]


# -------------------------------------------------------------------------------------------------------- likelihood


@pytest.mark.parametrize("head", HEADS, ids=["categorical", "mixture"])
@pytest.mark.parametrize("attention", KINDS)
@torch.no_grad()
def test_bits_are_those_of_the_conditionals(attention: str, head):
    made = model(attention=KINDS[attention], head=head)
    batch = images(4)
    logs = torch.tensor([conditionals(made, image) for image in batch], dtype=torch.float64)
    torch.testing.assert_close(made.nll(batch) / math.log(2), -logs)
    torch.testing.assert_close(made(batch), -logs.mean(1))


@pytest.mark.parametrize("head", HEADS, ids=["categorical", "mixture"])
@pytest.mark.parametrize(("shape", "n_levels"), [((2, 2, 1), 2), ((1, 2, 2), 3)])
@torch.no_grad()
def test_all_images_together_have_probability_1(shape, n_levels: int, head):
    """A wrong start token or shift, a pixel that sees itself or one left out: each breaks the sum."""
    made = model(shape, n_levels, head=head)
    everything = torch.tensor(list(product(range(n_levels), repeat=4)))
    p = made.nll(everything).sum(1).neg().exp()
    assert p.sum().item() == pytest.approx(1, abs=1e-9)
    assert p.max() > 2 * p.min()


@torch.no_grad()
def test_the_first_dimension_may_be_left_out():
    full, rest = model(), model(score_first=False)
    batch = images(3)
    assert rest.nll(batch).shape == (3, 5)
    torch.testing.assert_close(rest.nll(batch), full.nll(batch)[:, 1:])
    torch.testing.assert_close(rest(batch), full.nll(batch)[:, 1:].mean(1) / math.log(2))


def test_training_sees_what_is_scored():
    made = model().train()
    batch = images(3)
    loss = made.training_step(batch)
    torch.testing.assert_close(loss.detach(), made.nll(batch).mean().detach())
    loss.backward()
    assert all(p.grad is not None for p in made.parameters())


def test_prediction_scores_each_image():
    made = model()
    batch = images(3)
    torch.testing.assert_close(made.predict_step(batch), {"bits_per_dim": made(batch)})


@torch.no_grad()
def test_integers_of_any_type_are_levels():
    made, batch = model(), images(2)
    for dtype in (torch.int16, torch.int64):
        assert torch.equal(made.nll(batch.to(dtype)), made.nll(batch))


def test_spread_of_the_embedding():
    for std in (1.0, 0.02):
        made = PixelModel(Transformer(64, 2, 1), (2, 2, 1), 256, embedding_std=std)
        assert made.embedding.weight.std().item() == pytest.approx(std, rel=0.05)


# ----------------------------------------------------------------------------------------------------------- samples


@pytest.mark.parametrize("n_given", [0, 4])
def test_samples_keep_what_is_given(n_given: int):
    made = model(attention=KINDS["linear"])
    given = images(5)[:, :n_given]
    drawn = made.sample(99, given=given, seed=1)
    assert drawn.shape == (5, 6)
    assert torch.equal(drawn[:, :n_given], given.long())
    assert drawn.min() >= 0
    assert drawn.max() < LEVELS


def test_samples_come_as_often_as_they_are_likely():
    """3,000 images of 2×1 pixels against the model's own nll: chi-square."""
    made = model((2, 1, 1), 2)
    n = 3000
    drawn = made.sample(n, seed=2)
    everything = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])
    expected = n * made.nll(everything).sum(1).neg().exp()
    seen = (2 * drawn[:, 0] + drawn[:, 1]).bincount(minlength=4)
    assert ((seen - expected) ** 2 / expected).sum() < 16.3  # 3 degrees of freedom: exceeded once in a thousand


def test_seeds_and_numbers_of_samples():
    made = model()
    assert made.sample().shape == (1, 6)
    assert torch.equal(made.sample(3, seed=7), made.sample(8, seed=7)[:3])
    assert not torch.equal(made.sample(8, seed=7), made.sample(8, seed=8))


def test_settings_reach_the_sampler():
    made = model()
    likeliest = made.sample(4, temperature=0)
    assert (likeliest == likeliest[0]).all()
    assert torch.equal(likeliest, made.sample(4, top_k=1, seed=3))
    assert torch.equal(likeliest, made.sample(4, top_p=1e-9, seed=4))
    steps: list[int] = []
    made.sample(1, progress=lambda it: (steps.append(i) or i for i in it))
    assert steps == list(range(6))


def with_dropout() -> PixelModel:
    backbone = Transformer(8, 2, 1, dropout=0.5)
    return PixelModel(backbone, SHAPE, LEVELS)


def test_samples_are_drawn_without_dropout_and_training_goes_on():
    made = with_dropout().train()
    made.embedding.eval()  # a part that was frozen
    modes = {name: module.training for name, module in made.named_modules()}
    assert torch.equal(made.sample(2), made.sample(2))
    assert {name: module.training for name, module in made.named_modules()} == modes
    made.eval()
    made.sample(1)
    assert not made.training


def test_images_of_levels():
    made = model((1, 2, 3), 5)
    drawn = made.to_images(torch.tensor([[0, 1, 2, 3, 4, 0]]))
    assert drawn.tolist() == [[[[0, 191]], [[64, 255]], [[128, 0]]]]


# ------------------------------------------------------------------------------------------------- what is refused


def test_images_of_another_size():
    with pytest.raises(ValueError, match=r"\(2, 7\).*2×3×1.*\(batch, 6\)"):
        model().nll(images(2, 7))
    with pytest.raises(ValueError, match=r"\(2, 2, 3\)"):
        model().nll(images(2).view(2, 2, 3))


@pytest.mark.parametrize("level", [-1, LEVELS, 200])
def test_unknown_levels(level: int):
    """Also as the last one, which is not embedded. The level n_levels would be the start token."""
    batch = images(2).long()
    batch[1, 5] = level
    with pytest.raises(ValueError, match=f"level {level}.*n_levels={LEVELS}"):
        model().nll(batch)
    with pytest.raises(ValueError, match=f"level {level}.*n_levels={LEVELS}"):
        model().sample(given=torch.tensor([[0, level]]))


def test_nothing_left_to_draw():
    with pytest.raises(ValueError, match="n_dims=0: 6 of an image's 6 dimensions are given, 0 are left"):
        model().sample(given=images(1))


def test_a_backbone_that_sees_the_future():
    with pytest.raises(ValueError, match=r"causal=False.*causal=True"):
        PixelModel(Transformer(8, 2, 1, causal=False), SHAPE, LEVELS)


# ------------------------------------------------------------------------------------------------------ checkpoints


def data(n: int = 8, batch_size: int = 4, dims: int = 6, n_levels: int = LEVELS) -> DataLoader:
    return DataLoader(images(n, dims, n_levels), batch_size=batch_size)


def trained(made: PixelModel, folder: Path, dims: int = 6, n_levels: int = LEVELS) -> Path:
    """Train for a step and save; return the checkpoint."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = trainer(folder, [], max_steps=1)
        run.fit(made, data(dims=dims, n_levels=n_levels))
        run.save_checkpoint(folder / "model.ckpt")
    return folder / "model.ckpt"


BUILT = {
    "defaults": lambda: PixelModel(Transformer(8, 2, 1), SHAPE, LEVELS),
    "partial attention": lambda: PixelModel(
        Transformer(8, 2, 2, attention=partial(SoftmaxAttention, window=3), positions=GridPositions), SHAPE, LEVELS
    ),
    "list of attentions": lambda: PixelModel(
        Transformer(8, 2, 2, attention=[partial(LinearAttention, chunk_size=2), SoftmaxAttention]), SHAPE, LEVELS
    ),
    "head": lambda: PixelModel(
        Transformer(8, 2, 1), SHAPE, LEVELS, head=partial(MixtureOfLogisticsHead, n_mixtures=3), score_first=False
    ),
    "optimiser and schedule": lambda: PixelModel(
        Transformer(8, 2, 1, attention=LinearAttention),
        image_shape=SHAPE,
        n_levels=LEVELS,
        optimizer=partial(torch.optim.AdamW, lr=0.01, betas=(0.8, 0.9)),
        lr_scheduler=partial(WarmupCosine, total_steps=7, warmup_steps=2),
        embedding_std=0.02,
    ),
    "class of an optimiser": lambda: PixelModel(Transformer(8, 2, 1), SHAPE, LEVELS, optimizer=torch.optim.Adam),
    "plateau": lambda: PixelModel(
        Transformer(8, 2, 1), SHAPE, LEVELS, lr_scheduler=partial(ReduceLROnPlateau, monitor="train/bits_per_dim")
    ),
}


@pytest.mark.parametrize("name", BUILT)
def test_a_model_built_in_python_comes_back_from_its_checkpoint(name: str, tmp_path: Path):
    made = BUILT[name]()
    path = trained(made, tmp_path)
    content = torch.load(path, weights_only=True)
    assert content["hyper_parameters"]["_class_path"] == "lit_effattn.tasks.pixels.PixelModel"
    again = PixelModel.load_from_checkpoint(path, weights_only=True)
    assert repr(again) == repr(made)
    assert (again.image_shape, again.n_levels, again.score_first) == (made.image_shape, LEVELS, made.score_first)
    batch = images(3)
    assert torch.equal(again.eval().nll(batch), made.eval().nll(batch))
    options = [m.configure_optimizers() for m in (made, again)]
    mine, theirs = (o["optimizer"] if isinstance(o, dict) else o for o in options)
    assert type(mine) is type(theirs)
    assert mine.defaults == {k: tuple(v) if isinstance(v, list) else v for k, v in theirs.defaults.items()}
    if isinstance(options[0], dict):
        mine, theirs = (o["lr_scheduler"] for o in options)
        assert type(mine["scheduler"]) is type(theirs["scheduler"])
        assert mine["scheduler"].state_dict() == theirs["scheduler"].state_dict()
        assert {**mine, "scheduler": None} == {**theirs, "scheduler": None}


def test_a_model_from_a_checkpoint_can_be_saved_again(tmp_path: Path):
    path = trained(BUILT["list of attentions"](), tmp_path)
    again = PixelModel.load_from_checkpoint(path, weights_only=True)
    (tmp_path / "second").mkdir()
    third = PixelModel.load_from_checkpoint(trained(again, tmp_path / "second"), weights_only=True)
    assert repr(third) == repr(again)


def test_arguments_that_a_checkpoint_cannot_hold_are_given_on_loading(tmp_path: Path):
    def build() -> PixelModel:
        backbone = Transformer(8, 2, 1, attention=lambda d, h, c: SoftmaxAttention(d, h, c, window=2))
        return PixelModel(backbone, SHAPE, LEVELS)

    with pytest.warns(UserWarning, match=r"Checkpoints.*Transformer\(attention=…\).*functools\.partial"):
        made = build()
    path = trained(made, tmp_path)
    torch.load(path, weights_only=True)
    with pytest.warns(UserWarning, match="Checkpoints"):
        fresh = build()
    again = PixelModel.load_from_checkpoint(
        path, weights_only=True, backbone=fresh.backbone, image_shape=SHAPE, n_levels=LEVELS
    )
    batch = images(3)
    assert torch.equal(again.eval().nll(batch), made.eval().nll(batch))


def test_a_checkpoint_of_another_model_is_rejected_in_a_few_words(tmp_path: Path):
    path = trained(PixelModel(Transformer(8, 2, 1), SHAPE, LEVELS), tmp_path)
    other = PixelModel(Transformer(16, 2, 3), SHAPE, LEVELS)
    with pytest.raises(
        ValueError, match=r"another model.*embedding\.weight is 5×8 in the checkpoint, 5×16 here"
    ) as caught:
        trainer(tmp_path, [], max_steps=2).fit(other, data(), ckpt_path=path)
    message = str(caught.value)
    assert len(message) < 500
    assert " more)" in message
    deeper = PixelModel(Transformer(8, 2, 2), SHAPE, LEVELS)
    with pytest.raises(ValueError, match=r"backbone\.blocks\.1\.\S+ is absent in the checkpoint, "):
        deeper.on_load_checkpoint(torch.load(path, weights_only=True))
    shallower = torch.load(trained(deeper, tmp_path), weights_only=True)
    with pytest.raises(ValueError, match=r"backbone\.blocks\.1\.\S+ is \S+ in the checkpoint, absent here"):
        PixelModel(Transformer(8, 2, 1), SHAPE, LEVELS).on_load_checkpoint(shallower)


# --------------------------------------------------------------------------------------------- metrics and training


@pytest.mark.parametrize("stage", ["val", "test"])
def test_figures_do_not_depend_on_the_batches(stage: str, tmp_path: Path):
    made = model()
    everything = images(11)
    with torch.no_grad():
        expected = made.nll(everything).sum().item() / everything.numel() / math.log(2)
    run = trainer(tmp_path, [])
    score = run.validate if stage == "val" else run.test
    (figures,) = score(made, DataLoader(everything, batch_size=3), verbose=False)
    assert figures == {f"{stage}/bits_per_dim": pytest.approx(expected, rel=1e-12)}


def test_the_loss_of_training_is_logged_in_bits(tmp_path: Path):
    made = PixelModel(Transformer(8, 2, 1), SHAPE, LEVELS)
    batch = images(4)
    with torch.no_grad():
        expected = made.nll(batch).mean().item() / math.log(2)
    run = trainer(tmp_path, [], max_steps=1)
    run.fit(made, DataLoader(batch, batch_size=4))
    assert run.callback_metrics["train/bits_per_dim"].item() == pytest.approx(expected, rel=1e-5)


def test_an_optimiser_alone():
    made = PixelModel(Transformer(8, 2, 1), SHAPE, LEVELS)
    optimizer = made.configure_optimizers()
    assert isinstance(optimizer, torch.optim.RAdam)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in made.parameters()}


def rates(folder: Path, lr_scheduler, epochs: int = 1, ckpt_path: Path | None = None, **options) -> list[float]:
    """Train on 3 batches an epoch; return the rate of each optimiser step."""
    taken: list[float] = []

    class Watch(pl.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            taken.append(optimizer.param_groups[0]["lr"])

    made = PixelModel(
        Transformer(8, 2, 1), SHAPE, LEVELS, optimizer=partial(torch.optim.SGD, lr=1.0), lr_scheduler=lr_scheduler
    )
    run = trainer(folder, [Watch(), LastCheckpoint()], max_epochs=epochs, **options)
    run.fit(made, data(12), data(4), ckpt_path=ckpt_path)
    return taken


def test_a_schedule_counts_optimiser_steps(tmp_path: Path):
    taken = rates(tmp_path, partial(WarmupCosine, total_steps=6, warmup_steps=2), epochs=2)
    assert taken == pytest.approx([0.5, 1.0, *[0.5 + 0.5 * math.cos(math.pi * i / 4) for i in range(4)]])


@pytest.mark.parametrize("final", [0.0, 0.1])
def test_going_on_after_the_end_of_a_schedule(final: float, tmp_path: Path, recwarn: pytest.WarningsRecorder):
    """The steps of the run were the schedule's when it began."""
    schedule = partial(WarmupCosine, final=final)
    rates(tmp_path, schedule)
    assert "schedule of the learning rate" not in " ".join(str(w.message) for w in recwarn)
    taken = rates(tmp_path, schedule, epochs=2, ckpt_path=tmp_path / "checkpoints" / "last.ckpt")
    assert taken == pytest.approx([final] * 3)
    told = [str(w.message) for w in recwarn if "schedule of the learning rate ended at step 3" in str(w.message)]
    assert len(told) == (not final)
    assert all("--init_weights" in text for text in told)


def test_not_batches(tmp_path: Path):
    taken = rates(tmp_path, partial(torch.optim.lr_scheduler.StepLR, step_size=1), 2, accumulate_grad_batches=3)
    assert taken == pytest.approx([1.0, 0.1])


@pytest.mark.parametrize("kind", [torch.optim.lr_scheduler.ReduceLROnPlateau, ReduceLROnPlateau])
def test_a_schedule_that_watches_a_metric(kind: type, tmp_path: Path):
    """`threshold=10` calls nothing an improvement, so that every validation after the first halves the rate."""
    options = {"monitor": "val/bits_per_dim"} if kind is ReduceLROnPlateau else {}
    schedule = partial(kind, **options, factor=0.5, patience=0, threshold=10, threshold_mode="abs")
    assert rates(tmp_path, schedule, epochs=4) == [1.0] * 6 + [0.5] * 3 + [0.25] * 3


def test_a_schedule_that_watches_a_metric_goes_on_where_it_was(tmp_path: Path):
    """A checkpoint of an epoch's end knows the value of that epoch."""
    options = {"monitor": "val/bits_per_dim", "factor": 0.5, "patience": 1, "threshold": 10, "threshold_mode": "abs"}
    schedule = partial(ReduceLROnPlateau, **options)
    straight = rates(tmp_path / "straight", schedule, epochs=6)
    rates(tmp_path, schedule, epochs=3)
    assert straight[9:] == rates(tmp_path, schedule, epochs=6, ckpt_path=tmp_path / "checkpoints" / "last.ckpt")
    assert len(set(straight[9:])) > 1


def test_a_metric_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(ValueError, match=r"monitors 'val/per', which was not logged; there are .*val/bits_per_dim"):
        rates(tmp_path, partial(ReduceLROnPlateau, monitor="val/per"))


def test_a_plateau_watches_what_the_model_names_or_what_it_names_itself():
    made = PixelModel(
        Transformer(8, 2, 1), SHAPE, LEVELS, lr_scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau
    ).configure_optimizers()
    assert made["lr_scheduler"]["monitor"] == PixelModel.monitor == "val/bits_per_dim"
    assert BUILT["plateau"]().configure_optimizers()["lr_scheduler"]["monitor"] == "train/bits_per_dim"


@pytest.mark.parametrize(("n_levels", "width"), [(2, 4), (17, 15), (256, 128)])
def test_neighbouring_levels_start_alike(n_levels: int, width: int):
    backbone = Transformer(2 * width, 2, 1, position_width=width, positions=LearnedPositions)
    model = PixelModel(backbone, (2, 2, 1), n_levels, embedding_std=0.5, ordinal_embedding=True)
    table = model.embedding.weight[:n_levels].detach()
    distance = torch.cdist(table, table)
    if n_levels > 2:
        near, far = distance.diagonal(1), distance.diagonal(n_levels // 2)
        assert near.max() < far.min()
    # sines and cosines of an angle square to 1 together: the mean square is that of the option
    even = table[:, : width - width % 2]
    assert even.pow(2).mean(1).sub(0.25).abs().max() < (1e-5 if width % 2 == 0 else 0.25)
