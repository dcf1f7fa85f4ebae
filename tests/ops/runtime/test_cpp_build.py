import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_effattn.datamodules.common.store import cached_folder, default_cache
from lit_effattn.ops.runtime import cpp_build
from lit_effattn.ops.runtime.cpp_build import CompilerError, build, library, obstacle

OBSTACLE = cpp_build.obstacle("linear")
needs_compiler = pytest.mark.skipif(OBSTACLE is not None, reason=f"no compiler: {OBSTACLE}")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Compile small sources, into a folder of their own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cpp_build, "_OPS", tmp_path)
    (tmp_path / "runtime").mkdir()
    (tmp_path / "runtime" / "gemm_tiles.hpp").write_text("#define ANSWER 42\n")
    (tmp_path / "small").mkdir()
    source = '#include "../runtime/gemm_tiles.hpp"\nextern "C" int answer() { return ANSWER; }\n'
    (tmp_path / "small" / "kernels.cpp").write_text(source)
    caches = cpp_build.private_folder, library, obstacle
    for function in caches:
        function.cache_clear()
    yield tmp_path / "cache" / "lit-effattn" / "kernels"
    for function in caches:
        function.cache_clear()


@needs_compiler
def test_compiled_once_and_anew_when_its_source_changes(folder: Path, tmp_path: Path):
    assert library("small").answer() == 42
    (made,) = folder.glob("*.so")
    time = made.stat().st_mtime_ns
    library.cache_clear()
    assert library("small").answer() == 42
    assert made.stat().st_mtime_ns == time
    several = {made, build("small", ("-O1",))}
    for name in ("runtime/gemm_tiles.hpp", "small/kernels.cpp"):
        source = tmp_path / name
        source.write_text(source.read_text() + "\n")
        several.add(build("small", cpp_build._VECTORS.get(torch.backends.cpu.get_cpu_capability(), ())))
    assert set(folder.glob("*.so")) == several
    assert len(several) == 4


@needs_compiler
def test_several_at_the_same_time(folder: Path):
    with ThreadPoolExecutor(4) as pool:
        (path,) = set(pool.map(build, ["small"] * 4))
    assert sorted(folder.iterdir()) == [path.with_suffix(".sha256"), path]  # and nothing half-written


@needs_compiler
@pytest.mark.parametrize("size", [0, 4000])
def test_a_library_that_is_not_whole_is_made_again(size: int, folder: Path):
    """An empty one could never be loaded, and a half one ends the process."""
    path = build("small")
    whole = path.stat().st_size
    with path.open("rb+") as file:
        file.truncate(size)
    assert build("small").stat().st_size == whole
    assert library("small").answer() == 42
    path.with_suffix(".sha256").write_text("")
    assert cpp_build.is_intact(build("small"))


@needs_compiler
def test_what_the_compiler_says_is_passed_on(folder: Path, tmp_path: Path):
    (tmp_path / "small" / "kernels.cpp").write_text("int answer( { return 1; }\n")
    with pytest.raises(CompilerError, match=r"fails: .*small/kernels\.cpp:1:\d+: error"):
        build("small")
    assert "small/kernels.cpp:1" in obstacle("small")
    assert list(folder.iterdir()) == []


