"""Docstrings, comments, messages and pages have none of the forms at which readers stopped, and no such names."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    path
    for folder in ("lit_effattn", "datamodules", "callbacks", "benchmarks", "scripts")
    for path in (ROOT / folder).rglob("*.py")
)
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

# A form, and what to write in its place.
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
OPENINGS = ("What ", "Refuse ", "Refuses ", "That ", "How ", "Where ", "Who ", "Nothing ", "Say ", "Says ", "Listen")
ALLOWED = {("datamodules/common/tokens.py", "fresh")}  # a public field of TokenBatch
NAMES = {
    "found",
    "mine",
    "theirs",
    "others",
    "late",
    "rise",
    "rest_of",
    "fresh",
    "said",
    "begun_by",
    "there",
    "weigh",
    "look",
}


def _docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body
            if (text := ast.get_docstring(node)) is not None:
                yield body[0].lineno, text


def _texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of every string and comment of a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def _names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of every name that a module defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def _prose(page: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of a page's prose, without its code blocks."""
    code = False
    for number, line in enumerate(page.splitlines(), 1):
        if line.lstrip().startswith("```"):
            code = not code
        elif not code:
            yield number, re.sub(r"`[^`]*`", "`x`", line)


def problems(path: Path) -> list[str]:
    """Return the forms in a file that are not to return, as 'file:line: form: remedy'."""
    name, text = str(path.relative_to(ROOT)), path.read_text()
    result = []
    for line, words in _prose(text) if path.suffix == ".md" else _texts(text):
        for form, remedy in FORMS.items():
            for match in re.finditer(form, words):
                result.append(f"{name}:{line + words.count(chr(10), 0, match.start())}: {match.group()!r}: {remedy}")
    if path.suffix == ".py":
        tree = ast.parse(text)
        for line, docstring in _docstrings(tree):
            if docstring.startswith(OPENINGS):
                result.append(f"{name}:{line}: {docstring.split()[0]!r} opens a docstring: open with a noun or a verb")
            if re.search(r"^ *Example:$", docstring, re.MULTILINE):
                result.append(f"{name}:{line}: 'Example:' is shown as quoted prose on the site: 'Examples:'")
            for section in re.findall(r"Raises:\n((?:[ ]+.*\n?)+)", docstring):
                for start in re.findall(r"^ +\w+(?:Error|Exception)\w*: ([a-z]\w*)", section, re.MULTILINE):
                    result.append(f"{name}:{line}: {start!r} begins an entry of Raises: 'ValueError: If …'")
        for line, word in _names(tree):
            if word.lstrip("_") in NAMES and (name, word) not in ALLOWED:
                result.append(f"{name}:{line}: {word!r} is a name: the field's noun for the thing")
    return result


@pytest.mark.parametrize("path", [*SOURCES, *PAGES], ids=lambda path: str(path.relative_to(ROOT)))
def test_no_form_that_makes_a_reader_stop_returns(path):
    assert not problems(path), "\n".join(problems(path))


def test_each_form_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.test_prose.ROOT", tmp_path)
    bad = tmp_path / "bad.py"
    bad.write_text(
        '''def rest_of(x):
    """What is left of x.

    Raises:
        ValueError: x is dear.

    Example:
        >>> x
    """
    raise ValueError("x is no number")
'''
    )
    assert [problem.split(":")[2].strip() for problem in problems(bad)] == [
        "'dear'",
        "'is no n'",
        "'What' opens a docstring",
        "'Example",
        "'x' begins an entry of Raises",
        "'rest_of' is a name",
    ]
    page = tmp_path / "page.md"
    page.write_text("A list is dealt over the layers.\n\n```\nx is no y\n```\n")
    assert len(problems(page)) == 1
