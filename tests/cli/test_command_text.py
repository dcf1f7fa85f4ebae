"""The command with text: memory from segment to segment, generation, resuming, and what is refused."""

import csv
import json
import math
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from lit_effattn.cli import main
from lit_effattn.datamodules import TextStream
from lit_effattn.datamodules.common.tokens import IGNORE
from lit_effattn.settings.trainer import Trainer
from lit_effattn.tasks import LanguageModel
from tests.support.commands import TWO, assert_same_end, command, ends, fails, last, same, spec, weights

TINY: dict[str, Any] = {
    "seed_everything": 3,
    "model": spec(
        "LanguageModel",
        backbone=spec(
            "Transformer",
            d_model=16,
            n_heads=2,
            n_layers=2,
            attention=spec("TransformerXLAttention", mem_len=6, share_uv=True),
            positions="auto",
            dropout=0.2,
        ),
        tie=True,
        optimizer=spec("torch.optim.RAdam", lr=0.003),
        lr_scheduler=spec("WarmupCosine", total_steps=40, warmup_steps=3),
    ),
    "data": spec("TextStream", source="files", root="texts", segment_len=8, batch_size=4, cache="cache"),
    "trainer": {
        "max_epochs": 1,
        "enable_progress_bar": False,
        "logger": False,
        "callbacks": [{"class_path": "MemoryCarry"}],
    },
}
CHARACTERS = ["--data.tokens", "characters"]


def song(n: int, of: str = "birds") -> str:
    return "".join(f"{i} {of} sit on {i * i} wires\nand {chr(0xE0 + i % 9)} sings.\n" for i in range(n))


def write_texts(root: str = "texts", of: str = "birds") -> None:
    """Write documents of several lengths, some shorter than a segment."""
    for split, sizes in (("train", (6, 0, 1, 4)), ("val", (3, 0)), ("test", (2, 0, 1))):
        for i, n in enumerate(sizes):
            path = Path(root, split, f"{i}.txt")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(song(n, of) if n else "Bye\n", encoding="utf-8")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of tiny.yaml."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("trained"))
        Path("tiny.yaml").write_text(yaml.safe_dump(TINY))
        write_texts()
        return fit().resolve()


@pytest.fixture(autouse=True)
def _in_a_folder_with_texts(empty_folder: None) -> None:
    write_texts()


def fit(*args: str) -> Path:
    """Train and return the run's folder."""
    before = set(Path("runs").glob("*"))
    main(["fit", "--config", "tiny.yaml", *args])
    (new,) = set(Path("runs").glob("*")) - before
    return new


def refused(run: Path, args: list[str], words: str) -> None:
    """Give options of `generate` to the trainer, which must refuse them: it gets what the command has parsed."""
    model = LanguageModel.load_from_checkpoint(run / "checkpoints" / "last.ckpt")
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, default_root_dir=run)
    given = {name.removeprefix("--"): text for name, text in zip(args[::2], args[1::2], strict=True)}
    texts = ("prompt", "prompt_file", "prompts_file", "state", "save_state", "length_norm")
    numbers = ("temperature", "length_penalty", "complete")
    kinds: Any = dict.fromkeys(texts, str) | dict.fromkeys(numbers, float)
    options = {name: kinds.get(name, int)(text) for name, text in given.items()}
    with pytest.raises((ValueError, OSError), match=re.escape(words)):
        trainer.generate(model, **options)


def samples(run: Path) -> list[str]:
    """Return the texts that the newest `generate` wrote."""
    newest = max((run / "generated").glob("*"), key=lambda path: path.stat().st_mtime_ns)
    return re.split(r"(?:^|\n\n)--- \d+\n", (newest / "samples.txt").read_text(encoding="utf-8"))[1:]


# ------------------------------------------------------------------------------------------------ train, score, draw


@torch.no_grad()
def documents_cost(run: Path, texts: list[bytes], segment_len: int) -> list[float]:
    """Cost in bits of every byte of some documents, read segment by segment with the memory handed on."""
    model = LanguageModel.load_from_checkpoint(run / "checkpoints" / "best.ckpt").eval()
    costs: list[float] = []
    for text in texts:
        tokens, state = torch.tensor([256, *text]), None
        for begin in range(0, len(text), segment_len):
            piece = tokens[begin : begin + segment_len + 1]
            h, state = model.backbone(model.embedding(piece[None, :-1]), state)
            log_p = (h[0] @ model.embedding.weight.T + model.head.proj.bias).log_softmax(-1)
            costs += (-log_p.gather(-1, piece[1:, None])[:, 0] / math.log(2)).tolist()
    return costs


