"""`lit-effattn report`: a page of a tiny run, read as HTML, and what its parts are made of."""

import io
import json
import math
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from PIL import Image
from torch import nn

from lit_effattn import LSTM, Transformer
from lit_effattn.analysis import report
from lit_effattn.analysis.attention_pictures import attention_pictures, png
from lit_effattn.analysis.charts import charts
from lit_effattn.analysis.records import RunRecord
from lit_effattn.analysis.report import find_run, output_figures
from lit_effattn.analysis.report_samples import filled_rows, first_sequence, records, rows, token_bits, write_samples
from lit_effattn.attention import (
    CompressiveAttention,
    InfiniteAttention,
    LinearAttention,
    LSHAttention,
    PerformerAttention,
    ShawAttention,
    SoftmaxAttention,
    SoftmaxCrossAttention,
    SparseAttention,
    TransformerXLAttention,
)
from lit_effattn.cli import main
from lit_effattn.datamodules import IGNORE, LabelledBatch, PairBatch, SpeechBatch, TokenBatch
from lit_effattn.nn.encoder_decoder import EncoderDecoder
from lit_effattn.settings.defaults import split
from lit_effattn.tasks import LanguageModel, PixelModel, Task
from lit_effattn.tasks.options import ImageOptions, TextOptions
from lit_effattn.tasks.predictions import write_lines
from tests.analysis.test_sweep import CONFIG as SWEEP
from tests.support.checkpoint_parts import divide
from tests.support.commands import fails, spec

CONFIG = {**SWEEP, "trainer": {**SWEEP["trainer"], "default_root_dir": "runs/tiny"}}
EMPTY = {"meta", "img", "wbr"}  # elements without an end


class Page(HTMLParser):
    """The elements of a page, its text, and whether all elements are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self.text += "\n"

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of four steps, in the current folder."""
    folder = tmp_path_factory.mktemp("report")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("tiny.yaml").write_text(yaml.safe_dump(CONFIG))
        main(["fit", "--config", "tiny.yaml", "--trainer.enable_progress_bar", "false"])
        (config,) = Path("runs/tiny").glob("*/config.yaml")
        yield config.parent


def test_a_page_loads_nothing_and_says_what_the_run_is(run: Path):
    main(["report", "tiny", "--samples", "2"])
    path = run / "report.html"
    page = Page(path.read_text())
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "link", "iframe", "object", "embed", "base", "form"})
    assert not any(name.startswith("on") or name == "href" for _, attributes in page.tags for name in attributes)
    sources = [attributes["src"] for _, attributes in page.tags if "src" in attributes]
    assert len(sources) == 2
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in page.tags
    assert "url(" not in path.read_text()
    assert all(attributes["xlink:href"].startswith("#") for tag, attributes in page.tags if tag == "use")
    order = ["val/perplexity", "by step", "Samples", "Attention", "Cost", "Configuration", "settings as by default"]
    places = [page.text.index(part) for part in order]
    assert places == sorted(places)
    assert "transfer_from\nnull" not in page.text[: places[-1]]
    default = places[-1]
    assert page.text.index("model.optimizer.lr\n0.003") < default < page.text.index("trainer.max_steps\n-1")
    assert "val/perplexity" in page.text
    assert "parameters" in page.text
    assert "bits_per_target" in page.text
    assert "LinearAttention, backbone.blocks.0.attention" in page.text
    assert "no attention weights" not in page.text


def test_no_report_is_replaced_and_none_is_left_half_written(run: Path, capsys, monkeypatch):
    Path("there.html").write_text("mine")
    assert "--output there.html exists" in fails(capsys, "report", "tiny", "--output", "there.html")
    assert Path("there.html").read_text() == "mine"
    for name in ("report.html", "report_1.html"):
        if not (run / name).exists():
            main(["report", str(run), "--samples", "0"])
    assert (run / "report_1.html").is_file()
    before = set(run.rglob("*"))
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    assert "full" in fails(capsys, "report", str(run), "--samples", "0")
    assert set(run.rglob("*")) == before


