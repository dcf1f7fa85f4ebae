import pytest
import torch

from lit_effattn.cli import threads


@pytest.mark.parametrize(
    ("told", "largest", "n"), [(None, 6, 1), (None, 5, 3), ("2", 6, 3)], ids=["small", "large", "told"]
)
def test_a_small_model_steps_on_one_thread(told: str | None, largest: int, n: int, monkeypatch: pytest.MonkeyPatch):
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    if told is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", told)
    monkeypatch.setattr(threads, "LARGEST", largest)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with threads.few_threads(torch.nn.Linear(2, 2)):
            assert torch.get_num_threads() == n
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