def test_testing_scores_every_byte_once_with_the_memory_handed_on(run: Path, capsys: pytest.CaptureFixture[str]):
    main(["test", "--ckpt_path", "best", "--data.eval_batch_size", "1"])
    output = capsys.readouterr().out
    texts = [path.read_bytes() for path in sorted(Path("texts/test").iterdir())]
    expected = np.mean(documents_cost(run, texts, 8))
    assert float(re.search(r"^test bits/byte: (\S+)$", output, re.M)[1]) == pytest.approx(expected, abs=1e-4)
    assert int(re.search(r"^test bytes: (\S+)$", output, re.M)[1]) == sum(map(len, texts))


def test_a_file_that_changes_what_is_scored_is_told(caplog: pytest.LogCaptureFixture):
    run = str(fit("--trainer.callbacks", "null", "--trainer.max_steps", "1"))
    Path("tiny.yaml").write_text(yaml.safe_dump(TINY).replace("root: texts", "root: other"))
    write_texts("other", "cats")
    words = (
        "of the run: data.root is other, in the run texts; trainer.callbacks is MemoryCarry, in the run none. --name"
    )
    with pytest.warns(UserWarning, match=words):
        main(["test", "--ckpt_path", run, "--config", "tiny.yaml"])
    flags = ["--data.root", "other", "--trainer.callbacks", "null"]
    main(["test", "--ckpt_path", run, "--config", "tiny.yaml", *flags])
    assert "overrides" not in caplog.text


def test_predictions_are_a_line_a_document_and_average_to_the_test_result(
    run: Path, capsys: pytest.CaptureFixture[str]
):
    capsys.readouterr()
    main(["test", "--ckpt_path", "last"])
    output = re.search(r"test bits/byte: (\S+)", capsys.readouterr().out)[1]
    main(["predict", "--ckpt_path", "last"])
    (path,) = run.rglob("predictions.csv")
    with path.open() as file:
        rows = list(csv.DictReader(file))
    sizes = [path.stat().st_size for path in sorted(Path("texts/test").iterdir())]
    assert [int(row["targets"]) for row in rows] == sizes
    n = sum(sizes)
    bits = [(int(row["targets"]), float(row["bits_per_target"])) for row in rows]
    assert sum(t * b for t, b in bits) / n == pytest.approx(float(output), abs=1e-4)


def test_generating_continues_a_prompt_without_the_data(capsys: pytest.CaptureFixture[str]):
    run = fit(*CHARACTERS)
    shutil.rmtree("texts")
    shutil.rmtree("cache")
    capsys.readouterr()
    main(["generate", "--ckpt_path", "last", "--prompt", "3 birds", "--n_tokens", "20"])
    output = capsys.readouterr().out
    (text,) = samples(run)
    assert text.startswith("3 birds")
    assert len("3 birds") < len(text) <= len("3 birds") + 20  # <start> may be drawn, and is no text
    assert set(text) <= set(song(6) + "Bye\n\ufffd")
    assert text in output  # as it was drawn
    refused(run, ["--prompt", "1 bird€"], "'€'")


def test_generating_again_draws_the_same_and_another_seed_others(run: Path):
    drawn = []
    for flags in (["--seed", "5"], ["--seed", "5"], ["--seed", "6"], ["--seed", "5", "--temperature", "0.1"]):
        main(["generate", "--ckpt_path", "last", "--n", "3", "--n_tokens", "12", *flags])
        drawn.append(samples(run))
        assert len(drawn[-1]) == 3
    assert drawn[0] == drawn[1]
    assert len({tuple(texts) for texts in drawn}) == 3
    assert len(set(drawn[0])) == 3


def test_a_text_goes_on_from_a_saved_state(run: Path, capsys: pytest.CaptureFixture[str]):
    generate = ["generate", "--ckpt_path", "last", "--seed", "2"]
    main([*generate, "--prompt", "3 b", "--n_tokens", "16"])
    (whole,) = samples(run)
    main([*generate, "--prompt", "3 b", "--n_tokens", "7", "--save_state", "s.state"])
    (begin,) = samples(run)
    for flags in ([], ["--save_state", "s.state"]):
        main([*generate, "--state", "s.state", "--n_tokens", "9", *flags])
        assert begin + samples(run)[0] == whole
    capsys.readouterr()
    Path("other.state").write_text("x")
    for args, words in (
        (["--state", "s.state", "--n", "2"], "--n 2: s.state has 1 samples; leave --n out"),
        (["--state", "s.state", "--beam", "2"], "--beam and --state"),
        (["--save_state", "s.state", "--beam", "2"], "--beam and --save_state"),
        (["--save_state", "other.state"], "other.state exists and is not a saved state"),
        (["--save_state", "."], ". exists and is not a saved state"),
        (["--save_state", "other.state/s.state"], "other.state is not a folder to which files can be written"),
        (["--state", "other.state"], "other.state can't be read as a state"),
        (["--state", "absent.state"], "absent.state"),
    ):
        refused(run, args, words)


