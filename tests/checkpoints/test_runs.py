import re
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from lit_effattn.checkpoints.runs import (
    discard_if_empty,
    find_checkpoint,
    kept_checkpoints,
    last_kept,
    new_folder,
    new_run,
    run_folders,
    run_of,
)


def saved(root: Path, run: str, *names: str) -> Path:
    """Make a run with these checkpoints; return their folder."""
    folder = root / run / "checkpoints"
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_text(run)
    return folder


# ------------------------------------------------------------------------------------------------------------ folders


def test_a_run_is_named_by_the_time_it_began(tmp_path: Path):
    run = new_run(tmp_path / "deep" / "root")
    assert run.is_dir()
    assert run.parent == tmp_path / "deep" / "root"
    began = datetime.strptime(run.name, "%Y-%m-%d_%H-%M-%S").replace(tzinfo=timezone.utc)
    assert timedelta(0) <= datetime.now(timezone.utc) - began < timedelta(seconds=30)


def test_no_two_runs_share_a_folder(tmp_path: Path):
    runs = [new_run(tmp_path) for _ in range(12)]  # most within the same second
    assert len(set(runs)) == len(list(tmp_path.iterdir())) == 12
    assert all(run_of(run / "checkpoints" / "last.ckpt") == run.resolve() for run in runs)


def test_neither_do_two_that_begin_at_once(tmp_path: Path):
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: new_folder(tmp_path / "shared", "samples"), range(40)))
    assert {f.name for f in folders} == {"samples", *(f"samples_{i}" for i in range(1, 40))}


def test_a_folder_that_exists_is_left_alone(tmp_path: Path):
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples_1").write_text("a file of that name")
    assert new_folder(tmp_path, "samples") == tmp_path / "samples_2"
    assert (tmp_path / "samples_1").read_text() == "a file of that name"


# ------------------------------------------------------------------------------------------------- which checkpoint


def test_the_newest_run_that_has_one(tmp_path: Path):
    """By the time in their names, wherever they lie under the root and whenever their files were touched."""
    saved(tmp_path / "linear", "2026-03-02_09-00-00", "last.ckpt", "best.ckpt")
    newest = saved(tmp_path / "softmax" / "deeper", "2026-03-02_10-00-00", "last.ckpt")
    saved(tmp_path / "linear", "2026-03-01_23-59-59", "last.ckpt", "best.ckpt")
    saved(tmp_path, "2026-03-03_00-00-00")  # stopped before it saved
    assert find_checkpoint("last", tmp_path) == newest / "last.ckpt"
    with pytest.raises(FileNotFoundError, match=r"10-00-00/checkpoints has no best\.ckpt.* give --ckpt_path last"):
        find_checkpoint("best", tmp_path)  # that in `linear` is another configuration's
    older = saved(tmp_path / "softmax" / "deeper", "2026-03-01_00-00-00", "best.ckpt")
    assert find_checkpoint("best", tmp_path) == older / "best.ckpt"
    assert find_checkpoint("best", tmp_path / "linear") == tmp_path / "linear/2026-03-02_09-00-00/checkpoints/best.ckpt"


def test_runs_behind_links_are_found_and_circles_end(tmp_path: Path):
    """`runs/NAME` on another disk, as `fit` writes it; `latest` is another name of a run."""
    other = saved(tmp_path / "disk", "2026-01-02_00-00-00", "last.ckpt", "best.ckpt")
    root = tmp_path / "runs"
    saved(root / "b", "2026-01-01_00-00-00", "last.ckpt")
    (root / "a").symlink_to(tmp_path / "disk")
    (root / "b" / "latest").symlink_to("2026-01-01_00-00-00")
    (root / "b" / "circle").symlink_to(".")
    assert sorted(run_folders(root)) == [root / "a" / other.parent.name, root / "b" / "2026-01-01_00-00-00"]
    for folder in (root, root / "a"):
        assert find_checkpoint("last", folder) == other / "last.ckpt"
        assert find_checkpoint("best", folder) == other / "best.ckpt"
    assert find_checkpoint("last", root / "b").read_text() == "2026-01-01_00-00-00"


