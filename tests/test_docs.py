"""The documentation: its Python runs, its links lead somewhere, and the configurations that it names exist."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import __main__ as benchmarks_command
from benchmarks import reproduce
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
BLOCKS = [
    pytest.param(code, id=f"{page}-{number}")
    for page, text in PAGES.items()
    for number, (language, code) in enumerate(FENCE.findall(text))
    if language == "python"
]
OTHER_LIBRARIES = [code for language, code in FENCE.findall(PAGES["docs/why-not.md"]) if language == "python3"]
SHIPPED = {path.stem for path in ROOT.glob("configs/*.yaml")}
PARSED = ("copy_linear", "enwik8_al_rfou", "sorting_infinite")
"""Configurations whose commands on docs/reproduce.md are parsed every time."""
USERS_OWN = {"counting"}
"""Configurations that a page asks the reader to write."""


def run(code: str) -> dict:
    exec(code, names := {"__name__": "documentation"})
    return names


def block(page: str, contents: str) -> str:
    (code,) = [code for language, code in FENCE.findall(PAGES[page]) if language == "python" and contents in code]
    return code


@pytest.mark.parametrize("code", BLOCKS)
def test_python_runs(code: str):
    run(code)


@pytest.mark.parametrize("code", OTHER_LIBRARIES)
def test_python_of_other_libraries_runs_where_they_are_installed(code: str):
    for library in re.findall(r"^from (\w+)", code, re.M):
        pytest.importorskip(library)
    if '"cuda"' in code and not torch.cuda.is_available():
        pytest.skip("it needs a GPU")
    run(code)


def test_python_that_does_not_run_says_why():
    """Blocks marked ```py are not run: they need a trained checkpoint, and their first line says so."""
    blocks = [code for text in PAGES.values() for language, code in FENCE.findall(text) if language == "py"]
    assert blocks
    assert all(code.startswith("# Needs a trained checkpoint.\n") for code in blocks)


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
    tokenizers = pytest.importorskip("tokenizers")
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


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page: str):
    folder = (ROOT / page).parent
    links = re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", PAGES[page]))
    local = [link.split("#") for link in links if not re.match(r"\w+:", link)]
    missing = ["#".join(link) for link in local if link[0] and not (folder / link[0]).is_file()]
    assert not missing
    for path, *anchor in local:
        target = (folder / path if path else ROOT / page).resolve()
        if anchor:
            assert anchor[0] in anchors(target.read_text()), f"{path}#{anchor[0]}"


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.M)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_named_configurations_exist(page: str):
    text = PAGES[page]
    named = set(re.findall(r"configs/(\w+)\.yaml|--config (?:configs/)?(\w+)(?![\w/])", text))
    assert {name for pair in named for name in pair if name} - USERS_OWN <= SHIPPED
    assert families(text) <= SHIPPED


def test_every_shipped_configuration_is_listed():
    assert families(PAGES["docs/configurations.md"]) == SHIPPED


def families(text: str) -> set[str]:
    """`digits_{linear,softmax}` names two configurations."""
    pairs = re.findall(r"\b(\w+_)\{([\w,]+)\}", text)
    return {family + member for family, members in pairs for member in members.split(",")}


def flags_of_figures() -> dict[str, list[str]]:
    """Collect the flags that docs/reproduce.md gives to each configuration, all of one in a row: parsers are slow."""
    flags: dict[str, list[str]] = {}
    for words in map(shlex.split, re.findall(r"`(?:fit|test) --config ([^`]+)`", PAGES["docs/reproduce.md"])):
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


def test_small_runs_and_benchmarks_of_the_papers_figures():
    page = PAGES["docs/reproduce.md"]
    for words in re.findall(r"`python -m benchmarks ([^`]+)`", page):
        benchmarks_command._parse(shlex.split(words))
    tables, _, _ = page.partition(reproduce.BEGIN)
    assert all(re.search(rf"[|,] {re.escape(run.name)}[ ,]", tables) for run in reproduce.RUNS)
    table = reproduce.table(reproduce.read(ROOT / "docs/reproduce-small.jsonl"))
    assert f"{reproduce.BEGIN}\n\n{table}\n\n{reproduce.END}" in page


def test_the_readme_is_short():
    lines = PAGES["README.md"].splitlines()
    assert len(lines) < 150
    assert max(map(len, lines)) <= 160
    assert len(PAGES["README.md"].split()) <= 1000


def test_the_readme_begins_with_a_picture_three_commands_and_four_lines():
    screen = PAGES["README.md"].partition("\n## ")[0]
    assert len(screen.splitlines()) <= 20
    picture, commands = screen.index("!["), re.findall(r"^ {4}(.*)$", screen, re.M)
    assert picture < screen.index(commands[0])
    begun = [" ".join(command.split()[:2]) for command in commands]
    assert begun == ["pip install", "lit-effattn generate", "lit-effattn fit"]
    assert "/whl/cpu" in screen
    assert len(re.findall(r"^- ", screen, re.M)) == 4