def test_what_comes_from_files_is_text(run: Path):
    """Names and values of a run that somebody else made: alone, and compared with another."""
    hostile = Path("<script>alert(1)<&'\"/2026-01-01_00-00-00")
    shutil.copytree(run, hostile, ignore=shutil.ignore_patterns("*.html", "checkpoints"))
    config = yaml.safe_load((hostile / "config.yaml").read_text())
    config["</td><script>"] = "</table><img src=http://x onerror=alert(1)>"
    (hostile / "config.yaml").write_text(yaml.safe_dump(config))
    (metrics,) = hostile.glob("csv/*/metrics.csv")
    metrics.write_text(metrics.read_text().replace("train/loss", "train/<svg onload=alert(1)>"))
    main(["report", str(hostile), "--output", "one.html"])
    main(["compare", str(hostile), str(run), "--html", "both.html"])
    for name, own in (
        ("one.html", ["The run has no checkpoint."]),
        ("both.html", ["Settings that differ", "by seconds"]),
    ):
        page = Page(Path(name).read_text())
        assert "script" not in {tag for tag, _ in page.tags}
        assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
        for text in ("<script>alert(1)<&'\"", "</td><script>", "</table><img src=http://x onerror=alert(1)>", *own):
            assert text in page.text
        assert "<svg onload=alert(1)> by step" in page.text


def test_a_page_of_compare_replaces_none(run: Path, capsys):
    Path("mine.html").write_text("mine")
    assert "--html mine.html exists" in fails(capsys, "compare", str(run), "--html", "mine.html")
    assert Path("mine.html").read_text() == "mine"
    with pytest.raises(SystemExit):
        main(["compare", str(run), "--html", "new.html", "--format", "csv"])
    assert "--format: not allowed with argument --html" in capsys.readouterr().err


def test_runs_are_found(run: Path, capsys):
    best = (run / "checkpoints/best.ckpt").resolve()
    for name in ("best", "tiny", str(run), str(best)):
        assert tuple(path.resolve() for path in find_run(name)) == (run.resolve(), best)
    assert find_run("last")[1].name == "last.ckpt"
    shutil.copy(best, "alone.ckpt")
    assert find_run("alone.ckpt") == (Path("alone.ckpt").resolve(), Path("alone.ckpt").resolve())
    Path("proj/weights").mkdir(parents=True)
    Path("proj/config.yaml").write_text("of: another program")
    alone = Path(shutil.copy(best, "proj/weights")).resolve()
    assert find_run(str(alone)) == (alone, alone)
    divided = divide(torch.load(best, weights_only=True), Path("divided.ckpt"), 2)
    main(["report", str(divided), "--samples", "0"])
    assert Path("report.html").is_file()
    main(["compare", str(divided), str(best), str(alone), "--format", "csv"])
    named = [line.partition(",")[0] for line in capsys.readouterr().out.splitlines() if ".ckpt" in line]
    assert named[-3:] == ["divided.ckpt", str(best.relative_to(Path.cwd())), "proj/weights/best.ckpt"]
    assert "report missing: there is no such folder" in fails(capsys, "report", "missing")
    assert "--length 1 must be at least 2" in fails(capsys, "report", "tiny", "--length", "1")


def test_the_data_of_somebody_elses_run_are_not_read(run: Path):
    """The page says why there are no samples."""
    foreign = Path("foreign/2026-01-01_00-00-00")
    shutil.copytree(run, foreign, ignore=shutil.ignore_patterns("*.html", "best.ckpt"))
    config = foreign / "config.yaml"
    config.write_text(config.read_text().replace("lit_effattn.datamodules.", "os.system."))
    main(["report", str(foreign), "--samples", "1", "--output", "foreign.html"])
    assert re.search("No test data: .*is not of a run of yours", Page(Path("foreign.html").read_text()).text)


# --------------------------------------------------------------------------------------------------------- attention


def image(content: bytes) -> Image.Image:
    return Image.open(io.BytesIO(content))


def drawn(backbone: nn.Module, n: int = 12):
    torch.manual_seed(0)
    return attention_pictures(backbone.eval(), lambda: backbone(torch.randn(1, n, backbone.d_model)))


SIGNAL = {"mem_len": 2, "segment_len": 3, "n_basis": 10, "n_samples": 6, "widths": (0.1,)}


