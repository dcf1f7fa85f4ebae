"""What holds for the loaders of every data module: exact resuming, processes, and their order."""

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from torch.utils.data import DistributedSampler

from lit_effattn.datamodules import (
    AssociativeRecall,
    CopyTask,
    DialogueTask,
    LabelledImages,
    LabelledTexts,
    ManifestCorpus,
    PixelSequences,
    RetrievalTask,
    SequencePairs,
    SortingTask,
    SpeechData,
    StateTracking,
    TextStream,
)

TINY = {"batch_size": 4, "n_train": 21, "n_val": 6, "n_test": 7}
STREAM: dict[str, Any] = {"root": "texts", "segment_len": 5, "batch_size": 2}
MADE: dict[str, Any] = {
    "pixels": lambda **o: PixelSequences("folder", root="images", image_size=8, batch_size=4, flip=True, **o),
    "labelled images": lambda **o: LabelledImages("folder", root="images", image_size=8, batch_size=4, **o),
    "labelled texts": lambda **o: LabelledTexts("pairs", batch_tokens=60, **o),
    "packed texts": lambda **o: LabelledTexts("pairs", batch_tokens=60, packed=True, **o),
    "pairs": lambda **o: SequencePairs("files", root="pairs", batch_tokens=60, **o),
    "speech": lambda **o: SpeechData(
        ManifestCorpus(*(f"{split}.jsonl" for split in ("train", "val", "test"))),
        **{"n_mels": 20, "sample_rate": 8000, "batch_frames": 60, **o},
    ),
    "stream": lambda **o: TextStream("files", **STREAM, **o),
    "shuffled stream": lambda seed=0, **o: TextStream("files", **STREAM, shuffle_seed=seed, **o),
    "whole documents": lambda seed=0, **o: TextStream("files", **STREAM, documents="whole", shuffle_seed=seed, **o),
    "recall": lambda **o: AssociativeRecall(12, n_pairs=3, n_keys=9, n_values=9, test_lengths=[12, 14], **TINY, **o),
    "copy": lambda **o: CopyTask(16, **TINY, **o),
    "dialogue": lambda **o: DialogueTask(
        20, segment_len=9, n_facts=9, n_near=2, n_far=2, n_keys=40, **{**TINY, "batch_size": 8}, **o
    ),
    "retrieval": lambda **o: RetrievalTask(12, n_needles=3, **TINY, **o),
    "sorting": lambda **o: SortingTask(9, n_types=3, segment_len=5, **TINY, **o),
    "tracking": lambda **o: StateTracking("S3", length=9, test_lengths=[9], **TINY, **o),
}
ALL = pytest.mark.parametrize("name", MADE)


