"""Adapters of other packages' modules and of functions."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lit_effattn.laws import FunctionAdapter, HuggingFaceAdapter, check


def test_a_tiny_model_of_transformers_keeps_the_laws():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    config = transformers.LlamaConfig(**sizes, **heads, pad_token_id=0, bos_token_id=0, eos_token_id=None)
    laws = ["alive", "no-future", "segments", "steps", "alone", "padding", "ragged", "generation"]
    report = check(HuggingFaceAdapter(partial(transformers.LlamaForCausalLM, config)), laws=laws)
    assert [result.status for result in report.results] == ["ok"] * len(laws), report


def test_a_function_is_checked_and_named():
    adapter = FunctionAdapter(lambda q, k, v, state: (v if state is None else v + 1, v), width=12)
    report = check(adapter, laws=["steps", "no-future"])
    assert [result.status for result in report.results] == ["broken", "ok"], report
    assert report.name == "<lambda>"


def test_rows_of_a_cache_without_reorder_cache():
    keys, mask, rows = torch.arange(6).view(3, 2), torch.arange(12).view(3, 4), torch.tensor([2, 0])
    cache, chosen = HuggingFaceAdapter.select(None, ({"keys": [keys]}, mask), rows)
    assert cache["keys"][0].tolist() == [[4, 5], [0, 1]]
    assert chosen.tolist() == [[8, 9, 10, 11], [0, 1, 2, 3]]


def test_the_mask_is_on_the_device_of_the_tokens():
    class Echo(nn.Module):
        def forward(self, x, attention_mask, past_key_values, use_cache):
            return SimpleNamespace(logits=x * attention_mask, get=lambda name: past_key_values)

    tokens, lengths = torch.ones(2, 3, dtype=torch.long, device="meta"), torch.ones(2, device="meta")
    assert HuggingFaceAdapter.call(Echo(), tokens, None, lengths)[1][1].device == tokens.device