TERMS = ["weights", *(f"term ({letter})" for letter in "abcd")]
SHOWN = (
    *((kind, ["weights"]) for kind in (SoftmaxAttention, ShawAttention, LinearAttention, PerformerAttention)),
    (partial(SparseAttention, stride=3), ["the given pattern", "weights"]),
    (partial(SparseAttention, stride=3, combine="heads"), ["the given pattern", "weights"]),
    (LSHAttention, ["weights", "buckets"]),
    *((kind, TERMS) for kind in (CompressiveAttention, TransformerXLAttention)),
    (partial(InfiniteAttention, **SIGNAL), [*TERMS, "density"]),
    (partial(InfiniteAttention, **SIGNAL | {"n_basis": 0}), TERMS),
)


def test_every_kind_shows_what_it_has():
    for make, shown in SHOWN:
        (found,) = drawn(Transformer(8, 2, 1, attention=make))
        captions = [picture.caption for picture in found.pictures]
        of_first = [caption.partition(": ")[2] for caption in captions if caption[:6] in ("head 1", "every ")]
        assert len(of_first) == len(shown), make
        assert all(caption.startswith(start) for caption, start in zip(of_first, shown, strict=True)), make
        assert ("head 2: the given pattern" in captions) == (getattr(make, "keywords", {}).get("combine") == "heads")
        for picture in found.pictures:
            size = (256 if "density" in picture.caption else 12, 32 if "buckets" in picture.caption else 12)
            assert image(picture.png).size == size, (make, picture.caption)


def test_few_layers_and_heads_are_drawn_the_first_and_the_last_among_them():
    found = drawn(Transformer(12, 6, 9, attention=SoftmaxAttention))
    assert [part.name for part in found] == [f"blocks.{i}.attention" for i in (0, 3, 5, 8)]
    assert [picture.caption for picture in found[0].pictures] == [f"head {i}: weights" for i in (1, 2, 3, 4)]


def test_pictures_of_cross_attention_and_of_none():
    encoder = Transformer(8, 2, 1, attention=SoftmaxAttention, causal=False)
    decoder = Transformer(8, 2, 1, attention=LinearAttention, cross_attention=SoftmaxCrossAttention)
    model, source, target = EncoderDecoder(encoder, decoder).eval(), torch.randn(1, 7, 8), torch.randn(1, 5, 8)
    found = {part.kind: part for part in attention_pictures(model, lambda: model(target, model.remember(source)))}
    assert found.keys() == {"SoftmaxAttention", "LinearAttention", "SoftmaxCrossAttention"}
    cross = found["SoftmaxCrossAttention"].pictures[1].png
    assert image(cross).size == (7, 5)
    (weights,) = model.attention_weights(source, target)
    shown = weights[0, 1] / weights[0, 1].amax(-1, keepdim=True)
    assert cross == png(shown.sqrt())
    assert drawn(LSTM(8, 1)) == []


def test_brightness_is_the_value_and_grey_is_nothing():
    values = torch.tensor([[0.0, 0.25, 1.0], [float("nan"), 0.5, 2.0]])
    pixels = image(png(values)).convert("RGB")
    assert pixels.size == (3, 2)
    light = [[sum(pixels.getpixel((x, y))) for x in range(3)] for y in range(2)]
    assert light[0][0] < light[0][1] < light[1][1] < light[0][2] == light[1][2]
    assert pixels.getpixel((0, 1)) == (128, 128, 128)


# ----------------------------------------------------------------------------------------------------------- samples


def loader(*batches):
    return SimpleNamespace(test_dataloader=lambda: batches)


