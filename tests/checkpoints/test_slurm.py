import os
from pathlib import Path

import pytest

from lit_effattn.checkpoints.slurm import interrupted_checkpoint, job, record_job, requeue

ARGS = ["fit", "--config", "a.yaml"]


@pytest.fixture(autouse=True)
def _job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("SLURM_", "TORCHELASTIC_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_JOB_ID", "77")


def run(root: Path, name: str, *checkpoints: str) -> Path:
    """Make the folder of a run of this job."""
    folder = root / name
    (folder / "checkpoints").mkdir(parents=True)
    for checkpoint in checkpoints:
        (folder / "checkpoints" / checkpoint).touch()
    record_job(folder, ARGS)
    return folder


def test_a_job_of_an_array_has_its_index(monkeypatch: pytest.MonkeyPatch):
    assert job() == "77"
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "70")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "6")
    assert job() == "70_6"


def test_a_restarted_job_goes_on_with_its_own_newest_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run(tmp_path, "2026-01-01_00-00-00", "last.ckpt", "previous.ckpt")
    own = run(tmp_path / "deeper", "2026-01-02_00-00-00", "last.ckpt", "previous.ckpt")
    run(tmp_path, "2026-01-03_00-00-00")  # was killed before its first checkpoint
    monkeypatch.setenv("SLURM_JOB_ID", "78")
    run(tmp_path, "2026-01-04_00-00-00", "last.ckpt")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    assert interrupted_checkpoint(tmp_path, ARGS) is None  # it was not restarted
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert interrupted_checkpoint(tmp_path, ARGS) == own / "checkpoints" / "last.ckpt"
    assert interrupted_checkpoint(tmp_path, [*ARGS, "--seed", "2"]) is None  # another command of the same job
    (tmp_path / "slurm_job").write_bytes(b"\xff")
    (tmp_path / "folder" / "slurm_job").mkdir(parents=True)
    (own / "checkpoints" / "last.ckpt").unlink()
    assert interrupted_checkpoint(tmp_path, ARGS) == own / "checkpoints" / "previous.ckpt"
    monkeypatch.setenv("SLURM_JOB_ID", "79")
    assert interrupted_checkpoint(tmp_path, ARGS) is None


def test_torchrun_goes_on_with_the_run_of_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Whatever each machine counts as restarts. In a SLURM job that was requeued, the job's number will do."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    own = run(tmp_path, "2026-01-01_00-00-00", "last.ckpt") / "checkpoints" / "last.ckpt"
    assert interrupted_checkpoint(tmp_path, ARGS) == own
    assert interrupted_checkpoint(tmp_path, [*ARGS, "--seed", "2"]) is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "b")
    assert interrupted_checkpoint(tmp_path, ARGS) is None
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert interrupted_checkpoint(tmp_path, ARGS) == own
    monkeypatch.delenv("SLURM_JOB_ID")
    assert interrupted_checkpoint(tmp_path, ARGS) is None
    run(tmp_path, "2026-01-02_00-00-00", "last.ckpt")  # outside of SLURM
    assert interrupted_checkpoint(tmp_path, ARGS).parent.parent.name == "2026-01-02_00-00-00"


def test_a_restart_by_torchrun_without_an_id_begins_anew_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn
):
    monkeypatch.delenv("SLURM_JOB_ID")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # torchrun's default
    assert not list(run(tmp_path, "2026-01-01_00-00-00", "last.ckpt").glob("slurm_job"))
    assert interrupted_checkpoint(tmp_path, ARGS) is None
    assert not recwarn
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert interrupted_checkpoint(tmp_path, ARGS) is None
    assert "give torchrun --standalone or --rdzv-id" in str(recwarn.pop().message)


def test_without_slurm_nothing_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("SLURM_JOB_ID")
    assert not list(run(tmp_path, "2026-01-01_00-00-00").glob("slurm_job"))


@pytest.mark.parametrize(
    ("script", "failure"), [("exit 0", None), ("echo denied >&2; exit 1", "denied"), (None, "No such")]
)
def test_a_failed_requeue_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn, script: str | None, failure: str | None
):
    if script is not None:
        (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n{script}\n')
        (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    requeue("77")
    if script is not None:
        assert (tmp_path / "asked").read_text() == "requeue 77\n"
    output = "".join(str(w.message) for w in recwarn)
    assert (failure is None and not output) or (failure in output and "resume with --ckpt_path last" in output)
