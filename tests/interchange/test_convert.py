"""Converted models compute the results of transformers; unsupported models are rejected by name."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from lit_effattn import Transformer
from lit_effattn.attention import LinearAttention, SoftmaxAttention
from lit_effattn.attention.positions import LearnedPositions, RotaryPositions
from lit_effattn.cli import main
from lit_effattn.datamodules.text.text_stream import saved_tokenizer
from lit_effattn.interchange.convert import convert
from lit_effattn.nn.heads import CategoricalHead
from lit_effattn.tasks import LanguageModel
from tests.support.commands import fails

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None,
    reason="needs the package transformers",
)

SIZE, START = 300, 256
GPT2 = {"n_positions": 24, "n_embd": 16, "n_layer": 2, "n_head": 2}
LLAMA = {
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-3,
}
MIXED = ["sliding_attention", "full_attention"]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", GPT2),
    "gpt2-untied": (
        "gpt2",
        {**GPT2, "n_inner": 20, "activation_function": "relu", "tie_word_embeddings": False, "layer_norm_epsilon": 0.1},
    ),
    "llama": ("llama", LLAMA),
    "llama-tied": ("llama", {**LLAMA, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama-biases": (
        "llama",
        {**LLAMA, "attention_bias": True, "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
    ),
    "mistral": ("mistral", {**LLAMA, "sliding_window": None}),
    "mistral-window": ("mistral", {**LLAMA, "sliding_window": 5}),
    "mistral-heads": ("mistral", {**LLAMA, "head_dim": 6, "sliding_window": None}),
    "ministral": ("ministral", {**LLAMA, "head_dim": 4, "sliding_window": 5, "layer_types": MIXED}),
    "qwen2": ("qwen2", LLAMA),
    "qwen2-windows": ("qwen2", {**LLAMA, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("qwen3", {**LLAMA, "head_dim": 6}),
    "qwen3-window": (
        "qwen3",
        {**LLAMA, "head_dim": 4, "use_sliding_window": True, "layer_types": MIXED[:1] * 2, "sliding_window": 5},
    ),
    "qwen3-biases": ("qwen3", {**LLAMA, "head_dim": 4, "attention_bias": True, "tie_word_embeddings": True}),
}


def pretrained(name: str) -> Any:
    """A random model of transformers."""
    import transformers

    kind, options = MODELS[name]
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=SIZE, bos_token_id=START, eos_token_id=START + 1, **options
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.4 * torch.randn_like(p) + (p.ndim == 1))
    return model


@contextmanager
def doubles() -> Iterator[None]:
    """Let transformers, which computes norms, softmax and angles in float32 whatever the model's type, use float64."""
    double = {"float32": torch.float64, "float": torch.float64}
    with patch.multiple(torch, **double), patch.object(Tensor, "float", Tensor.double):
        yield


def exact_logits(model: Any) -> Tensor:
    """The logits of `tokens()` by a model of transformers, computed in float64."""
    with doubles():
        made = type(model)._from_config(model.config, attn_implementation="eager").double().eval()
        made.load_state_dict(model.state_dict())
        return made(tokens())[0]


def tokens() -> Tensor:
    return torch.randint(SIZE, (2, 20), generator=torch.Generator().manual_seed(1))


def tokenizer_json() -> str:
    """A tokenizer of byte pairs, as GPT-2's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(["a bird in a box"] * 9, trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet))
    return made.to_str()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a folder of each model, as transformers saves it."""
    root = tmp_path_factory.mktemp("folders")
    tokenizer = tokenizer_json()
    for name in MODELS:
        pretrained(name).save_pretrained(root / name)
        (root / name / "tokenizer.json").write_text(tokenizer)
    return root