def test_a_sequence_is_cut_to_what_is_valid_and_drawn():
    def cut(batch, model=None):
        return first_sequence(model, loader(batch), 4, carried=False).batch

    assert cut(torch.arange(20).view(2, 10)).tolist() == [[0, 1, 2, 3]]
    tokens, seen = torch.arange(20).view(2, 10), torch.tensor([3, 10])
    assert cut(TokenBatch(tokens, tokens, seen)).inputs.tolist() == [[0, 1, 2]]
    starts = torch.tensor([[0, 0, 1, 0, 0, 0, 0, 0, 0, 0]] * 2).bool()
    first = cut(TokenBatch(tokens, tokens, starts=starts, offsets=tokens))  # without the second sequence
    assert [t.tolist() for t in (first.inputs, first.targets, first.offsets)] == [[[0, 1]]] * 3
    assert first.starts is None
    pair = cut(PairBatch(tokens, seen, tokens, tokens, torch.tensor([9, 9]), ["a", "b"], [[], []]))
    assert (pair.source.tolist(), pair.source_lengths.tolist()) == ([[0, 1, 2]], [3])
    assert (pair.targets.tolist(), pair.sources) == ([[0, 1, 2, 3]], ["a"])
    speech = SpeechBatch(torch.rand(2, 10, 5), torch.tensor([9, 10]), tokens, seen, ["x", "y"])
    halved = SimpleNamespace(front_end=SimpleNamespace(factor=2))
    assert (cut(speech, halved).features.shape, cut(speech, halved).lengths.tolist()) == ((1, 8, 5), [8])
    assert cut(LabelledBatch(tokens, seen, seen)).x.tolist() == [[0, 1, 2]]
    assert cut((tokens, seen)).x.tolist() == [[0, 1, 2, 3]]
    assert rows([tokens, ["a", "b"], None], [0])[1:] == [["a"], None]


def test_carried_memory_is_that_of_the_segments_before_and_bits_follow_from_it():
    torch.manual_seed(0)
    model = LanguageModel(Transformer(8, 2, 1, attention=LinearAttention), 5).double().eval()
    stream = torch.randint(5, (1, 13))
    inputs, targets = stream[:, :12], stream[:, 1:].clone()
    targets[0, 9] = IGNORE
    segments = [TokenBatch(inputs[:, i : i + 3], targets[:, i : i + 3]) for i in range(0, 12, 3)]
    sequence = first_sequence(model, loader(*segments), 8, carried=True)
    assert torch.equal(sequence.batch.inputs, inputs[:, 9:])
    whole = model.backbone(model._embed(inputs))[0]
    log_probs = model.head.log_probs(whole)[0, 9:]
    found = token_bits(model, sequence)
    assert [token for token, _ in found] == [str(int(token)) for token in targets[0, 10:]]
    expected = -log_probs[torch.arange(1, 3), targets[0, 10:]] / math.log(2)
    torch.testing.assert_close(log_probs.new_tensor([bits for _, bits in found]), expected)
    assert model.memory is None


@pytest.mark.parametrize("intermediate_losses", [False, True])
def test_with_a_sliding_window_the_last_one_is_drawn(intermediate_losses: bool):
    torch.manual_seed(0)
    backbone = Transformer(8, 2, 2, attention=SoftmaxAttention)
    model = LanguageModel(backbone, 5, eval_window=4, intermediate_losses=intermediate_losses).eval()
    tokens = torch.randint(5, (1, 9))
    segments = [TokenBatch(tokens[:, i : i + 3], tokens[:, i : i + 3]) for i in range(0, 9, 3)]
    sequence = first_sequence(model, loader(*segments), 6, carried=True)
    found = attention_pictures(model, lambda: model.hidden(sequence.batch, sequence.memory))
    window = model._embed(tokens[:, 5:])
    expected = attention_pictures(backbone, lambda: backbone(window))
    assert [part.pictures for part in found] == [part.pictures for part in expected]
    nll = model.head.nll(backbone(window)[0][:, -1], tokens[:, -1])
    assert token_bits(model, sequence)[-1][1] == pytest.approx(nll.item() / math.log(2), rel=1e-5)


def test_a_page_has_the_memory_of_evaluation(monkeypatch: pytest.MonkeyPatch):
    attention = partial(TransformerXLAttention, mem_len=2)
    model = LanguageModel(Transformer(8, 2, 1, attention=attention), 5, eval_mem_len=7)
    xl = next(module for module in model.modules() if isinstance(module, TransformerXLAttention))
    lengths = []
    tokens = torch.arange(4).view(1, 4)
    monkeypatch.setattr(Task, "load_from_checkpoint", lambda *_, **__: model)
    monkeypatch.setattr(report.report_samples, "test_data", lambda _: loader(TokenBatch(tokens, tokens)))
    monkeypatch.setattr(report.report_samples, "token_bits", lambda *_: lengths.append(xl.mem_len))
    monkeypatch.setattr(model, "predict_step", lambda batch: batch.label)
    parts = report._of_checkpoint(Path(), Path("best.ckpt"), RunRecord(Path(), {}), 1, 4, ())
    assert (lengths, xl.mem_len) == ([7], 2)
    assert any("No predictions: " in part and "has no attribute" in part for part in parts)


