import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_effattn import LanguageModel, Transformer
from lit_effattn.attention import LinearAttention
from lit_effattn.attention.positions import LearnedPositions
from lit_effattn.datamodules.text.tokenizers import ByteTokenizer
from lit_effattn.tasks.options import TextOptions
from lit_effattn.tasks.samples import Prompt, read_prompts


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


def test_a_model_with_few_positions_gives_what_it_can(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """16 positions take <start>, a prompt of P bytes and all tokens but the last: 16 - P are drawn."""
    backbone = Transformer(8, 2, 1, attention=LinearAttention, positions=partial(LearnedPositions, max_len=16))
    model = LanguageModel(backbone, 257, tokenizer=ByteTokenizer().to_json()).eval()

    def write(**options: Any) -> str:
        return model.write_samples(lambda: tmp_path, TextOptions(temperature=0, **options))

    whole = model.sample(torch.tensor([[256, *b"abc"]]), 13, temperature=0)
    state = tmp_path / "a.state"
    said = write(prompt="abc", n_tokens=99)
    remedy = "draw at most 13 tokens (--n_tokens 13), or use a model without learned positions"
    assert said.startswith(f"13 tokens of 99: the model has 16 positions; {remedy}\ntext: ")
    exact = write(prompt="abc", n_tokens=13)
    assert exact == f"text: {tmp_path / 'samples.txt'}"
    expected = "abc" + ByteTokenizer().decode(whole[0].numpy())
    assert (tmp_path / "samples.txt").read_bytes().decode() == f"--- 0\n{expected}"
    write(prompt="abc", n_tokens=4, save_state=str(state))
    assert write(state=str(state), n_tokens=99).startswith("9 tokens of 99")
    write(prompt="abc", n_tokens=13, save_state=str(state))
    for options, words in (
        (
            {"prompt": "b" * 20},
            "the prompt leaves no position to draw from: it needs 5 more than the model's 16; shorten",
        ),
        (
            {"state": str(state), "prompt": "c"},
            f"--state {state} leaves no position .* 2 more .* use an earlier state, or",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            write(n_tokens=1, **options)
    path = written(tmp_path, f"abc\n{'b' * 20}\nabcdefgh\n".encode())
    message = "2 of 3 prompts have fewer tokens than asked for, since the model has 16 positions: 'bbbbb"
    with pytest.raises(ValueError, match=re.escape(message)):
        write(prompts_file=str(path), n_tokens=13)
    entries = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    assert ["abc" + text for text in entries[0]["samples"]] == [expected]
    assert entries[1]["samples"] == []
    assert len(entries[2]["samples"]) == 1
