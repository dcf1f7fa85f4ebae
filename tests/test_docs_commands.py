"""Every command of the documentation runs, in the order of its page, with few steps, in a folder with small files."""

import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image

from lit_effattn.cli import main
from scripts import festvox, proteins
from tests.interchange.test_convert import SIZE, START, tokenizer_json
from tests.scripts.test_festvox import voice
from tests.test_docs import FENCE, PAGES, block

pytestmark = pytest.mark.exhaustive

WITHOUT_DATA = {"librispeech_linear", "cmudog_infinite", "fashion_linear", "fashion_classes_linear"}
"""Configurations whose commands are only parsed."""

LAUNCHED = re.compile(r"(?:lit-effattn (?=.*--trainer\.dev)|srun lit-effattn |torchrun .* -m lit_effattn\.cli )(.*)")
"""Commands that need several devices or a cluster are only parsed; `tests/test_clusters.py` runs such."""

SHORT = {
    "check": "--laws steps,padding,select",
    "export": "--overwrite",
    "fit": "--trainer.max_epochs 1 --trainer.val_check_interval 1 --trainer.limit_val_batches 1",
    "test": "--trainer.limit_test_batches 1",
    "sweep": "--seeds 1 --lr 1e-3 --trainer.max_steps 2 --trainer.val_check_interval 1 --trainer.limit_val_batches 1",
}
"""What is added to the commands."""


def commands(page: str) -> list[list[str]]:
    r"""Collect the words of the commands in indented blocks as a shell does: comments, `NAME="…"`, `\` at line ends."""
    indented = FENCE.sub("", PAGES[page]).replace("\\\n", " ")
    variables: dict[str, str] = {}
    result = []
    for line in re.findall(r"^ {4}(.+)$", indented, re.M):
        if assigned := re.fullmatch(r'(\w+)="(.*)"', line):
            variables[assigned[1]] = assigned[2]
        elif launched := LAUNCHED.match(line):
            result.append([*shlex.split(launched[1]), "--print_config"])
        elif line.startswith("lit-effattn "):
            for name, value in variables.items():
                line = line.replace(f"${name}", value)
            result.append(shlex.split(line, comments=True)[1:])
    return result


