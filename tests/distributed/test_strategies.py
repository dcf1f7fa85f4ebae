"""Four processes, of which two or all share a sequence, train a language model as one process does."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lit_effattn import Transformer
from lit_effattn.attention import LinearAttention, SoftmaxAttention, SparseAttention
from lit_effattn.callbacks import MemoryCarry, RandomStates
from lit_effattn.datamodules import TextStream, TokenBatch
from lit_effattn.distributed.strategies import SequenceParallel
from lit_effattn.tasks import LanguageModel, PixelModel
from tests.support.processes import free_port, in_processes

P = 4
SHARED, SAVED = [LinearAttention, partial(SoftmaxAttention, window=5)], 3


def model(attention: Any = SHARED, **options: Any) -> LanguageModel:
    torch.manual_seed(0)
    layers = {"dropout": options.pop("dropout", 0.0), "gradient_checkpointing": True}
    backbone = Transformer(8, 2, 2, attention=attention, positions="auto", init="pytorch", **layers)
    sgd = partial(torch.optim.SGD, lr=0.5)
    return LanguageModel(backbone, 257, embedding_std=1.0, optimizer=sgd, unit="byte", **options).double()


def data(folder: str, documents: str, batch_size: int) -> TextStream:
    options = {"documents": documents, "segment_len": 10, "eval_segment_len": 7, "num_workers": 0}
    return TextStream(source="files", root=f"{folder}/texts", cache=f"{folder}/cache", batch_size=batch_size, **options)


def trainer(folder: str, size: int | None = None, **options: Any) -> pl.Trainer:
    if size is not None:
        options |= {"strategy": SequenceParallel(size), "devices": P, "use_distributed_sampler": False}
    callbacks = [MemoryCarry(), RandomStates(), *options.pop("callbacks", ())]
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    options = {
        "max_steps": 2 * SAVED,
        "val_check_interval": SAVED,
        "num_sanity_val_steps": 0,
        "accelerator": "cpu",
        **quiet,
        **options,
    }
    return pl.Trainer(default_root_dir=folder, precision="64-true", callbacks=callbacks, **options)


def train(folder: str, documents: str, batch_size: int, dropout: float = 0.0, path: str | None = None, **options: Any):
    """The weights and figures at the end."""
    lm, of = model(dropout=dropout), trainer(folder, **options)
    of.fit(lm, data(folder, documents, batch_size), ckpt_path=path)
    figures = {name: float(value) for name, value in of.callback_metrics.items()}
    memory = of.callbacks[0]._training  # type: ignore[attr-defined]
    return {"weights": lm.state_dict(), "figures": figures, "memory": memory and tuple(memory.layers[1])}


def work(rank: int, folder: str, port: str) -> None:
    torch.set_num_threads(1)
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": P, "LOCAL_WORLD_SIZE": P, "GROUP_RANK": 0}
    places |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "none"}  # as torchrun says them
    os.environ.update({name: str(value) for name, value in places.items()})
    found = {"2 x 2": train(folder, "joined", 2, size=2), "1 x 4": train(folder, "apart", 2, size=4)}
    saving = pl.callbacks.ModelCheckpoint(f"{folder}/kept", every_n_train_steps=SAVED, filename="a", save_top_k=1)
    how = {"dropout": 0.3, "size": 2, "limit_val_batches": 0}
    stop = {"enable_checkpointing": True, "callbacks": [saving], "max_steps": SAVED}
    found["whole"] = train(folder, "joined", 2, **how)
    train(folder, "joined", 2, **{**how, **stop})
    found["resumed"] = train(folder, "joined", 2, path=f"{folder}/kept/a.ckpt", **how)
    torch.save(found, f"{folder}/{rank}.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("shared")
    texts = folder / "texts"
    texts.mkdir()
    generator = torch.Generator().manual_seed(0)
    for i in range(20):
        letters = torch.randint(97, 123, (20 + 7 * i,), generator=generator)
        (texts / f"{i}.txt").write_text(bytes(letters.tolist()).decode())
    data(str(folder), "joined", 2).prepare_data()
    return str(folder)


@pytest.fixture(scope="module")
def found(folder: str) -> list[dict[str, Any]]:
    """What each process found."""
    in_processes(work, folder, free_port(), n=P)
    return [torch.load(f"{folder}/{rank}.pt", weights_only=True) for rank in range(P)]


@pytest.mark.parametrize(("name", "documents", "rows"), [("2 x 2", "joined", 4), ("1 x 4", "apart", 2)])
def test_processes_that_share_sequences_train_as_one(
    name: str, documents: str, rows: int, folder: str, found: list[dict[str, Any]]
):
    """Weights after several steps with a carried memory, and figures of training and validation."""
    alone = train(folder, documents, rows)
    for of_process in found:
        torch.testing.assert_close(of_process[name]["weights"], alone["weights"])
        assert of_process[name]["figures"]["val/bits_per_byte"] == pytest.approx(alone["figures"]["val/bits_per_byte"])
    if name == "1 x 4":  # with two groups, the figure is that of the first
        assert found[0][name]["figures"]["train/loss"] == pytest.approx(alone["figures"]["train/loss"])
    for rank, of_process in enumerate(found):
        group = rank // 2 if name == "2 x 2" else 0
        mine = [t[2 * group : 2 * group + 2] for t in alone["memory"]]
        torch.testing.assert_close(list(of_process[name]["memory"]), mine)


def test_a_resumed_run_is_the_uninterrupted_one(found: list[dict[str, Any]]):
    for of_process in found:
        # To rounding: the order in which the gradients of four processes are summed is not fixed.
        torch.testing.assert_close(of_process["resumed"], of_process["whole"], rtol=1e-11, atol=1e-12)
    kept = found[0]["whole"]["weights"]
    assert not all(torch.equal(kept[name], found[0]["2 x 2"]["weights"][name]) for name in kept)  # dropout


# -------------------------------------------------------------------------------------------------------- the refusals


def test_what_needs_whole_sequences_says_so():
    tokens = torch.zeros(1, 3, dtype=torch.long)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"n_targets": 2}, "n_targets"),
        ({"eval_window": 4}, "eval_window"),
        ({"response_metrics": ["f1"]}, "response_metrics"),
        ({"accuracy": True, "test_lengths": (4,)}, "test_lengths"),
    ]
    for options, name in refused:
        with pytest.raises(ValueError, match=f"SequenceParallel: {name} needs whole sequences"):
            model(**options).part_of(TokenBatch(tokens, tokens), 0, 2)
    with pytest.raises(ValueError, match=r"SequenceParallel: data\.documents packed needs whole sequences"):
        model().part_of(TokenBatch(tokens, tokens, starts=tokens.bool()), 0, 2)
    with pytest.raises(ValueError, match="size=4, but sequences have 3 positions"):
        model().part_of(TokenBatch(tokens, tokens), 0, 4)


def test_models_and_numbers_that_do_not_fit_are_refused():
    pixels = PixelModel(Transformer(8, 2, 1, attention=LinearAttention), (2, 2, 1))
    for lm, message in (
        (pixels, "PixelModel does not support it; LanguageModel does"),
        (model(partial(SparseAttention, pattern="fixed", stride=2)), "SparseAttention does not support"),
    ):
        strategy = SequenceParallel(2)
        strategy.connect(lm)
        with pytest.raises(ValueError, match=f"SequenceParallel: {message}"):
            strategy.setup(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="size=0 must be at least 1"):
        SequenceParallel(0)
    strategy = SequenceParallel(2)
    strategy.parallel_devices = [torch.device("cpu")] * 3
    with pytest.raises(ValueError, match="size=2 does not divide the number of processes, 3"):
        strategy.setup_distributed()
