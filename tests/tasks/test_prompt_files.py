import json
from pathlib import Path

import pytest

from lit_effattn.tasks.prompt_files import Prompt, read_prompts, write_continued


def written(folder: Path, content: bytes, name: str = "prompts.txt") -> Path:
    (folder / name).write_bytes(content)
    return folder / name


def test_a_line_is_a_prompt(tmp_path: Path):
    path = written(tmp_path, "def f(\n\n  x = 1\u2028y\n\u00e0\\n".encode())
    assert read_prompts(path) == [Prompt("def f("), Prompt("  x = 1\u2028y"), Prompt("\u00e0\\n")]


def test_a_line_of_jsonl(tmp_path: Path):
    lines = ['"a\\nb"', "", '{"prompt": "c", "n_tokens": 3}', '{"prompt": ""}']
    path = written(tmp_path, "\n".join(lines).encode(), "prompts.jsonl")
    assert read_prompts(path) == [Prompt("a\nb"), Prompt("c", 3), Prompt("")]


def test_a_byte_order_mark_and_the_case_of_the_name_do_not_matter(tmp_path: Path):
    assert read_prompts(written(tmp_path, "\ufeffa".encode())) == [Prompt("a")]
    assert read_prompts(written(tmp_path, '\ufeff"a"'.encode(), "X.JSONL")) == [Prompt("a")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("def f(", "prompts.jsonl:2: .* a line of .jsonl is a string or an object"),
        ("[" * 100_000, "prompts.jsonl:2: "),
        ("3", "prompts.jsonl:2: 3 is neither a string nor"),
        ('{"text": "a"}', "is neither a string nor"),
        ('{"prompt": "a", "seed": 1}', "is neither a string nor"),
        ('{"prompt": 1}', "prompt must be a string"),
        ('{"prompt": "a", "n_tokens": 0}', "n_tokens an integer of at least 1"),
        (r'"a\ud800"', "half of a surrogate pair is not a character"),
        ('{"prompt": "a", "n_tokens": true}', "n_tokens an integer of at least 1"),
    ],
)
def test_other_lines_are_refused(line: str, message: str, tmp_path: Path):
    with pytest.raises(ValueError, match=message):
        read_prompts(written(tmp_path, f'"a"\n{line}\n'.encode(), "prompts.jsonl"))


def test_other_files_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="has no prompts; write one a line"):
        read_prompts(written(tmp_path, b"\n \n"))
    with pytest.raises(ValueError, match="is not UTF-8: invalid start byte at byte 1"):
        read_prompts(written(tmp_path, b"a\xff"))
    with pytest.raises(OSError, match="nowhere"):
        read_prompts(tmp_path / "nowhere.txt")


def test_samples_are_json_lines(tmp_path: Path):
    write_continued([Prompt("a\n"), Prompt("b")], [["1", "2"], ["\u00e0"]], tmp_path / "samples.jsonl")
    lines = (tmp_path / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [
        {"prompt": "a\n", "samples": ["1", "2"]},
        {"prompt": "b", "samples": ["\u00e0"]},
    ]