def test_a_file_of_prompts_gets_what_each_prompt_gets(run: Path, capsys: pytest.CaptureFixture[str]):
    prompts = {"3 birds sit": 12, "3 b": 7, "3 birds\nfly": 12}
    lines = ['"3 birds sit"', '{"prompt": "3 b", "n_tokens": 7}', '"3 birds\\nfly"']
    Path("prompts.jsonl").write_text("\n".join(lines))
    generate, file = ["generate", "--ckpt_path", "last"], ["--prompts_file", "prompts.jsonl"]
    for how in (["--temperature", "0"], ["--seed", "2", "--n", "2"]):
        main([*generate, *how, *file, "--n_tokens", "12", "--batch_size", "4", "--output", f"drawn{len(how)}"])
        lines = Path(f"drawn{len(how)}/samples.jsonl").read_text(encoding="utf-8").splitlines()
        for line, (prompt, n_tokens) in zip(lines, prompts.items(), strict=True):
            entry = json.loads(line)
            assert entry["prompt"] == prompt
            assert len(entry["samples"]) == len(how) // 2
            if "--temperature" in how or prompt == "3 birds sit":  # the first has the streams of `--prompt`
                main([*generate, *how, "--prompt", prompt, "--n_tokens", str(n_tokens)])
                assert [prompt + text for text in entry["samples"]] == samples(run)
    assert "6 texts: drawn4/samples.jsonl" in capsys.readouterr().out
    Path("empty.txt").write_text("\n")
    for args, words in (
        ([*file, "--prompt", "a"], "--prompts_file and --prompt were both given"),
        ([*file, "--state", "s.state"], "--prompts_file and --state were both given"),
        ([*file, "--beam", "2"], "--prompts_file and --beam were both given"),
        ([*file, "--batch_size", "0"], "batch_size=0"),
        (["--batch_size", "3"], "--batch_size 3 is an option of --prompts_file"),
        (["--prompts_file", "empty.txt"], "empty.txt has no prompts"),
    ):
        refused(run, args, words)


@pytest.mark.parametrize(("tokens", "n_tokens"), [("words", 6)])
def test_a_beam_writes_the_best_with_their_scores(tokens: str, n_tokens: int, capsys: pytest.CaptureFixture[str]):
    """Of all continuations: words end at a line end, characters after `n_tokens`."""
    run = fit("--data.tokens", tokens, "--data.segment_len", "4")
    capsys.readouterr()
    flags = ["--n_tokens", str(n_tokens), "--beam", "9", "--n", "3", "--length_penalty", "1"]
    main(["generate", "--ckpt_path", "last", "--prompt", "3 birds sit ", *flags])
    output = capsys.readouterr().out
    (path,) = run.rglob("samples.txt")
    written = path.read_text(encoding="utf-8")
    assert output.startswith(written.replace("\n\n--- ", "\n--- "))  # the progress bar is not on stdout
    model = LanguageModel.load_from_checkpoint(run / "checkpoints" / "last.ckpt")
    prompt = torch.tensor([[model.text.start, *model.text.encode("3 birds sit ").tolist()]])
    end = model.text.words.index("<eos>") if tokens == "words" else None
    result = model.beam_search(prompt, n_tokens, beam=9, end=end, length_penalty=1.0, n_best=3)
    expected = [
        f"--- {i}, score {result.scores[0, i]:.4f}, log p {result.log_probs[0, i]:.4f}\n3 birds sit "
        + model.text.decode(result.tokens[0, i, : result.lengths[0, i]].numpy())
        for i in range(3)
    ]
    assert written == "\n\n".join(expected)
    assert (result.lengths < n_tokens).any() == (tokens == "words")


