import inspect
import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lit_effattn import LSTM, Transformer, attention, sequence
from lit_effattn.checkpoints.files import DamagedError
from lit_effattn.generation import Kept
from lit_effattn.tasks import LanguageModel, PixelModel
from lit_effattn.tasks.kept_states import check_replaceable, fingerprint, load_state, save_state

V = 11
INFINITE = {"mem_len": 3, "segment_len": 3, "n_basis": 4, "widths": [0.1], "n_samples": 8}
OPTIONS: dict[str, dict[str, Any]] = {
    "CompressiveAttention": {"mem_len": 3, "compressed_len": 2, "segment_len": 3},
    "InfiniteAttention": INFINITE,
    "LSHAttention": {"n_buckets": 2, "chunk_size": 4},
    "SparseAttention": {"stride": 3},
    "TransformerXLAttention": {"mem_len": 3},
    "WindowedLinearAttention": {"window": 3},
}
KINDS = [
    *(
        name
        for name, kind in vars(attention).items()
        if isinstance(kind, type) and issubclass(kind, attention.Attention) and not inspect.isabstract(kind)
    ),
    "LSTM",
]


def backbone(kind: str, **options: Any) -> LSTM | Transformer:
    if kind == "LSTM":
        return LSTM(16, 2)
    return Transformer(16, 2, 2, attention=partial(getattr(attention, kind), **{**OPTIONS.get(kind, {}), **options}))


def made(kind: str = "LinearAttention", seed: int = 0, **options: Any) -> LanguageModel:
    torch.manual_seed(seed)
    return LanguageModel(backbone(kind, **options), V, embedding_std=1.0).double().eval()


def kept_after(model: LanguageModel, prompt: torch.Tensor, n: int, **options: Any) -> tuple[torch.Tensor, Kept]:
    kept: list[Kept] = []
    return model.sample(prompt, n, keep=kept.append, **options), kept[0]


PROMPT = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [0, 5, 0, 5, 0]])
NOTHING = PROMPT[:, :0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_goes_on_from_its_file_as_from_memory(kind: str, tmp_path: Path):
    """Two parts are one; a continuation changes neither the state in memory nor the file."""
    model = made(kind)
    whole = model.sample(PROMPT, 12, seed=3)
    first, kept = kept_after(model, PROMPT, 5, seed=3)
    save_state(kept, tmp_path / "s.state", model)
    for _ in range(2):
        loaded = load_state(tmp_path / "s.state", model)
        for part in (kept, loaded):
            assert torch.equal(torch.cat([first, model.sample(NOTHING, 7, kept=part, seed=3)], 1), whole)
    assert loaded.drawn == kept.drawn == 5
    _, later = kept_after(model, NOTHING, 4, kept=loaded, seed=3)
    assert torch.equal(model.sample(NOTHING, 3, kept=later, seed=3), whole[:, 9:])
    pairs = [*zip(sequence.tensors(loaded.state), sequence.tensors(kept.state), strict=True)]
    assert pairs
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs)


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_goes_on_from_its_file_as_from_memory(kind: str, tmp_path: Path):
    """Two parts are one, after a beginning that is given and one that is drawn."""
    torch.manual_seed(0)
    model, file = PixelModel(backbone(kind), (3, 4, 2), V).double().eval(), tmp_path / "s.state"
    given = torch.tensor([[1, 2], [3, 4], [10, 0]])
    whole = model.sample(given=given, seed=3)
    ends: list[Kept] = []
    first = model.sample(given=given, n_dims=9, keep=ends.append, seed=3)
    assert torch.equal(first, whole[:, :11])
    save_state(ends[0], file, model)
    loaded = load_state(file, model)
    assert torch.equal(loaded.tokens, first)
    for part in (ends[0], loaded):
        assert torch.equal(model.sample(n_dims=6, kept=part, keep=ends.append, seed=3), whole[:, :17])
        assert torch.equal(model.sample(kept=part, seed=3), whole)
    pairs = [*zip(sequence.tensors(ends[1].state), sequence.tensors(ends[2].state), strict=True)]
    assert pairs
    assert all(torch.equal(a, b) for a, b in pairs)
    for n_dims in (0, 14):
        with pytest.raises(ValueError, match=f"n_dims={n_dims}: 11 of an image's 24 dimensions are given, 13 are left"):
            model.sample(kept=loaded, n_dims=n_dims)


@pytest.mark.parametrize("kind", ["TransformerXLAttention", "CompressiveAttention", "InfiniteAttention"])
def test_a_memory_that_is_not_full_yet_goes_on(kind: str, tmp_path: Path):
    model = made(kind, mem_len=12)
    whole = model.sample(PROMPT, 30, seed=3)
    first, kept = kept_after(model, PROMPT, 5, seed=3)
    save_state(kept, tmp_path / "s.state", model)
    loaded = load_state(tmp_path / "s.state", model)
    assert torch.equal(torch.cat([first, model.sample(NOTHING, 25, kept=loaded, seed=3)], 1), whole)


@pytest.mark.parametrize("kind", ["LinearAttention", "SoftmaxAttention", "TransformerXLAttention"])
def test_another_prompt_branches_off(kind: str):
    """What follows is what follows the whole text so far."""
    model = made(kind)
    first, kept = kept_after(model, PROMPT, 5)
    more = torch.tensor([[3, 3], [1, 4], [2, 0]])
    _, again = kept_after(model, more, 4, kept=replace(kept, drawn=0), seed=9)
    expected = model.sample(torch.cat([PROMPT, first, more], 1), 4, seed=9)
    assert torch.equal(model.sample(more, 4, kept=replace(kept, drawn=0), seed=9), expected)
    assert again.drawn == 4
    assert torch.equal(again.tokens, expected[:, -1:])