WITH_COMMANDS = [page for page in PAGES if commands(page)]


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the pages speak of."""
    folder = tmp_path_factory.mktemp("files")
    rng = np.random.default_rng(0)
    for number in range(50):
        path = folder / "my_images" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (40, 48, 3), dtype=np.uint8)).save(path)
    texts = [f"{number}. {text}" for number, text in enumerate(40 * ["The licence is short.", "Das Buch ist lang."])]
    for name in ("my_texts", "books"):
        (folder / name).mkdir()
        for number in range(20):
            (folder / name / f"{number}.txt").write_text(60 * "\n".join(texts[number:]), encoding="utf-8")
    for split in ("train", "val", "test"):
        shutil.copytree(folder / "books", folder / "wikitext" / split)
    (folder / "book.txt").write_text("\n".join(60 * texts), encoding="utf-8")
    (folder / "my_texts.tsv").write_text("".join(f"{text}\t{'en' if 'is ' in text else 'de'}\n" for text in texts))
    (folder / "new.txt").write_text("The tea is cold.\n")
    (folder / "words.txt").write_text("attention\nmemory\n")
    (folder / "prompts.txt").write_text("def \nclass \n")
    (folder / "my_pairs").mkdir()
    for split in ("train", "val", "test"):
        (folder / "my_pairs" / f"{split}.tsv").write_text("".join(f"{text}\t{text.upper()}\n" for text in texts))
    _recordings(folder)
    for path in (voice(folder / "data" / "festvox-ru") / "wav").glob("*.wav"):
        soundfile.write(path, rng.uniform(-0.5, 0.5, 16_000), 16_000)
    festvox.main([str(folder / "data" / "festvox-ru")])
    proteins_fasta = folder / "proteins.fasta"
    proteins_fasta.write_text("".join(f">tr|P{i}|X Protein {i} OS=x\n{'MKLVAW' * 40}\n" for i in range(60)))
    proteins.main([str(proteins_fasta), str(folder / "data" / "proteins"), "--n_test", "5", "--n_val", "5"])
    _pretrained(folder / "gpt2")
    module = block("docs/own-kind.md", "class MeanAttention")
    (folder / "my_module.py").write_text(module + "\n\nclass MyAttention(MeanAttention):\n    pass\n")
    (folder / "my_data.py").write_text(block("docs/own-data.md", "class Counting"))
    (configuration,) = [code for language, code in FENCE.findall(PAGES["docs/own-data.md"]) if language == "yaml"]
    (folder / "counting.yaml").write_text(configuration)
    return folder


def _recordings(folder: Path) -> None:
    source = Path(__file__).parent / "recordings"
    lines = []
    (folder / "my_speech").mkdir()
    for number in range(20):
        name, text = [("ten_of_clubs", "Ten of clubs."), ("five_five", "Five five.")][number % 2]
        shutil.copy(source / f"{name}.wav", folder / "my_speech" / f"{number}.wav")
        lines.append(json.dumps({"audio_filepath": f"{number}.wav", "text": text}))
    shutil.copytree(folder / "my_speech", folder / "recordings")
    for name in ("a", "monday", "tuesday"):
        shutil.copy(source / "ten_of_clubs.wav", folder / f"{name}.wav")
    for split, part in {"train": lines[:16], "val": lines[16:18], "test": lines[18:]}.items():
        (folder / "my_speech" / f"{split}.jsonl").write_text("\n".join(part))
        absolute = [line.replace('": "', f'": "{folder}/my_speech/', 1) for line in part]
        (folder / f"{split}.jsonl").write_text("\n".join(absolute))


def _pretrained(folder: Path) -> None:
    """A small GPT-2 of random weights, as transformers saves it."""
    transformers = pytest.importorskip("transformers")
    size = {"n_positions": 1024, "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": SIZE}
    config = transformers.AutoConfig.for_model("gpt2", bos_token_id=START, eos_token_id=START + 1, **size)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer_json())


def wanted(words: list[str]) -> str | None:
    """Return the configuration of the run that `best` and `last` mean, where a page shows several side by side."""
    flags = {word for word in words if word.startswith("--")}
    if flags & {"--prompt", "--prompts_file", "--model.eval_mem_len"}:
        return "stdlib_xl"
    if "--source" in flags:
        return "g2p_linear"
    if any(flag.startswith(("--data.audio", "--data.corpus")) for flag in flags):
        return "espeak_linear"
    return "digits_linear" if flags & {"--complete", "--compile", "--average"} else None


class Reader:
    """Runs the commands of a page."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.newest: str | None = None

    def run(self, words: list[str]) -> None:
        name, words = words[0], [path for word in words[1:] for path in self._files(word)]
        if name == "--help":
            main([name])
        elif "--print_config" in words or WITHOUT_DATA & {*words}:
            with pytest.raises(SystemExit) as stopped:
                main([name, *(w for w in words if w not in ("--print_config", ">", "mine.yaml")), "--print_config"])
            assert not stopped.value.code
        elif name == "fit" and "--config" in words:
            at = words.index("--config")
            if {"best", "last"} & {*words}:
                self.fit(words[at + 1])
            self.fit(words[at + 1], *words[:at], *words[at + 2 :])
        else:
            self._prepare(words)
            main([name, *words, *shlex.split(SHORT.get(name, ""))])

    def _prepare(self, words: list[str]) -> None:
        """Train what `best` or `last` means in these words, if the page has not."""
        needed = wanted(words) or self.newest or "digits_linear"
        if {"best", "last", "digits_linear"} & {*words} and needed != self.newest:
            self.fit(needed)
        if "my_module.MyAttention" in words:
            self.fit("digits_linear", "--model.backbone.attention", "my_module.MyAttention")
        if "--average" in words:
            self.fit("digits_linear", "--checkpoint.keep", "5", "--checkpoint.keep_every_n_train_steps", "1", steps=6)

    def fit(self, config: str, *flags: str, steps: int = 2) -> None:
        short = [*shlex.split(SHORT["fit"]), "--trainer.max_steps", str(steps)]
        if config == "espeak_linear" and "--data.corpus" not in flags:
            short += ["--data.corpus.minutes", "4"]
        main(["fit", "--config", config, *flags, *short])
        self.newest = config

    def _files(self, word: str) -> list[str]:
        """Put files that are there into a pattern, and into a path of which the page shows a part or one of its own."""
        pattern = re.sub(r"\d{4}-\d\d-\d\d_[\d-]+|…", "*", word)
        if "*" not in pattern:
            return [word]
        run = pattern.split("/")
        if not [*self.folder.glob("/".join(run[:2]) + "/*/checkpoints/*")]:
            config, _, kind = run[1].partition("+")
            self.fit(config, *(["--model.backbone.attention", kind] if kind else []))
        paths = sorted(map(str, self.folder.glob(pattern)))
        return paths if pattern == word else paths[-1:]


@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_commands_run(page: str, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = shutil.copytree(files, tmp_path / "folder")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    reader = Reader(folder)
    done: list[list[str]] = []
    for words in commands(page):
        if words[0] == "convert" and words in done:  # shown again for another example; a folder is not overwritten
            continue
        reader.run(words)
        done.append(words)
