"""`fit --transfer_from`: from a trained softmax model to another attention."""

from pathlib import Path

import pytest
import torch

from lit_effattn import LanguageModel
from lit_effattn.attention import SoftmaxAttention, WindowedLinearAttention
from lit_effattn.cli import main
from tests.support.commands import assert_same_end, fails, same, spec, weights

TINY = {
    "seed_everything": 3,
    "model": spec(
        "LanguageModel",
        backbone=spec(
            "Transformer",
            d_model=16,
            n_heads=2,
            n_layers=2,
            attention=spec("SoftmaxAttention", window=8),
            positions="auto",
            dropout=0.2,
        ),
        optimizer=spec("torch.optim.AdamW", lr=0.01),
    ),
    "data": spec("TextStream", source="files", root="text.txt", segment_len=16, batch_size=4),
    "trainer": {
        "max_steps": 4,
        "limit_val_batches": 2,
        "enable_progress_bar": False,
        "callbacks": [{"class_path": "MemoryCarry"}],
    },
}
WINDOWED = ("--model.backbone.attention", "WindowedLinearAttention", "--model.backbone.attention.window", "4")


@pytest.fixture(autouse=True)
def _beside_a_text(empty_folder: None) -> None:
    Path("text.txt").write_text("".join(f"{i} times {i} is {i * i}. " for i in range(400)))


def fit(name: str, *args: str) -> Path:
    """Train and return the last checkpoint of the run."""
    main(["fit", "--config", "tiny.yaml", "--name", name, *args])
    (path,) = Path("runs", name).glob("*/checkpoints/last.ckpt")
    return path


def test_transfer_is_resumed_exactly_and_its_result_fine_tuned(caplog: pytest.LogCaptureFixture):
    teacher = fit("teacher")
    transfer = (*WINDOWED, "--transfer_from", str(teacher))
    whole = fit("whole", *transfer, "--trainer.log_every_n_steps", "1")
    assert any("Attention transfer: 2 layers learn the attention of" in message for message in caplog.messages)
    before, after = weights(teacher), weights(whole)
    attends = {name for name in after if ".attention." in name}
    assert {name for name in after if name not in before} == {
        f"backbone.blocks.{i}.attention.{name}"
        for i in range(2)
        for name in ("mixing", "feature_map.query_weight", "feature_map.key_weight")
    }
    assert same(
        {n: t for n, t in before.items() if n not in attends}, {n: after[n] for n in before if n not in attends}
    )
    trained = [name for name in attends & before.keys() if "weight" in name]
    assert trained
    assert not any(torch.equal(before[name], after[name]) for name in trained)
    (metrics,) = whole.parent.parent.rglob("metrics.csv")
    assert "train/auxiliary_loss/TransferState" in metrics.read_text()

    half = fit("half", *transfer, "--trainer.max_steps", "2")
    main(["fit", "--ckpt_path", str(half), "--trainer.max_steps", "4"])  # the run names its teacher
    assert_same_end(half, whole)

    model = LanguageModel.load_from_checkpoint(fit("tuned", *WINDOWED, "--init_weights", str(whole)))
    assert {type(block.attention) for block in model.backbone.blocks} == {WindowedLinearAttention}
    tuned = [name for name in after if name.endswith("up.weight")]
    assert tuned
    assert not any(torch.equal(after[name], model.state_dict()[name]) for name in tuned)


def test_what_does_not_fit_together_is_refused(capsys: pytest.CaptureFixture[str]):
    teacher = str(fit("teacher"))
    tiny = ("fit", "--config", "tiny.yaml")
    both = ("--transfer_from", teacher, "--init_weights", teacher)
    assert "--init_weights and --transfer_from were both given" in fails(capsys, *tiny, *WINDOWED, *both)
    assert "the model has the same attention as the teacher" in fails(capsys, *tiny, "--transfer_from", teacher)
    narrow = ("--model.backbone.d_ff", "8", "--transfer_from", teacher)
    assert f"--transfer_from {teacher}: the checkpoint holds another model" in fails(capsys, *tiny, *WINDOWED, *narrow)
    assert "is not of an attention transfer" in fails(capsys, "fit", "--ckpt_path", teacher, "--transfer_from", teacher)


class Own(SoftmaxAttention):
    pass


def test_a_teacher_can_name_only_a_class_that_is_listed_or_trusted(capsys: pytest.CaptureFixture[str]):
    content = torch.load(fit("teacher"), weights_only=True)
    name = f"{__name__}.{Own.__name__}"
    content["hyper_parameters"]["backbone"]["init_args"]["attention"] = spec(name, window=8)
    torch.save(content, "other.ckpt")
    command = ("fit", "--config", "tiny.yaml", *WINDOWED, "--transfer_from", "other.ckpt")
    assert f"other.ckpt names '{name}'" in fails(capsys, *command)
    main([*command, "--trust", name])