@pytest.mark.parametrize("evaluation", [None, True, False])
def test_a_page_has_the_memory_that_evaluations_carry(evaluation: bool | None, monkeypatch: pytest.MonkeyPatch):
    settings: dict[str, str | bool] = {"trainer.callbacks.0": "MemoryCarry"}
    settings |= {} if evaluation is None else {"trainer.callbacks.0.evaluation": evaluation}
    asked: list[bool] = []
    monkeypatch.setattr(Task, "load_from_checkpoint", lambda *_, **__: LanguageModel(Transformer(8, 2, 1), 5))
    monkeypatch.setattr(report.report_samples, "test_data", lambda _: None)
    monkeypatch.setattr(report.report_samples, "first_sequence", lambda *_, carried: asked.append(carried))
    report._of_checkpoint(Path(), Path("best.ckpt"), RunRecord(Path(), settings), 0, 4, ())
    assert asked == [evaluation is not False]


@pytest.mark.parametrize("carried", [False, True])
def test_rows_of_a_stream_that_is_empty_or_has_ended_are_not_shown(carried: bool):
    """A short text has fewer segments than the batch has streams: its first row is empty."""
    model = LanguageModel(Transformer(8, 2, 1, attention=LinearAttention), 5).eval()
    tokens = torch.arange(8).view(2, 4) % 5
    targets = [torch.tensor([[IGNORE] * 4, last]) for last in ([4, 0, 1, IGNORE], [IGNORE] * 4)]
    lengths = [torch.tensor(n) for n in ([0, 3], [0, 0])]
    segments = [TokenBatch(tokens, *of_segment) for of_segment in zip(targets, lengths, strict=True)]
    assert filled_rows(segments[0], 8) == [1]
    sequence = first_sequence(model, loader(*segments), 4, carried=carried)
    assert sequence.batch.inputs.tolist() == [[4, 0, 1]]
    assert len(token_bits(model, sequence)) == 3
    with pytest.raises(ValueError, match="the first test batch has no positions"):
        first_sequence(model, loader(segments[1]), 4, carried=carried)


def test_as_many_images_as_asked_and_few_texts_are_drawn(tmp_path: Path):
    drawn = []

    def write(folder, options, *, datamodule):
        drawn.append((folder().name, options))

    for kind in (ImageOptions, TextOptions):
        (tmp_path / kind.__name__).mkdir()
        model = SimpleNamespace(generation=kind, write_samples=write)
        assert write_samples(model, object(), 8, tmp_path / kind.__name__) == []
    assert drawn == [
        ("drawn_0", ImageOptions(n=8)),
        ("drawn_1", ImageOptions(n=8, complete=0.5)),
        ("drawn_0", TextOptions(n=2, n_tokens=300)),
    ]


def test_predictions_are_shown_together_and_as_text(tmp_path: Path):
    (tmp_path / "p.png").write_bytes(png(torch.eye(3)))
    entry = {"id": "a<b>", "phones": [{"phone": "ɑ", "start": 1}, {"phone": "t"}], "picture": "p.png"}
    other = {"id": "c", "outputs": [{"text": "<script>x"}], "picture": "../p.png"}
    (tmp_path / "found.jsonl").write_text("".join(f"{json.dumps(e)}\n" for e in (entry, other)))
    (tmp_path / "scores.csv").write_text("index,bits\n0,1.23456\n")
    (tmp_path / "samples.txt").write_text("a\n</pre>b")
    figures = list(map(Page, output_figures(tmp_path)))
    shown = [[tag for tag, _ in figure.tags if tag in ("img", "script")] for figure in figures]
    assert shown == [["img"], [], [], []]
    for figure, text in zip(figures, ["ɑ t", "<script>x", "1.235", "a\n</pre>b"], strict=True):
        assert text in figure.text