def test_no_compiler(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(CompilerError, match=r"there is no C\+\+ compiler: install g\+\+ or clang"):
        build("small")
    monkeypatch.setenv("CXX", "nothing++ -O2")
    with pytest.raises(
        CompilerError, match=r"no C\+\+ compiler 'nothing\+\+ -O2', which the environment variable CXX names"
    ):
        build("small")
    assert cpp_build.compiler_version() is None


def test_what_is_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    command = tmp_path / "compiler"
    command.write_text("not a program\n")
    command.chmod(0o755)
    monkeypatch.setenv("CXX", str(command))
    with pytest.raises(CompilerError, match=r"the C\+\+ compiler can't be run"):
        build("small")


@needs_compiler
@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
@pytest.mark.parametrize("of_parent", [False, True])
def test_where_others_can_write_nothing_is_loaded(
    mode: int, of_parent: bool, folder: Path, tmp_path: Path, monkeypatch: Any
):
    """They could put a library or a folder of theirs in the place of ours."""
    planted = build("small")
    planted.write_bytes(b"theirs")
    cpp_build.private_folder.cache_clear()
    writable = folder.parent if of_parent else folder
    writable.chmod(mode)
    monkeypatch.setattr(cpp_build.tempfile, "tempdir", str(tmp_path))
    with pytest.warns(UserWarning, match=rf"chmod go-w {writable}\)"):
        assert library("small").answer() == 42
    assert planted.read_bytes() == b"theirs"


def test_whoever_can_replace_the_cache_is_not_trusted(folder: Path, tmp_path: Path, monkeypatch: Any):
    """As a folder below /tmp, where the sticky bit protects it, is."""
    above = folder.parent.parent
    above.mkdir()
    monkeypatch.setattr(cpp_build.tempfile, "tempdir", str(tmp_path))
    for mode, is_used in ((0o1777, True), (0o777, False), (0o775, False), (0o755, True)):
        above.chmod(mode)
        cpp_build.private_folder.cache_clear()
        with nullcontext() if is_used else pytest.warns(UserWarning, match=rf"chmod go-w {above}\)"):
            assert (cpp_build.private_folder("kernels") == folder) == is_used


@pytest.mark.parametrize("link", ["kernels", "lit-effattn", ""])
def test_a_link_into_a_folder_of_all_users_is_not_followed(
    link: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shared, path = tmp_path / "shared", tmp_path / "cache"
    (shared / "lit-effattn" / "kernels").mkdir(parents=True, mode=0o700)
    shared.chmod(0o777)
    parts = (*folder.relative_to(path).parts,) if link else ()
    names = parts[: parts.index(link) + 1] if link else ()
    path.joinpath(*names).parent.mkdir(parents=True, exist_ok=True)
    path.joinpath(*names).symlink_to(shared.joinpath(*names))
    monkeypatch.setattr(cpp_build.tempfile, "tempdir", str(tmp_path))
    with pytest.warns(UserWarning, match="others can write to"):
        assert cpp_build.private_folder("kernels").parent == tmp_path


def test_a_temporary_folder_is_deleted_when_the_process_ends(tmp_path: Path):
    code = "from lit_effattn.ops.runtime import cpp_build; print(cpp_build.private_folder('kernels'))"
    (tmp_path / "file").write_text("")
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "file"), "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).parent == tmp_path
    assert not list(tmp_path.glob("lit-effattn-*"))


@needs_compiler
def test_the_folder_is_made_for_this_user_alone(folder: Path):
    build("small")
    assert folder.stat().st_mode & 0o777 == folder.parent.stat().st_mode & 0o777 == 0o700


def test_the_folder_lies_in_the_cache_of_the_data_which_is_private_too(folder: Path, tmp_path: Path):
    assert cpp_build.private_folder("kernels") == folder
    assert folder.parent == default_cache()
    shutil.rmtree(folder.parent)
    cpp_build.private_folder.cache_clear()
    umask = os.umask(0o002)
    try:
        cached_folder(default_cache() / "tokens", Path.touch, Path.exists)
        cached_folder(tmp_path / "shared" / "tokens", Path.touch, Path.exists)
    finally:
        os.umask(umask)
    assert (tmp_path / "shared").stat().st_mode & 0o777 == 0o775
    assert cpp_build.private_folder("kernels") == folder


@needs_compiler
@pytest.mark.filterwarnings("ignore:Compiled kernels are kept")
def test_where_nothing_can_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # not a folder
    monkeypatch.setattr(cpp_build.tempfile, "tempdir", str(tmp_path))
    assert library("small").answer() == 42
    assert [p.suffix for p in next(tmp_path.glob("lit-effattn-*")).glob("*.so")] == [".so"]


@pytest.mark.skipif(os.name == "nt", reason="needs a shell")
def test_a_compiler_that_never_returns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    command, child = tmp_path / "cxx", tmp_path / "child"
    command.write_text(f"#!/bin/sh\nsleep 1000 &\necho $! > {child}\nwait\n")
    command.chmod(0o755)
    monkeypatch.setenv("CXX", str(command))
    monkeypatch.setattr(cpp_build, "PATIENCE", 3.0)
    monkeypatch.setattr(cpp_build, "_hung", {})
    for _ in range(2):  # the second is not started
        with pytest.raises(CompilerError, match=r"cxx did not return within 3 s and was stopped; name another"):
            build("small")
        pid = int(child.read_text())
        monkeypatch.setattr(cpp_build.subprocess, "Popen", None)
    end = time.monotonic() + 60  # a killed process is gone when it is next scheduled
    while runs(pid) and time.monotonic() < end:
        time.sleep(0.01)
    assert not runs(pid)


def runs(pid: int) -> bool:
    """Whether a process exists and is neither dead nor a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_prepared_data_name_a_cache_that_cannot_be_written_to(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"file/lit-effattn for prepared data can't be written to .*XDG_CACHE_HOME"):
        cached_folder(tmp_path / "file" / "lit-effattn" / "data", Path.mkdir, lambda folder: False)


def test_prepared_data_behind_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "far").mkdir()
    (tmp_path / "near").symlink_to("far")
    cached_folder(tmp_path / "near", lambda folder: (folder / "a").touch(), lambda folder: (folder / "a").exists())
    assert (tmp_path / "far" / "a").exists()
    assert (tmp_path / "near").is_symlink()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="is the working directory"):
        cached_folder(Path(), Path.touch, lambda folder: False)
