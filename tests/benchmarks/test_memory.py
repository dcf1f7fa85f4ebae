import pytest
import torch

from benchmarks.memory import N_TOKENS, sliding, with_memory
from benchmarks.models import Size

CPU = torch.device("cpu")
SIZE = Size(1, 2, 8)


@pytest.mark.parametrize("length", [2, 5, 9])
def test_both_see_equally_far(length):
    for reader in (with_memory(length, SIZE, 4, 1, CPU), sliding(length, SIZE, 2, CPU)):
        model = reader.model
        x = model.embedding(torch.randint(N_TOKENS, (1, 16))).detach().requires_grad_()
        y, _ = model.active_backbone(x, reader.memory)
        y[0, -1, 0].backward()
        seen = x.grad.abs().sum(2)[0]  # (1, 16, E) -> (16,)
        assert (seen[-length:] > 0).all()
        assert (seen[:-length] == 0).all()


def test_memory_is_full_before_the_clock_starts_and_every_call_reads_on():
    for reader, full, n_scored in ((with_memory(9, SIZE, 4, 3, CPU), 9, 12), (sliding(9, SIZE, 2, CPU), 8, 2)):
        assert reader.n_scored == n_scored
        for length in (full, full + n_scored, full + 2 * n_scored):
            assert int(reader.memory.length) == length
            reader()


@torch.no_grad()
def test_sliding_reads_whole_windows():
    reader = sliding(6, SIZE, 2, CPU)
    model, (batch,) = reader.model, reader.batches
    x = torch.cat([reader.memory.inputs, model.embedding(batch.inputs)], 1)  # (1, 5 + 2, E)
    nll = model(batch, reader.memory)
    for i in range(2):
        hidden, _ = model.backbone(x[:, i : i + 6])
        torch.testing.assert_close(nll[:, i], model.head.nll(hidden[:, -1], batch.targets[:, i]))
