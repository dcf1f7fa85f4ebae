"""How strong the tests are: change the product in one place, and see whether a test fails.

    python -m tests.mutations make --seed 0 --n 150 > mutants.jsonl
    python -m tests.mutations run mutants.jsonl > results.jsonl

A mutant is one change of one expression or statement: a comparison, an operator, a number, a condition, or a statement
that is left out. It names its place by file, function, source text and number of occurrence, so that it is found again
in another version of the code. `run` tries each mutant in a copy of the repository, with the tests of its file, those
of the file's folder and all, as far as `--reach` says. A mutant that no test fails for has survived. Some change
nothing that can be seen.
"""

import argparse
import ast
import compileall
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
ROOMS = ("lit_effattn", "datamodules", "callbacks")
SWAPS: dict[type[ast.AST], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
    ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in", ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.Div: "*",
    ast.FloorDiv: "*", ast.Mod: "*", ast.And: "or", ast.Or: "and",
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """A change: the `occurrence`-th node of `function` in `file` whose source is `before` becomes `after`."""

    file: str
    function: str
    before: str
    after: str
    occurrence: int


def sites(file: Path) -> Iterator[tuple[Mutant, ast.expr | ast.stmt]]:
    """List every mutant of a file, with the node that it changes."""
    source = file.read_text()
    seen: dict[tuple[str, str, str], int] = {}

    def visit(node: ast.AST, function: str) -> Iterator[tuple[Mutant, ast.expr | ast.stmt]]:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            function = f"{function}.{node.name}".strip(".")
        for before, after, changed in changes(node, source) if function else ():
            key = (function, before, after)
            seen[key] = seen.get(key, -1) + 1
            name = file.relative_to(REPOSITORY).as_posix()
            yield Mutant(name, function, before, after, seen[key]), changed
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list", "type_params") or isinstance(node, ast.Raise):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from visit(child, function)

    yield from visit(ast.parse(source), "")


def changes(node: ast.AST, source: str) -> Iterator[tuple[str, str, ast.expr | ast.stmt]]:
    """Yield the source of a node, what it becomes, and the node."""

    def text(part: ast.AST) -> str:
        return ast.get_source_segment(source, part) or ""

    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield text(node), f"{text(node.left)} {SWAPS[type(node.ops[0])]} {text(node.comparators[0])}", node
    elif (
        isinstance(node, ast.BinOp)
        and type(node.op) in SWAPS
        and not isinstance(node.left, ast.Constant | ast.JoinedStr)
    ):
        yield text(node), f"({text(node.left)}) {SWAPS[type(node.op)]} ({text(node.right)})", node
    elif isinstance(node, ast.BoolOp):
        yield text(node), f" {SWAPS[type(node.op)]} ".join(f"({text(value)})" for value in node.values), node
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield text(node), f"bool({text(node.operand)})", node
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield text(node), repr(node.value + 1), node
    elif isinstance(node, ast.If | ast.IfExp | ast.While):
        yield text(node.test), f"(not ({text(node.test)}))", node.test
    elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        yield text(node), "return None", node
    elif isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield text(node), "pass", node


def make(seed: int, n: int) -> list[Mutant]:
    """Draw `n` mutants, at most two of one function, the same for the same seed and code."""
    files = sorted(f for room in ROOMS for f in (REPOSITORY / room).rglob("*.py") if not _linked(f))
    every = [mutant for file in files for mutant, _ in sites(file)]
    random.Random(seed).shuffle(every)
    drawn: dict[tuple[str, str], list[Mutant]] = {}
    for mutant in every:
        of = drawn.setdefault((mutant.file, mutant.function), [])
        if len(of) < 2 and sum(map(len, drawn.values())) < n:
            of.append(mutant)
    return [mutant for mutants in drawn.values() for mutant in mutants]


def _linked(file: Path) -> bool:
    return any(folder.is_symlink() for folder in file.parents)


def apply(mutant: Mutant, root: Path) -> tuple[str, int] | None:
    """Return the source of the changed file and the line of the change, or None if the code has no such place."""
    file = REPOSITORY / mutant.file
    if not file.exists():
        return None
    for candidate, node in sites(file):
        if candidate == mutant:
            lines = (root / mutant.file).read_bytes().splitlines(keepends=True)
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
            end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
            source = b"".join(lines)
            return (source[:start] + mutant.after.encode() + source[end:]).decode(), node.lineno
    return None


def tests_of(file: str, reach: str) -> list[str]:
    """List the paths of the tests to try: the file that mirrors `file`, then its folder, then all.

    Args:
        file: A file of the product.
        reach: The last of them: "mirror" (the folder, where no file mirrors it), "folder" or "all".
    """
    parts = Path(file).parts[1:] if file.startswith("lit_effattn/") else Path(file).parts
    mirror = Path("tests", *parts[:-1], f"test_{parts[-1]}")
    folder = mirror.parent
    while not (REPOSITORY / folder).exists():
        folder = folder.parent
    paths = [str(mirror)] * (REPOSITORY / mirror).exists()
    if reach != "mirror" or not paths:
        paths += [str(folder)] * (folder != Path("tests"))
    return paths + ["tests"] * (reach == "all")


def killed(root: Path, tests: str, marks: str, seconds: int) -> str:
    """Run tests in a child process; return "killed", "survived" or "timeout"."""
    child = os.fork()
    if child == 0:
        os.setsid()
        out = os.open(root / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.chdir(root)
        sys.path[:0] = [str(root / "src"), str(root)]
        os.environ["PYTHONPATH"] = f"{root / 'src'}{os.pathsep}{root}"
        for name in [n for n in sys.modules if n.split(".")[0] in ("tests", *ROOMS)]:
            del sys.modules[name]
        import pytest

        options = ["-x", "-q", "-p", "no:cacheprovider", "--no-header", "-m", marks, "--rootdir", str(root)]
        status = 3
        try:
            status = int(pytest.main([*options, tests]))
        finally:
            os._exit(status)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return "survived" if os.waitstatus_to_exitcode(status) in (0, 5) else "killed"
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "timeout"


def run(mutants: list[Mutant], marks: str, reach: str, seconds: int) -> Iterator[dict]:
    """Try each mutant in a copy of the repository, and yield what became of it."""
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton asks once, when it is imported
    import lightning.pytorch  # noqa: F401  (once for all children)
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "repository"
        ignored = shutil.ignore_patterns(".git", ".venv", "runs", "build", "site", ".*_cache")
        shutil.copytree(REPOSITORY, root, symlinks=True, ignore=ignored)
        compileall.compile_dir(root, quiet=2, workers=0)  # of what is not changed
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        for mutant in mutants:
            changed = apply(mutant, root)
            began = time.monotonic()
            if changed is None:
                yield asdict(mutant) | {"result": "gone"}
                continue
            target, (source, line) = root / mutant.file, changed
            original = target.read_text()
            target.write_text(source)
            result, by = "survived", ""
            for path in tests_of(mutant.file, reach):
                if result == "survived":
                    result = killed(root, path, marks, seconds)
                    by = "" if result == "survived" else _first_failure(root)
            target.write_text(original)
            seconds_taken = round(time.monotonic() - began, 1)
            yield asdict(mutant) | {"line": line, "result": result, "by": by, "seconds": seconds_taken}


def _first_failure(root: Path) -> str:
    lines = (root / "output.txt").read_text(errors="replace").splitlines()
    return next((line[:200] for line in lines if line.startswith(("FAILED", "ERROR"))), "")


def main() -> None:
    """Run a command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("make", help="draw mutants and print them, one JSON object a line")
    drawing.add_argument("--seed", type=int, default=0)
    drawing.add_argument("--n", type=int, default=150)
    running = commands.add_parser("run", help="try the mutants of a file, and print the results")
    running.add_argument("mutants", type=Path)
    running.add_argument("--marks", default="not exhaustive and not gpu", help="pytest's -m")
    running.add_argument("--reach", choices=("mirror", "folder", "all"), default="folder", help="tests to try")
    running.add_argument("--seconds", type=int, default=300, help="the longest that tests of a mutant may take")
    options = parser.parse_args()
    if options.command == "make":
        results: Iterator[dict] = (asdict(mutant) for mutant in make(options.seed, options.n))
    else:
        rows = [json.loads(line) for line in options.mutants.read_text().splitlines()]
        fields = Mutant.__dataclass_fields__
        mutants = [Mutant(**{name: row[name] for name in fields}) for row in rows]
        results = run(mutants, options.marks, options.reach, options.seconds)
    for result in results:
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
