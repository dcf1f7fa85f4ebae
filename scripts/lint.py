"""Checks of this repository that ruff and mypy lack: `python -m scripts.lint` prints `file:line: message`.

A check reads texts alone: nothing of the package is imported.
"""

import ast
import io
import json
import re
import sys
import tokenize
from collections.abc import Callable, Iterable, Iterator
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = ("lit_effattn", "datamodules", "callbacks")

FORMS = {
    r"\b(?<![Tt]here )(?:is|are|was|were) no (?!longer\b|more\b|less\b|fewer\b|other\b|one\b)[a-z`]": (
        "say what it must be: 'x must be positive, but is -1'"
    ),
    r"\bof which (?:less|more|fewer|higher|lower)\b": "lower is better, higher is better",
    r"\b[Tt]hat are the\b": "these are the",
    r"\bbecomes of\b": "one product then gives …",
    r"\b(?:dear|dearer|dearest)\b": "expensive",
    r"\b(?:dealt|deals|deal) (?:over|out|to)\b": "assigned in turn",
    r"\b(?:laid|lay|lays|laying) (?:\w+ ){0,3}over\b": "override, apply on top of",
    r"\bto be looked up\b": "look it up",
    r"\b[Ll]isten no\b": "restore the previous handlers",
    r"\bstands? for\b": "means, is equivalent to",
    r"\bat hand\b": "available",
    r"\bby itself\b(?= (?:or|and) not)": "alone",
    r"\b(?:nobody|Nobody) (?:asks|else)\b": "use the passive: is not read elsewhere",
    r"\bthe one that\b.{0,40}\bthe one that\b": "name both",
}
"""Forms at which readers stopped, and what to write in their place."""

OPENINGS = ("What ", "Refuse ", "Refuses ", "That ", "How ", "Where ", "Who ", "Nothing ", "Say ", "Says ", "Listen")
"""First words that a docstring may not have."""

ROOMS: dict[str, set[str]] = {
    "checks": set(),
    "registry": set(),
    "hparams": {"registry"},
    "stopping": set(),
    "sequence": {"hparams"},
    "ops": {"sequence"},
    "attention": {"ops", "sequence", "hparams"},
    "laws": {"nn", "sequence"},
    "nn": {"attention", "ops", "sequence", "hparams", "registry"},
    "drawing": set(),
    "datamodules": {"checkpoints"},
    "checkpoints": {"hparams", "registry"},
    "generation": {"nn", "attention", "ops", "sequence"},
    "distributed": {"nn", "attention", "sequence", "checkpoints"},
    "callbacks": {"distributed", "nn", "ops", "sequence", "checkpoints", "drawing", "stopping"},
    "tasks": {
        *("callbacks", "generation", "distributed", "nn", "attention", "sequence", "hparams", "registry"),
        *("datamodules", "checkpoints", "drawing"),
    },
    "settings": {"tasks", "callbacks", "generation", "attention", "datamodules", "checkpoints", "hparams"},
    "interchange": {
        *("tasks", "nn", "attention", "ops", "sequence", "hparams"),
        *("datamodules", "checkpoints", "__init__"),
    },
    "analysis": {
        *("settings", "tasks", "callbacks", "generation", "nn", "attention", "sequence", "hparams"),
        *("datamodules", "checkpoints", "drawing", "stopping"),
    },
    "cli": {
        *("interchange", "settings", "tasks", "distributed", "nn", "attention", "ops", "sequence", "hparams"),
        *("callbacks", "datamodules", "checkpoints", "drawing", "laws", "stopping"),
    },
    "__init__": {"nn", "tasks", "checkpoints"},  # when they are asked for
}
"""The folders of the package, and the other folders that each may import. Each may import `checks`."""

DATA: dict[str, set[str]] = {
    "common": set(),
    "text": {"common"},
    "pairs": {"common", "text"},
    "images": {"common"},
    "speech": {"common"},
    "synthetic": {"common"},
}
"""The kinds of data, and the other kinds that each may import."""

LIGHT = ("checks", "registry", "hparams", "sequence", "ops", "attention", "laws", "__init__")
"""Folders whose modules import torch and numpy alone; Triton's kernels are imported when they are needed."""

USERS_OWN = {"counting", "my_classes"}
"""Configurations that a page asks the reader to write."""

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