def test_generating_refuses_what_it_cannot_do(run: Path):
    Path("latin.txt").write_bytes("à".encode("latin-1"))
    for args, words in (
        (["--n_tokens", "0"], "--n_tokens 0"),
        (["--prompt", "a", "--prompt_file", "tiny.yaml"], "--prompt and --prompt_file"),
        (["--prompt_file", "absent.txt"], "absent.txt"),
        (["--prompt_file", "latin.txt"], "--prompt_file latin.txt is not UTF-8"),
        (["--complete", "0.5"], "--complete 0.5"),
        (["--beam", "4", "--temperature", "0.5"], "--beam 4 and --temperature 0.5"),
        (["--beam", "4", "--n", "5"], "--n 5: a search with --beam 4"),
        (["--beam", "4", "--length_penalty", "-1"], "length_penalty=-1.0"),
        (["--beam", "0"], "beam=0"),
        (["--length_penalty", "0.6"], "give --beam, too"),
        (["--length_norm", "average"], "give --beam, too"),
    ):
        refused(run, args, words)
    assert not (run / "generated").exists()


def saved_windows(run: Path) -> list[int | None]:
    backbone = yaml.safe_load((run / "config.yaml").read_text())["model"]["init_args"]["backbone"]["init_args"]
    kinds = backbone["attention"] if isinstance(backbone["attention"], list) else [backbone["attention"]]
    return [kind["init_args"]["window"] for kind in kinds]