@pytest.fixture
def folder(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of Llama's folder, in the current one."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(folders / "llama", "hf"))


def change(folder: Path, **settings: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def logits(model: LanguageModel) -> Tensor:
    return model.head.proj(model.backbone(model.embedding(tokens()))[0])


def near(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers_there_and_back(name: str, folders: Path, tmp_path: Path):
    from transformers import AutoModelForCausalLM

    expected = exact_logits(pretrained(name))
    assert expected.std() > 0.1
    convert(folders / name, tmp_path / "ours")
    model = LanguageModel.load_from_checkpoint(tmp_path / "ours" / "model.ckpt").double().eval()
    near(logits(model), expected)
    convert(tmp_path / "ours" / "model.ckpt", tmp_path / "back")
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info.values()), info
    near(exact_logits(again), expected)
    convert(tmp_path / "back", tmp_path / "again")
    convert(tmp_path / "again" / "model.ckpt", tmp_path / "last")
    for file in ("config.json", "tokenizer.json", "model.safetensors"):
        assert (tmp_path / "last" / file).read_bytes() == (tmp_path / "back" / file).read_bytes()


def test_old_gpt2_folders_have_no_prefix_and_hold_masks(folders: Path, tmp_path: Path):
    from safetensors.torch import load_file, save_file

    shutil.copytree(folders / "gpt2", tmp_path / "old")
    weights = tmp_path / "old" / "model.safetensors"
    tensors = {name.removeprefix("transformer."): t for name, t in load_file(weights).items()}
    tensors |= {f"h.{i}.attn.{mask}": torch.ones(1) for i in range(2) for mask in ("bias", "masked_bias")}
    save_file({**tensors, "lm_head.weight": tensors["wte.weight"].clone()}, weights)
    convert(folders / "gpt2", tmp_path / "a")
    convert(tmp_path / "old", tmp_path / "b")
    a, b = (torch.load(tmp_path / name / "model.ckpt", weights_only=True) for name in "ab")
    assert all(torch.equal(t, b["state_dict"][name]) for name, t in a["state_dict"].items())
    save_file({**tensors, "lm_head.weight": tensors["wte.weight"] + 1}, weights)
    with pytest.raises(ValueError, match=r"tie_word_embeddings=true, but lm_head.weight is not the embedding"):
        convert(tmp_path / "old", tmp_path / "c")


# --------------------------------------------------------------------------------------------- what is refused


def test_what_would_give_other_logits_is_refused_by_name(folder: Path):
    (folder / "generation_config.json").unlink()  # it names special tokens, too
    config = (folder / "config.json").read_text()
    for settings, words in (
        ({"model_type": "gemma"}, "model_type='gemma'.*gpt2, llama, mistral, ministral, qwen2, qwen3"),
        ({"model_type": "qwen3", "head_dim": 4}, r"the weights lack model.layers.0.self_attn.k_norm.weight"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 10.0}}, "rope_type='yarn'"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"head_dim": 8}, r"q_proj.weight has the shape \(16, 16\)"),
        ({"head_dim": 0}, "head_dim=0"),
        ({"head_dim": 5}, "head_dim=5 is odd"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0: this key is not known"),
        ({"model_type": "qwen2", "use_sliding_window": 1}, "use_sliding_window=1: it must be true or false"),
        ({"model_type": "qwen2", "max_window_layers": None}, "max_window_layers=None: it must be an integer"),
        ({"model_type": "mistral", "attention_bias": True}, "attention_bias=True"),
        ({"hidden_size": "16"}, "hidden_size='16'"),
        ({"rms_norm_eps": 0}, "rms_norm_eps=0"),
        ({"num_hidden_layers": 3}, "the weights lack model.layers.2.*and 6 more"),
        ({"num_hidden_layers": 1}, "the weights also hold model.layers.1"),
        ({"intermediate_size": 21}, r"model.layers.0.mlp.gate_proj.weight has the shape \(20, 16\)"),
        ({"vocab_size": 260}, "largest=26[0-9], beyond the model's vocabulary of 260"),
        ({"bos_token_id": None, "eos_token_id": None}, "does not give.*bos_token_id"),
        ({"bos_token_id": 300}, "start=300"),
        *(
            ({name: 10**9}, "hf describes a larger model than it holds")
            for name in ("hidden_size", "num_hidden_layers")
        ),
        ({"vocab_size": 10**10}, "hf describes a larger model than it holds"),
    ):
        (folder / "config.json").write_text(json.dumps({**json.loads(config), **settings}))
        with pytest.raises(ValueError, match=words):
            convert(folder, "ours")
        assert [path.name for path in Path().iterdir()] == ["hf"]