class Repository:
    """The texts of the repository.

    Args:
        changed: Texts that take the place of those on the disk, by file, or that come in addition.
    """

    def __init__(self, changed: dict[str, str] | None = None) -> None:
        modules = [path for folder in (*PRODUCT, "benchmarks", "scripts", "tests") for path in _below(folder, "*.py")]
        pages = [*ROOT.glob("*.md"), *_below("docs", "*.md"), *_below("docs", "*.ipynb")]
        paths = [ROOT / "Makefile", *modules, *pages, *ROOT.glob("configs/*.yaml")]
        self.texts = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}
        self.texts |= changed or {}
        self.pages = [name for name in self.texts if name.endswith(".md")]
        self.sources = [name for name in self.texts if name.endswith(".py") and not name.startswith("tests/")]
        self.tests = [name for name in self.texts if name.endswith(".py") and name.startswith("tests/")]
        self.tree = cache(lambda name: ast.parse(self.texts[name]))
        self.prose = cache(lambda name: FENCE.sub(lambda code: "\n" * code[0].count("\n"), self.texts[name]))

    @cached_property
    def modules(self) -> dict[str, str]:
        """The files of the package's modules, by the module's name without `lit_effattn`."""
        package = [name for name in self.sources if name.startswith(PRODUCT)]
        return {name[:-3].removeprefix("lit_effattn/").replace("/", "."): name for name in package}

    @cached_property
    def imports(self) -> dict[str, dict[str, int]]:
        """The modules of the package that each module imports, at its top or within functions, with their lines."""
        return {module: dict(self._imported(module)) for module in self.modules}

    def _imported(self, module: str) -> Iterator[tuple[str, int]]:
        for node in _statements(self.tree(self.modules[module])):
            for name in _names(node):
                top, _, rest = name.partition(".")
                if top == "lit_effattn" and (known := self._module_of(rest)) is not None and known != module:
                    yield known, node.lineno  # type: ignore[attr-defined]

    def _module_of(self, name: str) -> str | None:
        """Return the module that `name` is, or is defined in."""
        while name:
            for known in (name, f"{name}.__init__"):
                if known in self.modules:
                    return known
            name = name.rpartition(".")[0]
        return None

    def has(self, name: str) -> bool:
        """Return whether a file or folder exists."""
        return name in self.texts or (ROOT / name).exists()


