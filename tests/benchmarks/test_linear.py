import argparse
import json
from types import SimpleNamespace

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import linear
from lit_effattn.ops.favor.dispatch import positive_favor
from lit_effattn.ops.favor.pytorch import log_positive_features
from lit_effattn.ops.linear.dispatch import elu_linear_attention

N = 33
FORMS = ["kernels, highest", "kernels, medium", "plain", "performer, kernels, highest", "performer, plain", "softmax"]
FORMS += ["flash-linear-attention"]


def test_without_a_gpu_nothing_is_measured_and_the_table_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(linear, "import_module", absent)
    command.main(["linear", "--lengths", "16", "8", "--device", "cpu", "--output", str(tmp_path)])
    rows = json.loads((tmp_path / "linear.json").read_text(encoding="utf-8"))["rows"]
    expected = [(n, title, form) for n in (8, 16) for title in linear.PASSES for form in FORMS]
    assert [(row["N"], row["pass"], row["form"]) for row in rows] == expected
    assert all(value is None for row in rows for value in list(row.values())[3:])
    said = capsys.readouterr().out
    assert "Not measured: the device is cpu" in said
    assert "pip install 'flash-linear-attention>=0.5.1'" in said


def absent(name):
    raise ImportError(name)


def chunk_linear_attn(q, k, v, scale, normalize):
    """What the library does of (B, N, H, D), by its definition."""
    assert normalize
    weights = scale * torch.einsum("bnhd,bmhd->bhnm", q, k).tril()
    return torch.einsum("bhnm,bmhd->bnhd", weights / (weights.sum(-1, keepdim=True) + 1e-10), v), None


@pytest.fixture
def inputs():
    return [torch.randn(2, N, 3, 8).transpose(1, 2).requires_grad_() for _ in range(3)]


def test_the_forms_compute_the_same(inputs):
    zeros = torch.zeros(2, 3, 8, 8), torch.zeros(2, 3, 8)
    phi_q, phi_k = (torch.where(x > 0, x + 1, x.exp()) for x in inputs[:2])
    weights = (phi_q @ phi_k.mT).tril()
    expected = weights @ inputs[2] / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(linear.plain(*inputs), expected)
    torch.testing.assert_close(linear.peer(SimpleNamespace(chunk_linear_attn=chunk_linear_attn), *inputs), expected)
    assert [t.shape for t in linear._nothing(*inputs[1:])] == [t.shape for t in zeros]
    assert linear.elu_linear_attention is elu_linear_attention


def test_performers_forms_compute_the_same(inputs):
    omega = linear._omega(inputs[1])
    assert omega.shape == (3, linear.N_FEATURES, 8)
    log_q, log_k = (log_positive_features(t * 8**-0.25, omega) for t in inputs[:2])
    weights = (log_q.exp() @ log_k.exp().mT).tril()
    expected = weights @ inputs[2] / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(linear.performer_plain(*inputs), expected)
    assert linear.positive_favor is positive_favor


def test_each_form_is_measured_and_compared(monkeypatch):
    """As on a GPU, of forms that the CPU has: one of them wrong by half."""
    parser = argparse.ArgumentParser()
    linear.add_arguments(parser)
    args = parser.parse_args(f"--lengths {N} --tokens 70 --n_heads 2 --head_dim 8 --repeats 2 --calls 3".split())
    args.device = torch.device("cpu")
    set_to = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", set_to.append)
    monkeypatch.setattr(linear, "kernels", lambda q, k, v: 1.5 * linear.plain(q, k, v))
    monkeypatch.setattr(linear, "performer_kernels", lambda q, k, v: 1.5 * linear.performer_plain(q, k, v))
    monkeypatch.setattr(linear, "import_module", lambda name: SimpleNamespace(chunk_linear_attn=chunk_linear_attn))
    forms, notes = linear._forms(args.precisions)
    rows = linear._measured(N, forms, args)
    assert notes == []
    assert [(row["pass"], row["form"]) for row in rows] == [(title, form) for title in linear.PASSES for form in FORMS]
    assert {"highest", "medium"} <= set(set_to)
    assert set_to[-1] == "highest"  # as it was before
    for row in rows:
        assert len(row["ms"].samples) == 2
        assert row["peak, MiB"] > 0
        wrong = "kernels" in row["form"]
        assert row["difference"] == ("—" if row["form"] == "softmax" else pytest.approx(0.5 * wrong, abs=0.02))
    assert rows[0]["time ÷ kernels, highest's"].samples == (1.0, 1.0)
