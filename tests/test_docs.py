"""The Python of the pages runs, and computes what the pages say. `make lint` checks links and names."""

import json
import re
import shlex
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lit_effattn.cli.command import CLI
from lit_effattn.settings.arguments import Arguments

ROOT = Path(__file__).parent.parent
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in sorted(
        [*map(ROOT.joinpath, ("README.md", "SECURITY.md", "CONTRIBUTING.md")), *ROOT.glob("docs/**/*.md")]
    )
}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
PARSED = ("copy_linear", "enwik8_al_rfou", "sorting_infinite")
"""Configurations whose commands on docs/reproduce.md are parsed every time."""


@cache
def run(code: str) -> dict:
    """Run a block, and return its variables."""
    exec(code, names := {"__name__": "documentation"})
    return names


def blocks(page: str, wanted: str = "python") -> list[str]:
    return [code for language, code in FENCE.findall(PAGES[page]) if language == wanted]


def block(page: str, contents: str) -> str:
    (code,) = [code for code in blocks(page) if contents in code]
    return code


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)])
def test_python_runs(page: str):
    for code in blocks(page):
        run(code)


@pytest.mark.exhaustive
@pytest.mark.parametrize("code", blocks("docs/why-not.md", "python3"))
def test_python_of_other_libraries_runs_where_they_are_installed(code: str):
    for library in re.findall(r"^from (\w+)", code, re.M):
        pytest.importorskip(library)
    if '"cuda"' in code and not torch.cuda.is_available():
        pytest.skip("it needs a GPU")
    run(code)


def test_an_attention_works_alone():
    names = run(block("README.md", "attention = LinearAttention("))
    assert names["state"].length.tolist() == [1001, 1001]


def test_a_kind_of_your_own_keeps_the_segment_law():
    names = run(block("docs/own-kind.md", "class MeanAttention"))
    attention = names["MeanAttention"](8, 2, True).double()
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    whole, _ = attention(x)
    first, state = attention(x[:, :4])
    second, state = attention(x[:, 4:], state, torch.tensor([5, 2]))
    assert torch.allclose(torch.cat([first, second], 1)[0], whole[0])
    assert torch.allclose(second[1, :2], whole[1, 4:6])
    values = attention.v_proj(x).cumsum(1) / torch.arange(1, 10)[:, None]
    assert torch.allclose(whole, attention.out_proj(values))


def test_the_codec_of_an_exported_model_is_its_tokenizer():
    import tokenizers

    from lit_effattn.datamodules.text.tokenizers import BPETokenizer, PretrainedTokenizer

    codec = run(block("docs/export.md", "def codec(about)"))["codec"]
    text = "a bird\n\n in a box, naïve\n屋\u2028a\r\nb"
    learnt = BPETokenizer.learn([text * 9], 290)
    content = json.loads(tokenizers.Tokenizer.from_str(json.dumps(learnt.spec()["vocabulary"])).to_str())
    for made in (learnt, PretrainedTokenizer(content, 300, start=289)):
        about = {"start": made.start, "vocabulary": made.kind, "tokenizer": made.spec()}  # as `export` writes it
        encode, decode = codec(json.loads(json.dumps(about)))
        assert encode(text) == made.encode(text).tolist()
        assert decode([made.start, *encode(text)]) == text


def test_data_of_your_own_are_token_batches():
    data = run(block("docs/own-data.md", "class Counting"))["Counting"](vocab_size=5, length=7, batch_size=3)
    batch = next(iter(data.train_dataloader()))
    assert isinstance(batch.inputs, Tensor)
    assert batch.inputs.shape == (3, 7)
    assert torch.equal((batch.inputs + 1) % 5, batch.targets)


def flags_of_figures() -> dict[str, list[str]]:
    """Collect the flags that docs/reproduce.md gives to each configuration, all of one in a row: parsers are slow.

    Those that name another backbone are the last: options of the one before are no longer accepted after them.
    """
    flags: dict[str, list[str]] = {}
    commands = map(shlex.split, re.findall(r"`(?:fit|test) --config ([^`]+)`", PAGES["docs/reproduce.md"]))
    for words in sorted(commands, key=lambda words: "--model.backbone" in words):
        # A test's flags are those of the model and the data, which fit has, too; there is no checkpoint.
        flags.setdefault(words[0], []).extend(shlex.split(shlex.join(words[1:]).replace("--ckpt_path best", "")))
    return {name: words for name, words in flags.items() if words}


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        pytest.param(name, flags, id=name, marks=[] if name in PARSED else pytest.mark.exhaustive)
        for name, flags in flags_of_figures().items()
    ],
)
@pytest.mark.filterwarnings("ignore:LightningCLI's args")
def test_commands_of_the_papers_figures_are_understood(name: str, flags: list[str], monkeypatch: pytest.MonkeyPatch):
    """The command's own parser takes their flags; nothing is built."""
    monkeypatch.setattr(CLI, "instantiate_classes", lambda self: None)
    monkeypatch.setattr(CLI, "_run_subcommand", lambda *_: None)
    CLI(Arguments(["fit", "--config", str(ROOT / "configs" / f"{name}.yaml"), *flags]))