@pytest.mark.parametrize("kind", [pytest.param("SoftmaxAttention", marks=pytest.mark.exhaustive), "ShawAttention"])
def test_a_kind_without_bound_gets_the_window_that_the_memory_had(
    kind: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    """A segment's last position sees 6 positions of the memory and 8 of the segment."""
    with caplog.at_level("INFO"):
        run = fit("--model.backbone.attention", kind)
    assert f"{kind}: window=14, the memory's 6 positions and the segment's 8" in caplog.text
    assert saved_windows(run) == [14]
    main(["test", "--ckpt_path", "last"])
    assert "test bits/byte: " in capsys.readouterr().out


def test_without_a_memory_length_there_is_no_window(capsys: pytest.CaptureFixture[str]):
    config = yaml.safe_load(Path("tiny.yaml").read_text())
    config["model"]["init_args"]["backbone"]["init_args"]["attention"] = "LinearAttention"
    Path("linear.yaml").write_text(yaml.safe_dump(config))
    output = fails(capsys, "fit", "--config", "linear.yaml", "--model.backbone.attention", "SoftmaxAttention")
    assert "SoftmaxAttention grows with every segment, without bound; set its `window`, or use a kind w" in output


# ------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--data.segment_len", "900"], "segment_len=900 "),
        (["--data.batch_size", "5000"], "batch_size=5000"),
        ([*CHARACTERS, "--data.root", "latin"], "latin/train/0.txt"),
        (["--data.root", "empty"], "empty"),
        (["--data.root", "empty/a.txt"], "empty/a.txt"),
        (["--data.root", "nowhere"], "nowhere"),
        (["--data.tokens", "bpe"], "vocab_size=None"),
        (["--model.backbone.attention", "LSHAttention"], "LSHAttention grows with every segment"),
        (["--model.backbone.attention", "SparseAttention"], "without bound; use a kind whose state is bounded"),
        (["--model.backbone.attention", "LinearAttention", "--model.eval_mem_len", "3"], "eval_mem_len=3"),
        (["--model.backbone.causal", "false"], "causal"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_told_in_a_line(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]):
    write_texts("latin")
    Path("latin/train/0.txt").write_bytes("und à".encode("latin-1"))
    Path("empty").mkdir()
    Path("empty/a.txt").touch()
    assert words in fails(capsys, "fit", "--config", "tiny.yaml", *flags)
    assert not Path("runs").exists()


def test_a_checkpoint_of_another_vocabulary_is_refused(capsys: pytest.CaptureFixture[str]):
    """Equally many characters, so that only their meaning differs; or another number."""
    run = fit(*CHARACTERS)
    last_bytes = (run / "checkpoints" / "last.ckpt").read_bytes()
    write_texts("others", of="firds")
    for args in (["fit", "--trainer.max_epochs", "2"], ["predict"]):
        output = fails(capsys, *args, "--ckpt_path", "last", "--data.root", "others")
        assert len(re.findall(r"characters, a vocabulary of 33", output)) == 2
    output = fails(capsys, "test", "--ckpt_path", "last", "--data.tokens", "bytes")
    assert "tokenizer differ: characters, a vocabulary of 33, and bytes, a vocabulary of 257;" in output
    assert "or for another text --data.tokenizer_of CHECKPOINT --data.tokens null" in output
    own = ["--data.tokenizer_of", str(run / "checkpoints" / "last.ckpt"), "--data.tokens", "null"]
    main(["test", "--ckpt_path", "last", "--data.root", "others", *own])
    assert (run / "checkpoints" / "last.ckpt").read_bytes() == last_bytes


# ------------------------------------------------------------------------------------------------ processes

LONG = ["--trainer.max_epochs", "2"]
CARRY = ["--trainer.callbacks", "MemoryCarry"]  # without what interrupted the run


def interrupted(root: str, step: int, number: int, *args: str) -> Any:
    flags = ["--trainer.callbacks+=interruptions.SignalAt", "--trainer.callbacks.step", str(step)]
    flags += ["--trainer.callbacks.number", str(number)]
    return command("fit", "--config", "tiny.yaml", "--trainer.default_root_dir", root, *LONG, *flags, *args)


@pytest.mark.processes
@pytest.mark.parametrize("processes", [[], pytest.param(TWO, marks=pytest.mark.exhaustive)], ids=["one", "two"])
def test_a_killed_run_goes_on_with_the_memory_it_had(processes: list[str]):
    ends("fit", "--config", "tiny.yaml", "--trainer.default_root_dir", "whole", *LONG, *processes)
    saving = ["--checkpoint.every_n_train_steps", "2"]
    killed = interrupted("killed", 5, signal.SIGKILL, *saving, *processes)
    assert killed.returncode != 0
    checkpoint = torch.load(last("killed"), weights_only=True)
    assert checkpoint["global_step"] == 4  # in mid-epoch
    memories = [m for m in checkpoint["memory_carry"] if m is not None]
    assert len(memories) == (2 if processes else 1)
    ends("fit", "--ckpt_path", "last", "--trainer.default_root_dir", "killed", *CARRY, two=bool(processes))
    assert_same_end(last("whole"), last("killed"))
    if processes:
        return
    # The memory mattered: without it the same run ends elsewhere.
    checkpoint["memory_carry"] = [None]
    Path("forgetful").mkdir()
    torch.save(checkpoint, "forgetful/a.ckpt")
    again = ["--config", "tiny.yaml", *LONG, *CARRY]
    ends("fit", "--ckpt_path", "forgetful/a.ckpt", "--trainer.default_root_dir", "forgetful", *again)
    assert not same(weights(last("forgetful")), weights(last("whole")))


@pytest.mark.exhaustive
@pytest.mark.processes
def test_two_processes_train_and_score_as_one_with_as_many_streams():
    """Streams without padding, so that both weigh alike in the mean of their gradients, and no dropout."""
    how = ["--data.documents", "joined", "--model.backbone.dropout", "0", "--model.optimizer", "torch.optim.SGD"]
    how += ["--model.optimizer.lr", "1.0", "--trainer.precision", "64-true", "--trainer.default_root_dir"]
    ends("fit", "--config", "tiny.yaml", *how, "two", *TWO)
    ends("fit", "--config", "tiny.yaml", *how, "one", "--data.batch_size", "8")
    one, two = weights(last("one")), weights(last("two"))
    for name, expected in one.items():
        torch.testing.assert_close(two[name], expected, msg=name)
    tested = ends("test", "--ckpt_path", "best", "--trainer.default_root_dir", "two", two=True)
    alone = ["--trainer.devices", "1", "--trainer.strategy", "auto", "--data.eval_batch_size", "8"]
    other = ends("test", "--ckpt_path", "best", "--trainer.default_root_dir", "two", *alone)
    figures = [re.findall(r"test \S+: \S+", output) for output in (tested, other)]
    assert len(figures[0]) == 2
    assert figures[0] == figures[1]


@pytest.mark.exhaustive
@pytest.mark.processes
def test_sigterm_saves_and_leaves_and_another_number_of_processes_starts_afresh():
    stopped = interrupted("stopped", 4, signal.SIGTERM)
    assert stopped.returncode == 143, stopped.stderr
    checkpoint = torch.load(last("stopped"), weights_only=True)
    assert checkpoint["global_step"] == 5
    assert checkpoint["memory_carry"][0] is not None
    resumed = command("fit", "--ckpt_path", "last", "--trainer.default_root_dir", "stopped", *CARRY, *TWO)
    assert resumed.returncode == 0, resumed.stderr
    assert "memories start empty" in resumed.stderr
    assert "2 processes instead of 1" in resumed.stderr


def test_streams_of_the_tiny_texts_have_more_than_one_document_and_padding():
    """The tests above rest on this."""
    data = TextStream("files", root="texts", segment_len=8, batch_size=4, cache="cache")
    data.setup("fit")
    batches = list(data.train_dataloader())
    assert len(batches) > 8
    assert any(batch.fresh.any() for batch in batches[1:])
    assert any((batch.targets == IGNORE).any() for batch in batches)
