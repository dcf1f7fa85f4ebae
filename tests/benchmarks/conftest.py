import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest

from lit_effattn import LSTM, Transformer
from lit_effattn.callbacks import MemoryCarry
from lit_effattn.datamodules import TextStream
from lit_effattn.tasks import LanguageModel

# `python -m benchmarks` finds the package in the working directory; it is not installed, and pytest adds no directory.
sys.path.insert(0, str(Path(__file__).parents[2]))


@pytest.fixture(scope="module")
def language_models(tmp_path_factory):
    """Checkpoints of two models after a step on the standard library: an LSTM with memory, a Transformer without."""
    root = tmp_path_factory.mktemp("language_models")
    options = {"accelerator": "cpu", "max_steps": 1, "limit_val_batches": 0, "logger": False}
    silent = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    paths = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        for name, backbone, callbacks in (("lstm", LSTM(16, 1), [MemoryCarry()]), ("plain", Transformer(16, 2, 1), [])):
            data = TextStream(max_bytes=200_000, segment_len=16, eval_segment_len=40, batch_size=2, eval_batch_size=1)
            model = LanguageModel(backbone, data.vocab_size, unit="byte", tokenizer=data.tokenizer)
            trainer = pl.Trainer(**options, **silent, callbacks=callbacks)
            trainer.fit(model, data)
            paths.append(root / f"{name}.ckpt")
            trainer.save_checkpoint(paths[-1])
        yield paths