def test_whole_images_are_drawn(tmp_path: Path):
    assert write_samples(PixelModel(Transformer(8, 2, 1), (2, 3, 1), 4), None, 2, tmp_path) == []
    assert (tmp_path / "drawn_0" / "samples.png").is_file()


# ------------------------------------------------------------------------------------------------ settings and curves


def test_settings_are_sorted_by_their_defaults():
    config = {
        "seed_everything": 0,
        "trainer": {"max_steps": 5, "precision": None, "log_every_n_steps": 10, "unknown": None},
        "model": spec("lit_effattn.Transformer", dropout=0.0, n_heads=2, attention=spec("no_such.Kind", a=1)),
        "data": spec("TextStream", segment_len=7),
    }
    changed, others = split(config)
    assert changed == {
        **{"trainer.max_steps": 5, "trainer.unknown": None, "data": "TextStream", "data.segment_len": 7},
        **{"model": "Transformer", "model.n_heads": 2, "model.attention": "Kind", "model.attention.a": 1},
    }
    assert others.keys() == {"seed_everything", "trainer.precision", "trainer.log_every_n_steps", "model.dropout"}


def test_curves_are_drawn_to_scale():
    curves = {"train/loss": {0: 4.0, 10: 2.0}, "val/loss": {5: 3.0, 6: float("nan")}, "val/nothing": {1: float("inf")}}
    made = "".join(charts(["run"], [RunRecord(Path("run"), {}, curves)]))
    assert "var(--s0)" in made
    assert "var(--s1)" in made
    assert not set(re.findall("#[0-9a-f]{6}", made)) - {"#000000"}
    assert made.count("<svg") == 1
    uses = [attributes for tag, attributes in Page(made).tags if tag == "use"]
    (x1, y1), (x2, y2), (x, y) = ((float(use["x"]), float(use["y"])) for use in uses)
    assert x == pytest.approx((x1 + x2) / 2, abs=0.1)
    assert y == pytest.approx((y1 + y2) / 2, abs=0.1)
    assert y1 < y2  # upwards


def test_a_line_of_predictions_may_hold_the_line_ends_of_unicode(tmp_path: Path):
    path = write_lines(tmp_path / "x.jsonl", [{"text": "a\u2028b\x85\nc"}, {"text": ["d", {"e": 1}]}])
    assert records(path) == [{"text": "a\u2028b\x85\nc"}, {"text": "d 1"}]


# ------------------------------------------------------------------------------------------------------------ browser


MEASURE = """<!doctype html><iframe id=f src="page.html" style="width: {width}px; height: 800px; border: 0"></iframe>
<script>onload = () => {{
  const page = document.getElementById("f").contentDocument, root = page.documentElement, images = [...page.images];
  document.title = [root.scrollWidth <= root.clientWidth, images.every(i => i.naturalWidth > 0), images.length,
    getComputedStyle(page.body).backgroundColor].join();
}}</script>"""


def test_in_a_browser_nothing_is_wider_than_a_phone_and_the_dark_is_dark(run: Path, tmp_path: Path):
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("chromium is not installed")
    wide = tmp_path / "a_configuration_with_a_name_that_is_wider_than_a_phone/2026-01-01_00-00-00"
    shutil.copytree(run, wide)
    (wide / "samples").mkdir()
    (wide / "samples/wide.png").write_bytes(png(torch.eye(3).repeat(1, 700)))
    main(["report", str(wide), "--samples", "2", "--output", str(tmp_path / "page.html")])
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--dump-dom"]
    for width, scheme, colour in ((390, ["--force-dark-mode"], "rgb(20, 23, 26)"), (1280, [], "rgb(255, 255, 255)")):
        (tmp_path / "measure.html").write_text(MEASURE.format(width=width))
        output = subprocess.run(
            [chromium, *flags, *scheme, f"--user-data-dir={tmp_path / 'profile'}", f"file://{tmp_path}/measure.html"],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout
        assert f"<title>true,true,3,{colour}</title>" in output