def test_half_a_folder_is_refused_and_nothing_is_written(folder: Path, capsys: pytest.CaptureFixture[str]):
    def says(words: str) -> None:
        assert words in fails(capsys, "convert", "hf", "ours")
        assert [path.name for path in Path().iterdir()] == ["hf"]

    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-9])
    says("model.safetensors is damaged")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    says("pickle (pytorch_model.bin), which can run code and is never read: get model.safetensors")
    (folder / "pytorch_model.bin").unlink()
    says("neither model.safetensors nor model.safetensors.index.json")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))
    says("no weight_map from names")
    (folder / "tokenizer.json").write_text("{}")
    says("tokenizer.json does not describe a tokenizer")
    (folder / "config.json").write_text("[]")
    says("config.json must hold a JSON object, but holds a list")
    (folder / "config.json").unlink()
    says("has no config.json")
    assert "FROM=nowhere" in fails(capsys, "convert", "nowhere", "ours")
    assert "TO=hf exists already" in fails(capsys, "convert", "hf", "hf")


def test_weights_in_parts(folder: Path, folders: Path):
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    places = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for part in set(places.values()):
        save_file({name: tensors[name] for name in names if places[name] == part}, folder / part)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    convert(folder, "ours")
    convert(folders / "llama", "other")
    a, b = (torch.load(f"{name}/model.ckpt", weights_only=True)["state_dict"] for name in ("ours", "other"))
    assert all(torch.equal(a[name], b[name]) for name in {**a, **b})
    (folder / part).unlink()
    with pytest.raises(ValueError, match=f"has no {part}, which model.safetensors.index.json lists"):
        convert(folder, "half")
    assert not Path("half").exists()


ROTARY = {"positions": RotaryPositions, "activation": "swiglu", "norm_kind": "rms"}


def saved(folder: Path, **options: Any) -> Path:
    """The checkpoint of a model like GPT-2 but for `options`."""
    backbone = {"positions": partial(LearnedPositions, max_len=8), "activation": "gelu_tanh", **options}
    head = backbone.pop("head", partial(CategoricalHead, bias=False))
    task = {name: backbone.pop(name) for name in ("embedding_scale",) if name in backbone}
    model = LanguageModel(Transformer(8, 2, **{"n_layers": 1, **backbone}), 9, head=head, **task)
    torch.save({"state_dict": model.state_dict(), "hyper_parameters": dict(model.hparams)}, folder / "own.ckpt")
    return folder / "own.ckpt"


