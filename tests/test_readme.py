"""The README's Python runs."""

import re
from pathlib import Path

import pytest
import torch

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)


def test_an_attention_works_alone():
    (code,) = [block for block in BLOCKS if "attention = LinearAttention(" in block]
    exec(code, names := {})
    assert names["state"].length.tolist() == [1001, 1001]


def test_a_kind_of_your_own_keeps_the_segment_law():
    (code,) = [block for block in BLOCKS if "class MeanAttention" in block]
    exec(code, names := {})
    attention = names["MeanAttention"](8, 2, True).double()
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    whole, _ = attention(x)
    first, state = attention(x[:, :4])
    second, state = attention(x[:, 4:], state, torch.tensor([5, 2]))
    assert torch.allclose(torch.cat([first, second], 1)[0], whole[0])
    assert torch.allclose(second[1, :2], whole[1, 4:6])
    values = attention.v_proj(x).cumsum(1) / torch.arange(1, 10)[:, None]
    assert torch.allclose(whole, attention.out_proj(values))


@pytest.mark.parametrize("name", sorted(set(re.findall(r"configs/(\w+)\.yaml", README))))
def test_named_configurations_exist(name: str):
    assert (Path(__file__).parent.parent / "configs" / f"{name}.yaml").is_file()
