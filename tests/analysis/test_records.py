from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import pytest
import yaml

from lit_effattn import LSTM, Transformer
from lit_effattn.analysis.records import _data_length, _sizes, differences, flat, read_run
from lit_effattn.attention import SoftmaxAttention
from lit_effattn.tasks import LanguageModel, MaskedLanguageModel, PixelModel


def a_run(folder: Path, logs: dict[int, str], **config) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config or {"seed_everything": 0}))
    for version, text in logs.items():
        (folder / f"csv/version_{version}").mkdir(parents=True)
        (folder / f"csv/version_{version}/metrics.csv").write_text(text)
    return folder


def test_a_run_without_costs_and_checkpoints_is_read(tmp_path):
    run = read_run(a_run(tmp_path / "a", {0: "epoch,step,train/loss,val/loss\n0,9,1.5,\n0,19,1.0,2.5\n0,2"}))
    assert run.final == {"train/loss": 1.0, "val/loss": 2.5}
    assert run.curves["train/loss"] == {9: 1.5, 19: 1.0}
    assert (run.seconds_per_step, run.parameters, run.state_bytes, run.peak_memory) == (None, None, None, {})
    assert run.remark == "no checkpoint"


def test_a_resumed_run_replaces_steps_and_goes_on_in_time(tmp_path):
    logs = {
        0: "step,train/loss,cost/seconds,cost/process_bytes\n9,4,,\n9,,10,100\n19,3,20,400\n29,9,30,400\n",
        2: "step,train/loss,cost/seconds,cost/process_bytes\n29,2,5,200\n39,1,25,200\n",
        10: "step,train/loss,test/loss\n39,0.5,\n40,,7\n",
    }
    run = read_run(a_run(tmp_path / "a", logs))
    assert run.curves["train/loss"] == {9: 4, 19: 3, 29: 2, 39: 0.5}
    assert run.seconds == {9: 10, 19: 20, 29: 25, 39: 45}
    assert run.seconds_per_step == 1.0  # the median of 1, 1 and 2
    assert run.peak_memory == {"peak process bytes": 400}
    assert run.final["test/loss"] == 7


def test_the_newest_configuration_of_a_resumed_run_counts(tmp_path):
    run = a_run(tmp_path / "a", {}, trainer={"max_steps": 2})
    for number, n_steps in ((2, 4), (10, 8)):
        (run / f"config_resumed_{number}.yaml").write_text(yaml.safe_dump({"trainer": {"max_steps": n_steps}}))
    assert read_run(run).settings == {"trainer.max_steps": 8}


def test_settings_are_flat_and_only_differences_are_told(tmp_path):
    def config(kind: str, **more):
        return {"model": {"class_path": "a.b.Model", "init_args": {"attention": kind, **more}}, "n": [1, 2]}

    first = read_run(a_run(tmp_path / "a", {}, **config("x.y.Linear", chunk=3), ckpt_path="p"))
    second = read_run(a_run(tmp_path / "b", {}, **config("y.z.Softmax")))
    assert first.settings["model"] == "Model"
    assert differences([first, second]) == {
        "model.attention": ["Linear", "Softmax"],
        "model.chunk": [3, None],
    }
    assert flat({"a": {}, "b": []}) == {"a": {}, "b": []}


def test_one_attention_and_a_list_of_one_are_the_same_setting(tmp_path):
    linear = {"class_path": "lit_effattn.attention.LinearAttention", "init_args": {"chunk_size": 8}}
    kinds = {"one": linear, "list": [linear], "two": [linear, "SoftmaxAttention"]}
    runs = [read_run(a_run(tmp_path / name, {}, model={"attention": kind})) for name, kind in kinds.items()]
    assert differences(runs[:2]) == {}
    assert differences(runs) == {"model.attention.1": [None, None, "SoftmaxAttention"]}


def test_a_default_that_another_configuration_leaves_out_is_no_difference(tmp_path):
    """Such as that of a shipped model."""
    trainers = [{"accelerator": "auto", "max_steps": 3}, {"devices": "auto"}, {"accelerator": "cpu"}]
    runs = [read_run(a_run(tmp_path / str(i), {}, trainer=trainer)) for i, trainer in enumerate(trainers)]
    assert differences(runs[:2]) == {"trainer.max_steps": [3, None]}
    assert differences(runs)["trainer.accelerator"] == ["auto", None, "cpu"]


def test_files_that_cannot_be_read_are_named(tmp_path: Path):
    for content, message in (
        ("a: [", "can't be read"),
        ("- 1", "holds no settings"),
        ("!!python/object:os.system {}", "can't be read"),
    ):
        (tmp_path / "config.yaml").write_text(content)
        with pytest.raises(ValueError, match=message):
            read_run(tmp_path)
    for text, message in (("9" * 200_000, "field larger than field limit"), ("\udc80", r"metrics\.csv can't be read")):
        run = a_run(tmp_path / message[:5], {0: ""})
        (run / "csv/version_0/metrics.csv").write_bytes(f"step,a\n0,{text}".encode(errors="surrogateescape"))
        with pytest.raises(ValueError, match=message):
            read_run(run)


def test_a_damaged_checkpoint_is_a_remark(tmp_path):
    run = a_run(tmp_path / "a", {})
    (run / "checkpoints").mkdir()
    (run / "checkpoints/last.ckpt").write_bytes(b"nothing")
    assert "last.ckpt" in read_run(run).remark


def test_the_state_of_an_image_model_is_that_of_an_image(tmp_path):
    run = a_run(tmp_path / "a", {})
    model = PixelModel(Transformer(8, 2, 1, attention=SoftmaxAttention), (2, 3, 1), 4)
    trainer = pl.Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu")
    trainer.strategy.connect(model)
    trainer.save_checkpoint(run / "checkpoints/last.ckpt")
    assert read_run(run).state_length == 6
    assert read_run(run, length=5).state_length == 5


def test_bytes_of_states():
    """A key/value cache has two vectors of width E a position and layer; h and c of an LSTM have no length."""
    softmax = LanguageModel(Transformer(8, 2, 3, attention=partial(SoftmaxAttention)), 5)
    short, long = _sizes(softmax, 10), _sizes(softmax, 25)
    assert long["state_bytes"] - short["state_bytes"] == 15 * 2 * 8 * 3 * 4
    assert (short["state_length"], long["state_length"]) == (10, 25)
    lstm = _sizes(LanguageModel(LSTM(8, n_layers=2), 5), 10)
    assert lstm["state_length"] is None
    assert lstm["state_bytes"] >= 2 * 2 * 8 * 4
    assert lstm["monitor"] == "val/perplexity"
    window = LanguageModel(Transformer(8, 2, 1, attention=partial(SoftmaxAttention, window=20)), 5)
    assert _sizes(window, 10) == _sizes(window, 30)
    both_ways = MaskedLanguageModel(Transformer(8, 2, 1, attention=SoftmaxAttention, causal=False), 5)
    assert "state_bytes" not in _sizes(both_ways, 10)
    assert _data_length({"data.length": None, "data.max_len": 7}) == 7
    assert _data_length({}) == 1024


def test_numbers_that_are_none_are_left_out(tmp_path: Path):
    log = f"step,train/loss,cost/process_bytes\n{10**30},1,2\n-1,1,2\n3,2.5,inf\n4,2,7\n"
    run = read_run(a_run(tmp_path / "a", {0: log}))
    assert run.curves["train/loss"] == {3: 2.5, 4: 2.0}
    assert run.peak_memory == {"peak process bytes": 7}
