"""Characters outside the Basic Multilingual Plane in texts, vocabularies and the names of files and folders."""

from pathlib import Path

import pytest
import yaml

from lit_effattn.cli import main
from tests.cli.test_broken_checkpoints import TEXT


@pytest.mark.parametrize("tokens", ["characters", pytest.param("words", marks=pytest.mark.exhaustive)])
def test_every_command(tokens: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for split in ("train", "val", "test"):
        Path("texts😀", split).mkdir(parents=True)
        Path("texts😀", split, "a.txt").write_text("a 😀 rose 𝕏 is 𐍈 a 🧵 rose\n" * 20, encoding="utf-8")
    data = TEXT["data"]["init_args"] | {"root": "texts😀", "tokens": tokens}
    trainer = TEXT["trainer"] | {"default_root_dir": "runs😀"}
    settings = TEXT | {"data": TEXT["data"] | {"init_args": data}, "trainer": trainer}
    Path("𝕏.yaml").write_text(yaml.safe_dump(settings, allow_unicode=True), encoding="utf-8")
    main(["fit", "--config", "𝕏.yaml"])
    (run,) = Path("runs😀").iterdir()
    checkpoint = ["--ckpt_path", str(run / "checkpoints" / "last.ckpt")]
    main(["fit", *checkpoint, "--trainer.max_steps", "4"])
    main(["generate", *checkpoint, "--prompt", "a 😀 rose 𝕏", "--n_tokens", "4", "--output", "samples😀"])
    assert "a 😀 rose 𝕏" in Path("samples😀", "samples.txt").read_text(encoding="utf-8")
    main(["report", str(run), "--output", "report😀.html"])
    page = Path("report😀.html").read_text(encoding="utf-8")
    assert "texts😀" in page
    assert "bits_per_target" not in page  # of rows, which are no documents
    assert "No predictions" not in page
    main(["export", *checkpoint, "--format", "safetensors", "--output", "it😀.safetensors"])
    assert Path("it😀.safetensors").exists()