def test_what_transformers_has_not_cannot_go_back(tmp_path: Path):
    windows = [partial(SoftmaxAttention, bias=False, window=window) for window in (4, 5)]
    of_two = {**ROTARY, "n_layers": 2, "norm_eps": 1e-5}
    qwen3 = partial(SoftmaxAttention, bias=False, qk_norm=True, qk_norm_eps=0.1)
    for options, words in (
        ({"attention": LinearAttention}, "backbone.attention='.*LinearAttention'"),
        ({"head": CategoricalHead}, r"head.proj.bias=\(9,\)"),
        ({"norm": "post"}, "backbone.norm='post'"),
        ({"norm": "pre", "final_norm": False}, "transformers has no such model|backbone.norm"),
        ({"activation": "quick_gelu"}, "activation='quick_gelu'"),
        ({"embedding_scale": 2.0}, "embedding_scale=2.0"),
        ({"positions": None}, "of no family of transformers"),
        ({"positions": RotaryPositions, "activation": "swiglu"}, "backbone.norm_kind='layer'"),
        ({**ROTARY, "attention": partial(SoftmaxAttention, head_dim=5)}, "head_dim=5 is odd"),
        (
            {**ROTARY, "attention": qwen3, "norm_eps": 1e-5},
            "backbone.attention.qk_norm_eps=0.1, where qwen3 has 1e-05",
        ),
        ({**of_two, "attention": windows}, r"backbone.attention\[1\].window=5, where mistral has 4"),
        (
            {**of_two, "attention": [windows[0], LinearAttention]},
            r"backbone.attention\[1\]='.*LinearAttention', where ministral has '.*Softmax",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            convert(saved(tmp_path, **options), tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_an_own_model_of_that_shape_can(tmp_path: Path):
    assert "gpt2, float32, without a tokenizer" in convert(saved(tmp_path, dropout=0.1), tmp_path / "out")


# ------------------------------------------------------------------------------------------------ what comes back


@pytest.mark.parametrize(("name", "dtype"), [("gpt2", torch.bfloat16), ("qwen3", torch.float16)])
def test_the_type_of_the_weights_comes_back(name: str, dtype: torch.dtype, folders: Path, tmp_path: Path):
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    pretrained(name).to(dtype).save_pretrained(tmp_path / "hf")
    shutil.copy(folders / name / "tokenizer.json", tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "ours")
    convert(tmp_path / "ours" / "model.ckpt", tmp_path / "back")
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("hf", "back"))
    assert before.keys() == after.keys()
    assert all(after[name].dtype == dtype and torch.equal(after[name], t) for name, t in before.items())
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "back").dtype == dtype


def special(folder: Path, **files: Any) -> list[int]:
    """Give a folder a tokenizer with the special tokens that are returned, and the files that say which they are."""
    from tokenizers import Tokenizer

    made = Tokenizer.from_str(tokenizer_json())
    made.add_special_tokens([*SPECIAL])
    (folder / "tokenizer.json").write_text(made.to_str())
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return [made.token_to_id(name) for name in SPECIAL]


SPECIAL = ("<|begin|>", "<|turn|>", "<|text|>", "<|pad|>")
CHAT = {"bos_token": None, "eos_token": "<|turn|>", "pad_token": "<|pad|>", "additional_special_tokens": ["<|text|>"]}


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen2"])
def test_all_special_tokens_come_back(name: str, folders: Path, tmp_path: Path):
    """As in Qwen2: the tokenizer ends a turn, the model has no token before a text, and generation has several ends."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    folder = Path(shutil.copytree(folders / name, tmp_path / "hf"))
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **CHAT,
        "auto_map": {"AutoTokenizer": ["code.Mine", None]},
    }
    begin, turn, text, pad = special(folder, tokenizer_config=tokenizer, special_tokens_map=CHAT)
    generation = {"bos_token_id": begin, "eos_token_id": [turn, text], "pad_token_id": pad, "top_p": 0.8}
    (folder / "generation_config.json").write_text(json.dumps({**generation, "do_sample": True}))
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}\n")
    change(folder, bos_token_id=None, eos_token_id=[text, turn], pad_token_id=pad)
    convert(folder, tmp_path / "ours")
    checkpoint = tmp_path / "ours" / "model.ckpt"
    tokens = LanguageModel.load_from_checkpoint(checkpoint).text
    assert (tokens.start, tokens.end) == (begin, text)  # what config.json does not say, generation_config.json does
    assert saved_tokenizer(checkpoint).to_json() == tokens.to_json()  # data pass it on to a fine-tuned model
    convert(checkpoint, tmp_path / "back")

    before, after = (
        [kind.from_pretrained(tmp_path / f) for kind in (AutoConfig, GenerationConfig)] for f in ("hf", "back")
    )
    for a, b in zip(before, after, strict=True):
        for key in ("bos_token_id", "eos_token_id", "pad_token_id", "top_p", "do_sample"):
            assert getattr(a, key, None) == getattr(b, key, None), key
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in tokenizer.items() if k != "auto_map"}))
    before, after = (AutoTokenizer.from_pretrained(tmp_path / f) for f in ("hf", "back"))
    assert before.special_tokens_map == after.special_tokens_map
    assert (after.bos_token, after.eos_token, after.pad_token) == (None, "<|turn|>", "<|pad|>")
    assert before.apply_chat_template([{"content": "a bird"}]) == after.apply_chat_template([{"content": "a bird"}])
    assert "auto_map" not in (tmp_path / "back" / "tokenizer_config.json").read_text()


def test_special_tokens_that_only_the_configuration_names(folders: Path, tmp_path: Path):
    from transformers import AutoTokenizer, GenerationConfig

    folder = Path(shutil.copytree(folders / "llama", tmp_path / "hf"))
    (folder / "generation_config.json").unlink()
    begin, turn, *_ = special(folder)
    change(folder, bos_token_id=begin, eos_token_id=turn)
    convert(folder, tmp_path / "ours")
    convert(tmp_path / "ours" / "model.ckpt", tmp_path / "back")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "back")
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|begin|>", "<|turn|>")
    generation = GenerationConfig.from_pretrained(tmp_path / "back")
    assert (generation.bos_token_id, generation.eos_token_id) == (begin, turn)


def test_checkpoints_without_these_files_still_go_back(folder: Path):
    special(folder)
    convert(folder, "ours")
    checkpoint = torch.load("ours/model.ckpt", weights_only=True)
    spec = json.loads(checkpoint["hyper_parameters"]["tokenizer"])
    del spec["vocabulary"]["files"]
    checkpoint["hyper_parameters"]["tokenizer"] = json.dumps(spec)
    torch.save(checkpoint, "old.ckpt")
    convert("old.ckpt", "back")
    config = json.loads(Path("back/config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (START, START + 1)


def test_without_a_tokenizer_texts_are_token_numbers(folder: Path, capsys: pytest.CaptureFixture[str]):
    (folder / "tokenizer.json").unlink()
    with pytest.warns(UserWarning, match=r"^hf has no tokenizer.json: texts of the converted model are token numbers"):
        main(["convert", "hf", "ours"])
    capsys.readouterr()
    quiet = ["--trainer.enable_progress_bar", "false", "--trainer.accelerator", "cpu", "--trainer.logger", "false"]
    main(["generate", "--ckpt_path", "ours/model.ckpt", "--prompt", "7 0 12", "--n_tokens", "4", *quiet])
    words = capsys.readouterr().out.splitlines()[0].split()
    assert words[:3] == ["7", "0", "12"]
    assert len(words) == 7
    wrong = ["generate", "--ckpt_path", "ours/model.ckpt", "--prompt", "7 a bird", *quiet]
    assert "the text has 'a', where a token's number is expected, 0 … 299" in fails(capsys, *wrong)
    Path("text.txt").write_text("7 0 12 255\n" * 60, encoding="utf-8")
    data = ["--config", "ours/config.yaml", "--data.root", "text.txt", "--data.segment_len", "16", "--data.cache", "c"]
    main(["test", "--ckpt_path", "ours/model.ckpt", *data, *quiet])
    assert "test perplexity:" in capsys.readouterr().out
    main(["convert", "ours/model.ckpt", "back"])
    assert "without a tokenizer.json, as the original folder" in capsys.readouterr().out
    config = json.loads(Path("back/config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (START, START + 1)
    assert not Path("back/tokenizer.json").exists()


# ----------------------------------------------------------------------------------------------------- the command


def test_text_in_and_out_then_another_attention(folder: Path, capsys: pytest.CaptureFixture[str]):
    from transformers import AutoTokenizer

    main(["convert", "hf", "ours"])
    assert "ours/model.ckpt: llama, " in capsys.readouterr().out
    quiet = ["--trainer.enable_progress_bar", "false", "--trainer.accelerator", "cpu", "--trainer.logger", "false"]
    main(["generate", "--ckpt_path", "ours/model.ckpt", "--prompt", "a bird", "--n_tokens", "4", *quiet])
    assert capsys.readouterr().out.startswith("a bird")
    main(["convert", "ours/model.ckpt", "back"])
    tokenizer = AutoTokenizer.from_pretrained("back")
    expected = LanguageModel.load_from_checkpoint("ours/model.ckpt").text.encode("a bird, 屋")
    assert tokenizer("a bird, 屋", add_special_tokens=False)["input_ids"] == expected.tolist()
    Path("text.txt").write_text("a bird in a box\n" * 60, encoding="utf-8")
    data = ["--config", "ours/config.yaml", "--data.root", "text.txt", "--data.segment_len", "16", "--data.cache", "c"]
    main(["test", "--ckpt_path", "ours/model.ckpt", *data, *quiet])
    assert "test perplexity:" in capsys.readouterr().out
    main(
        [
            *("fit", *data, "--init_weights", "ours/model.ckpt", "--model.backbone.attention", "LinearAttention"),
            *("--trainer.max_steps", "1", "--trainer.default_root_dir", "runs", *quiet),
        ]
    )
    (last,) = Path("runs").rglob("last.ckpt")
    tuned = LanguageModel.load_from_checkpoint(last)
    attention: Any = tuned.backbone.blocks[0].attention  # type: ignore[index]
    assert type(attention) is LinearAttention
    given = torch.load("ours/model.ckpt", weights_only=True)["state_dict"]
    for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
        before, after = (state[f"backbone.blocks.0.attention.{part}.weight"] for state in (given, tuned.state_dict()))
        assert 0 < (after - before).abs().max() < 1e-3
    kind = ("--model.backbone.attention", "WindowedLinearAttention", "--model.backbone.attention.window", "4")
    steps = ("--trainer.max_steps", "1", "--trainer.default_root_dir", "transfer", *quiet)
    main(["fit", *data, *kind, "--transfer_from", "ours/model.ckpt", *steps])
    (last,) = Path("transfer").rglob("last.ckpt")
    kept = LanguageModel.load_from_checkpoint(last).state_dict()
    assert (kept["embedding.weight"] == given["embedding.weight"]).all()