@pytest.fixture(autouse=True, scope="module")
def _data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Files of 9 to 40 items a split, in the working directory."""
    root, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for split, n in (("train", 40), ("val", 9), ("test", 11)):
        texts = [f"{split} {i} {'word ' * (i % 5)}" for i in range(n)]
        for folder in ("pairs", f"texts/{split}", f"images/{split}/a", f"images/{split}/b", "audio"):
            (root / folder).mkdir(parents=True, exist_ok=True)
        (root / "pairs" / f"{split}.tsv").write_text("".join(f"{text}\t{'ab'[len(text) % 2]}\n" for text in texts))
        manifest = []
        for i, text in enumerate(texts):
            (root / "texts" / split / f"{i}.txt").write_text(text)
            pixels = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / "images" / split / "ab"[i % 2] / f"{i}.png")
            soundfile.write(root / "audio" / f"{split}{i}.wav", rng.uniform(-0.5, 0.5, 1200 + 80 * (i % 9)), 8000)
            manifest.append(f'{{"audio_filepath": "audio/{split}{i}.wav", "phonemes": "a {"b" * (i % 3 + 1)}"}}\n')
        (root / f"{split}.jsonl").write_text("".join(manifest))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        yield


def ready(name: str, stage: str = "fit", world: int = 1, rank: int = 0, **options: Any) -> Any:
    data = MADE[name](**options)
    data.prepare_data()
    sampler = {"num_replicas": world, "rank": rank}
    data.trainer = SimpleNamespace(distributed_sampler_kwargs=sampler, overfit_batches=0, lightning_module=None)
    data.setup(stage)
    return data


def plain(batch: Any) -> Any:
    """A batch that can be compared."""
    return (
        batch.tolist() if isinstance(batch, torch.Tensor) else [plain(b) for b in batch] if _is_many(batch) else batch
    )


def _is_many(batch: Any) -> bool:
    return isinstance(batch, list | tuple)


def epoch_of(loader: Any, epoch: int) -> list[Any]:
    loader.sampler.set_epoch(epoch)
    return [plain(batch) for batch in loader]


def rows(loader: Any) -> Counter[bytes]:
    """The rows of the first field of each batch, without padding and empty rows."""
    found: Counter[bytes] = Counter()
    for batch in loader:
        x = batch if isinstance(batch, torch.Tensor) else batch[0]
        lengths = getattr(batch, "source_lengths", getattr(batch, "lengths", None))
        found.update(
            r[:n].numpy().tobytes()
            for r, n in zip(x, [x.size(1)] * len(x) if lengths is None else lengths, strict=True)
        )
    del found[b""]
    return found


@ALL
def test_an_interrupted_epoch_resumes_with_the_next_batch(name: str):
    """Also in worker processes; and of another epoch the state has no effect."""
    torch.manual_seed(0)
    before = torch.get_rng_state()
    whole = [epoch_of(ready(name).train_dataloader(), epoch) for epoch in (2, 3)]
    assert len(whole[0]) == len(whole[1]) == len(ready(name).train_dataloader()) > 3
    assert (whole[0] == whole[1]) == (name == "stream")
    first, second = ready(name).train_dataloader(), ready(name, num_workers=1).train_dataloader()
    first.sampler.set_epoch(2)
    batches = iter(first)
    assert [plain(next(batches)) for _ in range(3)] == whole[0][:3]
    state = first.state_dict()
    second.load_state_dict(state)
    assert second.state_dict() == state  # a checkpoint before the next batch
    assert epoch_of(second, 2) == whole[0][3:]
    assert epoch_of(second, 3) == whole[1]
    second._iterator._shutdown_workers()  # as Lightning does; at garbage collection it may wait for 10 s
    third = ready(name).train_dataloader()
    third.load_state_dict(state)
    assert epoch_of(third, 3) == whole[1]
    assert torch.equal(before, torch.get_rng_state())
    assert isinstance(first.sampler, DistributedSampler)  # which Lightning keeps


@ALL
def test_evaluation_reads_each_item_once_over_all_processes_in_equally_many_batches(name: str):
    for split, stage in (("val", "validate"), ("test", "test"), ("predict", "predict")):
        whole = rows(getattr(ready(name, stage), f"{split}_dataloader")())
        loaders = [getattr(ready(name, stage, 3, rank), f"{split}_dataloader")() for rank in range(3)]
        assert len({len(loader) for loader in loaders}) == 1
        parts = [rows(loader) for loader in loaders]
        assert sum(parts, Counter()) == whole
        assert whole.total() >= 6


@pytest.mark.parametrize("name", [name for name in MADE if name != "stream"])
def test_the_order_depends_on_the_seed_and_the_processes_have_as_many_batches(name: str):
    assert epoch_of(ready(name, seed=1).train_dataloader(), 0) != epoch_of(ready(name).train_dataloader(), 0)
    assert len({len(ready(name, "fit", 2, rank).train_dataloader()) for rank in range(2)}) == 1


@ALL
def test_overfit_batches_is_refused(name: str):
    data = ready(name)
    data.trainer = SimpleNamespace(overfit_batches=2, distributed_sampler_kwargs=None)
    with pytest.raises(ValueError, match="overfit_batches=2 would replace the sampler"):
        data.train_dataloader()