def test_runs_of_one_second_are_told_apart_by_their_number(tmp_path: Path):
    for suffix in ("", "_1", "_2", "_9", "_10", "_11"):
        saved(tmp_path, f"2026-03-02_09-00-00{suffix}", "last.ckpt")
    assert find_checkpoint("last", tmp_path).read_text() == "2026-03-02_09-00-00_11"
    saved(tmp_path, "2026-03-02_09-00-01", "last.ckpt")
    assert find_checkpoint("last", tmp_path).read_text() == "2026-03-02_09-00-01"


def test_what_lies_outside_runs_is_not_found(tmp_path: Path):
    saved(tmp_path, "copied-from-elsewhere", "last.ckpt")
    run = saved(tmp_path, "2026-03-02_09-00-00", "last.ckpt", "best-v1.ckpt")
    saved(run.parent / "old", "checkpoints", "last.ckpt")
    assert find_checkpoint("last", tmp_path) == run / "last.ckpt"
    with pytest.raises(FileNotFoundError):
        find_checkpoint("best", tmp_path)


def test_a_path_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Absolute in what comes back: later it is looked for from elsewhere."""
    path = saved(tmp_path, "anything", "epoch=3.ckpt") / "epoch=3.ckpt"
    assert find_checkpoint(str(path), tmp_path / "no such root") == path.resolve()
    monkeypatch.chdir(path.parent)
    assert find_checkpoint("epoch=3.ckpt", tmp_path) == path.resolve()


@pytest.mark.parametrize("name", ["last", "best"])
def test_without_any_it_says_where_it_looked(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    words = rf"{name}.*{re.escape(str(tmp_path / 'runs'))} .*{name}\.ckpt.*--trainer\.default_root_dir"
    with pytest.raises(FileNotFoundError, match=words):
        find_checkpoint(name, Path("runs"))  # there is not even such a folder
    saved(tmp_path / "runs", "2026-03-02_09-00-00", "best.ckpt" if name == "last" else "step_00000003.ckpt")
    with pytest.raises(FileNotFoundError, match=words):
        find_checkpoint(name, Path("runs"))


def test_a_path_that_is_no_file_is_named(tmp_path: Path):
    for name in (str(tmp_path / "missing.ckpt"), str(tmp_path), "lst"):
        with pytest.raises(FileNotFoundError, match=f"{re.escape(name)}.*neither `last`, `best` nor `model:NAME`"):
            find_checkpoint(name, tmp_path)


def test_a_runs_folder_means_its_last(tmp_path: Path):
    folder = saved(tmp_path, "2026-03-02_09-00-00", "previous.ckpt", "best.ckpt")
    assert find_checkpoint(str(folder.parent), tmp_path) == (folder / "previous.ckpt").resolve()
    (folder / "last.ckpt").touch()
    assert find_checkpoint(str(folder.parent), tmp_path) == (folder / "last.ckpt").resolve()


# ----------------------------------------------------------------------------------------------------------- those kept


def test_those_kept_are_ordered_by_their_steps(tmp_path: Path):
    names = ["step_00000900.ckpt", "step_00010000.ckpt", "step_99999999.ckpt", "step_100000000.ckpt"]
    further = ["last.ckpt", ".step_00000900.ckpt.12.part", "step_x.ckpt", "step_00000900.ckpt.ckpt", "old_step_1.ckpt"]
    folder = saved(tmp_path, "2026-03-02_09-00-00", *reversed(names), *further)
    assert [path.name for path in kept_checkpoints(folder)] == names
    assert [path.name for path in last_kept(folder / "last.ckpt", 3)] == names[1:]
    assert [path.name for path in last_kept(folder / "step_99999999.ckpt", 2)] == names[1:3]  # up to the one named


def test_more_than_were_kept_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = saved(tmp_path, "2026-03-02_09-00-00", "last.ckpt", "step_00000001.ckpt", "step_00000002.ckpt")
    monkeypatch.chdir(tmp_path)
    words = (
        r"average=3: there are 2 kept checkpoints in 2026-03-02_09-00-00/checkpoints, the last step_00000002\.ckpt; "
    )
    with pytest.raises(ValueError, match=words + r"average 2 or fewer; .* --checkpoint\.keep 3"):
        last_kept(folder / "last.ckpt", 3)
    with pytest.raises(ValueError, match="average=0 is not positive"):
        last_kept(folder / "last.ckpt", 0)
    with pytest.raises(
        ValueError, match=r"average=1: there are 0 kept checkpoints in other/checkpoints; training keeps"
    ):
        last_kept(saved(tmp_path, "other", "last.ckpt") / "last.ckpt", 1)


# ------------------------------------------------------------------------------------------------------------- run_of


def test_the_run_of_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = tmp_path / "2026-03-02_09-00-00_3"
    folder = saved(tmp_path, run.name, "last.ckpt")
    assert run_of(folder / "last.ckpt") == run.resolve()
    monkeypatch.chdir(folder)
    assert run_of(Path("last.ckpt")) == run.resolve()
    monkeypatch.chdir(run)
    assert run_of(Path("checkpoints/last.ckpt")) == run.resolve()


def test_outside_any_run(tmp_path: Path):
    for path in [
        "2026-03-02_09-00-00/last.ckpt",
        "2026-03-02_09-00-00/elsewhere/last.ckpt",
        "2026-03-02/checkpoints/last.ckpt",
        "2026-03-02_09-00-00_/checkpoints/last.ckpt",
        "my_2026-03-02_09-00-00/checkpoints/last.ckpt",
        "2026-03-02_09-00-00/more/checkpoints/last.ckpt",
    ]:
        assert run_of(tmp_path / path) is None


# -------------------------------------------------------------------------------------------------- discard_if_empty


def test_a_run_that_wrote_nothing_leaves_no_trace(tmp_path: Path):
    (tmp_path / "kept").write_text("")
    run = new_run(tmp_path / "runs" / "digits")
    (run / "checkpoints").mkdir()
    (run / "tensorboard" / "deeper").mkdir(parents=True)
    discard_if_empty(run)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_run_that_wrote_something_stays(tmp_path: Path):
    run = new_run(tmp_path / "runs")
    (run / "csv").mkdir()
    (run / "csv" / "metrics.csv").write_text("")
    discard_if_empty(run)
    assert (run / "csv" / "metrics.csv").exists()


def test_other_runs_stay(tmp_path: Path):
    other, run = new_run(tmp_path / "runs"), new_run(tmp_path / "runs")
    (other / "config.yaml").write_text("")
    discard_if_empty(run)
    assert not run.exists()
    assert (other / "config.yaml").exists()


@pytest.mark.parametrize("relative", [False, True])
def test_the_folder_one_stands_in_stays(relative: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Though there is nothing else in it: the command's own default is a relative path."""
    here = tmp_path / "outer" / "here"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    discard_if_empty(new_run(Path("runs") if relative else here / "runs"))
    assert here.is_dir()
    assert not list(here.iterdir())


def test_a_run_that_is_gone_already(tmp_path: Path):
    discard_if_empty(tmp_path / "2026-03-02_09-00-00")
    assert tmp_path.is_dir()


@pytest.mark.parametrize("other", ["same", "another"])
@pytest.mark.parametrize("name", ["2999-01-01_00-00-00", "2999-01-01_00-00-00_2"])
def test_after_the_clock_was_set_back_the_last_is_still_the_newest(name: str, other: str, tmp_path: Path):
    saved(tmp_path / "same", name, "last.ckpt")
    for folder in (other, "third"):
        new = new_run(tmp_path / folder, tmp_path)
        (new / "checkpoints").mkdir()
        (new / "checkpoints" / "last.ckpt").touch()
        assert find_checkpoint("last", tmp_path).parent.parent == new.resolve()


def test_a_run_outside_is_named_after_those_beside_it(tmp_path: Path):
    saved(tmp_path / "all", "2999-01-01_00-00-00", "last.ckpt")
    saved(tmp_path / "elsewhere", "2998-01-01_00-00-00")
    assert new_run(tmp_path / "elsewhere", tmp_path / "all").name == "2998-01-01_00-00-00_1"