def test_rows_of_a_kept_state(tmp_path: Path):
    model = made()
    _, kept = kept_after(model, PROMPT, 2)
    with pytest.raises(ValueError, match="kept has 3 rows, and prompt has 2 rows"):
        model.sample(NOTHING[:2], 1, kept=kept)
    with pytest.raises(ValueError, match="n_tokens=0"):
        model.sample(PROMPT, 0, keep=print)


def written(folder: Path, model: LanguageModel) -> Path:
    _, kept = kept_after(model, PROMPT, 2)
    save_state(kept, folder / "s.state", model)
    return folder / "s.state"


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return file.metadata()


def test_a_state_of_other_weights_or_sizes_is_refused(tmp_path: Path):
    model = made("TransformerXLAttention")
    path = written(tmp_path, model)
    other = made("TransformerXLAttention", seed=1)
    with pytest.raises(ValueError, match="other weights; give the checkpoint that wrote it"):
        load_state(path, other)
    longer = made("TransformerXLAttention", mem_len=4)
    longer.load_state_dict(model.state_dict())
    with pytest.raises(ValueError, match="a state of other sizes"):
        load_state(path, longer)


def test_every_flipped_byte_is_noticed(tmp_path: Path):
    model = made()
    path = written(tmp_path, model)
    content = path.read_bytes()
    for i in range(0, len(content), 97):
        path.write_bytes(content[:i] + bytes([content[i] ^ 16]) + content[i + 1 :])
        with pytest.raises((DamagedError, ValueError)):
            load_state(path, model)
    path.write_bytes(content[:-1])
    with pytest.raises(DamagedError):
        load_state(path, model)


def test_other_files_are_refused_and_kept(tmp_path: Path):
    model = made()
    path = written(tmp_path, model)
    tensors, about = load_file(path), metadata(path)
    for changed in ({**about, "lit_effattn_state": "[]"}, {}, {"lit_effattn_state": json.dumps({"drawn": 1})}):
        save_file(tensors, path, changed or None)
        with pytest.raises(DamagedError, match=r"s.state is not a saved state: `lit-effattn generate --save_state`"):
            load_state(path, model)
    drawn = json.loads(about["lit_effattn_state"])
    save_file(tensors, path, {"lit_effattn_state": json.dumps({**drawn, "drawn": 3})})
    with pytest.raises(DamagedError, match="its checksum differs"):
        load_state(path, model)
    other = tmp_path / "notes.txt"
    other.write_text("mine")
    with pytest.raises(FileExistsError, match="exists and is not a saved state"):
        save_state(kept_after(model, PROMPT, 1)[1], other, model)
    assert other.read_text() == "mine"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t - 100 if t.dtype == torch.long else t, "no room for -9. positions"),
        (lambda t: t + 10**9 if t.dtype == torch.long else t, "no room for 1,000,000,00. positions"),
        (lambda t: t + 2**60 if t.dtype == torch.long else t, "no room for 1,152,921,504,606,846,98. positions"),
        (lambda t: t.to(torch.uint8), "other names, types or shapes"),
        (lambda t: t[..., :1] if t.dim() > 2 else t, "other names, types or shapes"),
        (lambda t: t[..., None], "other names, types or shapes"),
    ],
    ids=["length", "long", "longest", "type", "column", "dimensions"],
)
def test_tensors_of_another_program_are_refused(
    change: Callable[[torch.Tensor], torch.Tensor], message: str, tmp_path: Path
):
    """Also with a checksum that fits. A length that the tensors have no room for would be allocated."""
    model = made("SoftmaxAttention")
    _, kept = kept_after(model, PROMPT, 2)
    save_state(replace(kept, state=sequence.map_tensors(change, kept.state)), tmp_path / "s.state", model)
    with pytest.raises(DamagedError, match=message):
        load_state(tmp_path / "s.state", model)


def test_a_state_reaches_the_disk_before_its_name_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model, synced, fsync = made(), list[bool](), os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: synced.append((tmp_path / "s.state").exists()) or fsync(file))
    written(tmp_path, model)
    assert synced == [False]


def test_the_fingerprint_is_of_names_types_and_bytes():
    model = made()
    before = fingerprint(model)
    assert before == fingerprint(made())
    assert before != fingerprint(made().float())
    shapes = [torch.nn.Bilinear(2, 3, 5, bias=False), torch.nn.Bilinear(3, 2, 5, bias=False)]
    for layer in shapes:
        torch.nn.init.ones_(layer.weight)
    assert len({*map(fingerprint, shapes)}) == 2
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1e-9
    assert fingerprint(model) != before


def test_a_place_where_no_state_can_be_written_is_refused_before_anything_is_drawn(tmp_path: Path):
    (tmp_path / "file").write_text("x")
    for path, error in (
        (tmp_path, FileExistsError),
        (Path("/dev/null"), FileExistsError),
        (tmp_path / "file", FileExistsError),
        (tmp_path / "file" / "new" / "s.state", OSError),
    ):
        with pytest.raises(error, match=f"{path}.*; name another"):
            check_replaceable(path)
    check_replaceable(tmp_path / "new" / "folder" / "s.state")
    assert not (tmp_path / "new").exists()
