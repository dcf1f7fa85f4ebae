"""What a command starts from."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lit_effattn.checkpoints.own_runs import marked
from lit_effattn.checkpoints.slurm import record_job
from lit_effattn.settings.arguments import Arguments
from lit_effattn.settings.resume import CHECKPOINT, check_kept_settings, resolve
from tests.support.checkpoint_parts import divide
from tests.support.small_runs import SETTINGS, checkpoint

COSINE = "lit_effattn.tasks.schedules.WarmupCosine"


def settings(path: str, **options: Any) -> dict[str, Any]:
    return {"model": {"init_args": {"lr_scheduler": {"class_path": path, "init_args": options}}}}


def test_an_option_that_a_checkpoint_does_not_name_was_at_its_default():
    """It was saved before there was that option."""
    now = settings(COSINE, total_steps=40, warmup_steps=3, final=0.0, cosine_from_start=False)
    check_kept_settings(settings(COSINE, total_steps=40, warmup_steps=3), now)


@pytest.mark.parametrize(
    "now",
    [
        settings(COSINE, total_steps=40, cosine_from_start=True),
        settings(COSINE, total_steps=41),
        settings("lit_effattn.tasks.schedules.InverseSquareRoot"),
        settings("mine.WarmupCosine", total_steps=40),
    ],
)
def test_another_schedule_is_refused(now: dict[str, Any]):
    with pytest.raises(ValueError, match="resuming keeps the checkpoint's lr_scheduler"):
        check_kept_settings(settings(COSINE, total_steps=40), now)


@pytest.mark.parametrize(("rank", "parent"), [("0", False), ("1", False), ("1", True)], ids=str)
def test_each_process_of_torchrun_verifies_the_parts_and_a_child_uses_its_parents_checkpoint(
    rank: str, parent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Else one process would resume from a damaged checkpoint, and the other from the one before."""
    folder = tmp_path / "runs" / "2026-01-01_00-00-00" / "checkpoints"
    folder.mkdir(parents=True)
    for name in ("last.ckpt", "previous.ckpt"):
        divide(torch.load(checkpoint("language"), weights_only=True), folder / name, 2)
    (folder.parent / "config.yaml").write_text(marked(yaml.safe_dump(SETTINGS["language"])))
    part = folder / "last.ckpt" / "part_00001.pt"
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 4
    part.write_bytes(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.delenv(CHECKPOINT, raising=False)
    if parent:
        monkeypatch.setenv(CHECKPOINT, str(folder / "last.ckpt"))
    Path("whole.yaml").write_text("transfer_from: null")  # as in the configuration of a run
    found = resolve(Arguments(["fit", "--ckpt_path", "last", "--config", "whole.yaml"])).checkpoint
    assert found == folder / ("last.ckpt" if parent else "previous.ckpt")


def test_a_fraction_that_is_null_needs_no_data():
    """As in a file that `--print_config` printed: the data of somebody else's checkpoint are not there."""
    args = ["generate", "--ckpt_path", str(checkpoint("pixels")), "--complete", "null"]
    assert not resolve(Arguments(args)).uses_data


def test_a_restarted_job_finds_its_run_beside_the_one_that_it_began_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    first, own = (Path("there", f"2026-01-0{day}_00-00-00", "checkpoints", "last.ckpt") for day in (1, 2))
    for path in (first, own):
        path.parent.mkdir(parents=True)
        path.write_bytes(checkpoint("pixels").read_bytes())
    kept = first.rename(first.with_name("best.ckpt"))
    args = ["fit", "--ckpt_path", str(kept)]
    record_job(own.parent.parent, args)
    resolved = resolve(Arguments(args))
    assert (resolved.checkpoint, resolved.requeued) == (own.resolve(), True)
