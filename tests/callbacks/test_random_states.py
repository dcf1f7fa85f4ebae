import random
import warnings
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lit_effattn.callbacks import LastCheckpoint, RandomStates
from lit_effattn.callbacks.random_states import RANDOM_STATES_KEY
from lit_effattn.distributed.sharding import ShardedStrategy
from tests.callbacks.tiny import Tiny, trainer

CPU = SimpleNamespace(device=torch.device("cpu"))


@pytest.fixture(autouse=True)
def _leave_generators_alone():
    """Other tests draw too."""
    before = random.getstate(), np.random.get_state()  # noqa: NPY002
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])  # noqa: NPY002


def one_process(rank: int = 0, world_size: int = 1, heads: int = 1) -> SimpleNamespace:
    strategy = ShardedStrategy(tensor_parallel_size=heads)
    state = SimpleNamespace(fn="fit")
    return SimpleNamespace(world_size=world_size, global_rank=rank, strategy=strategy, state=state)


def draw() -> list[float]:
    """Numbers of every generator, and of the normal ones, which keep a second number for the next time."""
    return [
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),  # noqa: NPY002
        np.random.randn(),  # noqa: NPY002
        torch.rand(()).item(),
        torch.randn(()).item(),
    ]


def seeded(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)


def through_a_file(checkpoint: dict) -> dict:
    file = BytesIO()
    torch.save(checkpoint, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_every_generator_goes_on_where_it_was():
    seeded(1)
    draw()  # leaves a second normal number behind, in Python's and NumPy's generators
    checkpoint: dict = {}
    RandomStates().on_save_checkpoint(one_process(), CPU, checkpoint)
    expected = [draw() for _ in range(3)]
    assert len({number for drawn in expected for number in drawn}) == 18

    seeded(2)
    resumed = RandomStates()
    resumed.on_load_checkpoint(one_process(), CPU, through_a_file(checkpoint))
    draw()  # whatever happens between loading and the first step changes nothing
    stopped: dict = {}
    resumed.on_save_checkpoint(one_process(), CPU, stopped)  # a signal before the first step
    resumed = RandomStates()
    resumed.on_load_checkpoint(one_process(), CPU, through_a_file(stopped))
    resumed.on_train_batch_start(one_process(), CPU)
    assert [draw() for _ in range(3)] == expected
    resumed.on_train_batch_start(one_process(), CPU)  # only once
    assert draw() not in expected


def test_saving_draws_nothing():
    seeded(3)
    expected = draw()
    seeded(3)
    RandomStates().on_save_checkpoint(one_process(), CPU, {})
    assert draw() == expected


@pytest.mark.parametrize("checkpoint", ["with states", "without", "of a test", "of an earlier run"])
def test_where_another_seed_was_asked_for_it_is_kept(checkpoint: str):
    saved: dict = {}
    RandomStates().on_save_checkpoint(one_process(), CPU, saved)
    callback, process = RandomStates(restore=checkpoint != "with states"), one_process()
    process.state.fn = "test" if checkpoint == "of a test" else "fit"
    callback.on_load_checkpoint(process, CPU, {} if checkpoint == "without" else saved)
    if checkpoint == "of an earlier run":
        callback.setup(process, CPU, "fit")
    seeded(4)
    expected = draw()
    seeded(4)
    callback.on_train_batch_start(one_process(), CPU)
    assert draw() == expected


@pytest.mark.parametrize("heads", [1, 2])
def test_every_process_gets_its_own_or_that_of_the_first_with_which_it_divides_heads(heads: int):
    states = []
    for rank in range(2):
        seeded(10 + rank)
        saved: dict = {}
        RandomStates().on_save_checkpoint(one_process(), CPU, saved)
        states += saved[RANDOM_STATES_KEY]
        if rank == 2 - heads:
            expected = draw()
    callback = RandomStates()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        callback.on_load_checkpoint(one_process(1, 2, heads), CPU, {RANDOM_STATES_KEY: states})
    callback.on_train_batch_start(one_process(1, 2), CPU)
    assert draw() == expected


def test_another_number_of_processes_is_told():
    saved_by, resumed_by = 2, 1
    saved: dict = {}
    RandomStates().on_save_checkpoint(one_process(), CPU, saved)
    callback = RandomStates()
    with pytest.warns(UserWarning, match=f"saved by {saved_by} processes and is resumed by {resumed_by}"):
        callback.on_load_checkpoint(
            one_process(0, resumed_by), CPU, {RANDOM_STATES_KEY: saved[RANDOM_STATES_KEY] * saved_by}
        )
    seeded(5)
    expected = draw()
    seeded(5)
    callback.on_train_batch_start(one_process(), CPU)
    assert draw() == expected


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_run_resumes_exactly_with_a_loader_that_draws_from_the_state(shuffle: bool, tmp_path: Path):
    """At the end of an epoch, after which its iterator draws a seed, and the order of the items."""

    def fit(folder: Path, n_epochs: int, path: Path | None = None) -> Tiny:
        torch.manual_seed(5)
        model = Tiny()
        loader = DataLoader(torch.linspace(1, 2, 4), batch_size=1, shuffle=shuffle)
        callbacks = [RandomStates(), LastCheckpoint()]
        trainer(folder, callbacks, max_epochs=n_epochs).fit(model, loader, ckpt_path=path)
        return model

    whole, part = fit(tmp_path / "whole", 3), fit(tmp_path / "part", 2)
    resumed = fit(tmp_path / "part", 3, tmp_path / "part" / "checkpoints" / "last.ckpt")
    assert part.drawn + resumed.drawn == whole.drawn
    assert torch.equal(resumed.weight, whole.weight)