def _below(folder: str, pattern: str) -> list[Path]:
    return sorted(path for path in (ROOT / folder).rglob(pattern) if "__pycache__" not in path.parts)


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a module and its statements, without the expressions in them."""
    yield node
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for statement in getattr(node, field, ()):
            yield from _statements(statement)


def _names(node: ast.AST) -> list[str]:
    """Return the full names that a statement imports."""
    if isinstance(node, ast.ImportFrom) and node.module:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


Problems = Iterator[tuple[str, int, str]]
"""File, line and message."""


def forms(repository: Repository) -> Problems:
    """Strings, comments and pages have none of the forms at which readers stopped."""
    for name in repository.pages:
        page = re.sub(r"`[^`\n]*`", "`x`", repository.prose(name))
        yield from ((name, line, message) for line, message in _forms(page))
    for name in repository.sources:
        text = repository.texts[name]
        if name == "scripts/lint.py" or not any(_forms(text)):  # most files: their tokens are not looked at
            continue
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if tokenize.tok_name[token.type] in ("STRING", "FSTRING_MIDDLE", "COMMENT"):
                for line, message in _forms(token.string):
                    yield name, token.start[0] + line - 1, message


def _forms(text: str) -> Iterator[tuple[int, str]]:
    for form, remedy in FORMS.items():
        for match in re.finditer(form, text):
            yield _line(text, match.start()), f"{match.group()!r}: {remedy}"


def docstrings(repository: Repository) -> Problems:
    """Docstrings open with a noun or a verb, and have sections that the site shows as such."""
    for name in repository.sources:
        for node in _statements(repository.tree(name)):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if (text := ast.get_docstring(node)) is None:
                continue
            line = node.body[0].lineno
            if text.startswith(OPENINGS):
                yield name, line, f"{text.split()[0]!r} opens a docstring: open with a noun or a verb"
            if re.search(r"^ *Example:$", text, re.M):
                yield name, line, "'Example:' is shown as quoted prose on the site: 'Examples:'"
            for section in re.findall(r"Raises:\n((?:[ ]+.*\n?)+)", text):
                for start in re.findall(r"^ +\w+(?:Error|Exception)\w*: ([a-z]\w*)", section, re.M):
                    yield name, line, f"{start!r} begins an entry of Raises: 'ValueError: If …'"


def rooms(repository: Repository) -> Problems:
    """Imports go one way, as CONTRIBUTING.md says."""
    for module, imports in repository.imports.items():
        room, _, rest = module.partition(".")
        if room not in ROOMS:
            yield repository.modules[module], 1, f"{room} is not in ROOMS of scripts/lint.py"
            continue
        for name, line in imports.items():
            other, _, below = name.partition(".")
            if other != room and other != "checks" and other not in ROOMS[room]:
                yield repository.modules[module], line, f"{room} may not import {other}"
            kind, used = rest.partition(".")[0], below.partition(".")[0]
            if room == other == "datamodules" and kind in DATA and used not in (kind, *DATA[kind]):
                yield repository.modules[module], line, f"the data of {kind} may not import those of {used}"
    for folder in ROOMS.keys() - {module.partition(".")[0] for module in repository.modules}:
        yield "scripts/lint.py", 1, f"ROOMS has {folder}, which does not exist"


def circles(repository: Repository) -> Problems:
    """No two modules and no two folders import each other."""
    modules = {
        module: {*imports} - {f"{module.rpartition('.')[0]}.__init__"} for module, imports in repository.imports.items()
    }
    for graph, file_of in ((modules, repository.modules.get), (ROOMS, lambda room: "scripts/lint.py")):
        left = {name: set(below) for name, below in graph.items()}
        while lowest := {name for name, below in left.items() if not below & left.keys()}:
            left = {name: below for name, below in left.items() if name not in lowest}
        if left:
            first = min(left)
            yield file_of(first) or first, 1, f"a circle of imports among {', '.join(sorted(left))}"


def light(repository: Repository) -> Problems:
    """Attention, its operations and the laws need torch and numpy alone; nothing is imported by its bare name."""
    allowed = {"torch", "typing_extensions", "numpy", "lit_effattn", "triton", *sys.stdlib_module_names}
    for module, name in repository.modules.items():
        if module.partition(".")[0] in LIGHT:
            for node in repository.tree(name).body:
                for imported in _names(node):
                    top = imported.partition(".")[0]
                    if top not in allowed or (top == "triton" and not name.endswith("triton_kernels.py")):
                        yield (
                            name,
                            node.lineno,
                            f"{top} must be imported where it is used: torch and numpy suffice here",
                        )
    definitions = "lit_effattn/attention/reference.py"
    for imported in (imported for node in _statements(repository.tree(definitions)) for imported in _names(node)):
        if imported.partition(".")[0] not in ("__future__", "torch", "math", "itertools"):
            yield definitions, 1, f"the definitions may not use {imported}"
    for module, imports in repository.imports.items():
        if "attention.reference" in imports:
            yield repository.modules[module], imports["attention.reference"], "the definitions are for tests alone"
    for name in (*repository.sources, *repository.tests):
        for match in re.finditer(r"^\s*(?:from|import) (datamodules|callbacks)\b", repository.texts[name], re.M):
            yield name, _line(repository.texts[name], match.end()), f"import lit_effattn.{match[1]}"


def links(repository: Repository) -> Problems:
    """Links lead to files and headings, and files, targets of make and extras that pages name exist."""
    optional = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[project.optional-dependencies]")[2]
    extras = re.findall(r"^([a-z0-9]+) = \[", optional.partition("\n[")[0], re.M)
    targets = {f"make {target}" for target in re.findall(r"^([a-z-]+):", repository.texts["Makefile"], re.M)}
    for name in (*repository.pages, "docs/tutorial.ipynb"):
        if name == "CHANGELOG.md":  # it speaks of files that were deleted
            continue
        text = _markdown_of(repository.texts[name]) if name.endswith(".ipynb") else repository.prose(name)
        for match in re.finditer(r"\]\((?!\w+:)([^)\s#]*)#?([^)\s]*)\)", text):
            path = (ROOT / name).parent.joinpath(match[1]).resolve().relative_to(ROOT).as_posix() if match[1] else name
            if not repository.has(path):
                yield name, _line(text, match.start()), f"{match[1]} does not exist"
            elif match[2] and match[2] not in _anchors(repository.prose(path)):
                yield name, _line(text, match.start()), f"{path} has no heading #{match[2]}"
        if name.startswith("docs/benchmarks/raw/"):  # tables of the day of their measurement
            continue
        for match in re.finditer(r"`((?:tests|scripts|benchmarks|configs|docs|lit_effattn)/[\w/.-]+)`", text):
            if not repository.has(match[1]):
                yield name, _line(text, match.start()), f"{match[1]} does not exist"
        for match in re.finditer(r"(?:`|^ {4})(make [a-z-]+)", text, re.M):
            if match[1] not in targets:
                yield name, _line(text, match.start()), f"the Makefile has no target for `{match[1]}`"
        for match in re.finditer(r"lit-effattn\[([\w,]+)\]", text):
            for extra in {*match[1].split(",")} - {*extras}:
                yield name, _line(text, match.start()), f"pyproject.toml has no extra {extra}"


def _markdown_of(notebook: str) -> str:
    cells = json.loads(notebook)["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def _anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}


def configurations(repository: Repository) -> Problems:
    """Pages name configurations that exist, and docs/configurations.md lists all of them."""
    shipped = {Path(name).stem for name in repository.texts if name.startswith("configs/")}
    listed = {name for name, _ in _families(repository.texts["docs/configurations.md"])}
    for missing in sorted(shipped - listed):
        yield "docs/configurations.md", 1, f"{missing} is not listed"
    for name in set(repository.pages) - {"CHANGELOG.md"}:
        if name.startswith("docs/benchmarks/raw/"):  # tables of the day of their measurement
            continue
        text = repository.texts[name]
        named = re.finditer(r"configs/(\w+)\.yaml|--config (?:configs/)?(\w+)(?![\w/])", text)
        for config, position in [*((m[1] or m[2], m.start()) for m in named), *_families(text)]:
            if config not in shipped | USERS_OWN:
                yield name, _line(text, position), f"no configuration is called {config}"


def _families(text: str) -> Iterator[tuple[str, int]]:
    """Yield the names that `digits_{linear,softmax}` has, and where."""
    for match in re.finditer(r"\b(\w+_)\{([\w,]+)\}", text):
        yield from ((match[1] + member, match.start()) for member in match[2].split(","))


def pages(repository: Repository) -> Problems:
    """The README stays short, blocks that do not run say why, and the tutorial was executed."""
    readme = repository.texts["README.md"]
    if len(readme.split()) > 1000 or len(readme.splitlines()) >= 150 or max(map(len, readme.splitlines())) > 160:
        yield "README.md", 1, "at most 1,000 words in 149 lines of 160 characters"
    screen = readme.partition("\n## ")[0]
    commands = [" ".join(line.split()[:2]) for line in re.findall(r"^ {4}(.*)$", screen, re.M)]
    if (
        commands != ["pip install", "lit-effattn generate", "lit-effattn fit"]
        or not -1 < screen.find("![") < screen.find("pip install")
        or len(re.findall(r"^- ", screen, re.M)) != 4
    ):
        yield "README.md", 1, "begin with a picture, the commands to install, generate and fit, and four lines"
    for name in repository.pages:
        for match in FENCE.finditer(repository.texts[name]):
            if match[1] == "py" and not match[2].startswith("# Needs a trained checkpoint.\n"):
                yield name, _line(repository.texts[name], match.start()), "the first line says why it is not run"
    notebook = repository.texts["docs/tutorial.ipynb"]
    code = [cell for cell in json.loads(notebook)["cells"] if cell["cell_type"] == "code"]
    outputs = json.dumps([cell.get("outputs") for cell in code])
    if [cell["execution_count"] for cell in code] != [*range(1, len(code) + 1)] or '"error"' in outputs:
        yield "docs/tutorial.ipynb", 1, "execute it anew: CONTRIBUTING.md has the command"
    if len(notebook) > 300_000 or re.search(r"(?<![\w.])/(home|root|tmp|work)/", outputs):
        yield "docs/tutorial.ipynb", 1, "its outputs must be small, and without paths of a machine"


CHECKS: tuple[Callable[[Repository], Iterable[tuple[str, int, str]]], ...]
CHECKS = (forms, docstrings, rooms, circles, light, links, configurations, pages)


def problems(repository: Repository) -> list[str]:
    """Return the problems that all checks find, as `file:line: message`."""
    return [f"{name}:{line}: {what}" for name, line, what in sorted({p for check in CHECKS for p in check(repository)})]


if __name__ == "__main__":
    messages = problems(Repository())
    print(*messages, sep="\n", end="\n" if messages else "")
    sys.exit(bool(messages))
