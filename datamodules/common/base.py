"""Base class of the data modules, whose samplers form the batches."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset

from lit_effattn.checks import at_least
from lit_effattn.datamodules.common.sampling import BatchSampler, ResumableLoader, loader_options


class DataModule(LightningDataModule, ABC):
    """A data module whose loaders are made of the items and the sampler that `_batches` returns.

    Training resumes an interrupted epoch with the next batch. Prediction uses the test split.

    Args:
        num_workers: Worker processes that load data; 0: none.
        seed: Seed of the order of the training items.

    Attributes:
        takes_inputs: The option for what `lit-effattn predict INPUT ...` is given; None if there is none.
    """

    takes_inputs: ClassVar[str | None] = None
    _loader: ClassVar[type[ResumableLoader]] = ResumableLoader  # of the training items

    def __init__(self, num_workers: int, seed: int = 0) -> None:
        super().__init__()
        at_least(0, num_workers=num_workers, seed=seed)
        self.num_workers = num_workers
        self.seed = seed

    @classmethod
    def load_from_checkpoint(cls, *args: Any, **kwargs: Any) -> Any:
        """Not supported: Lightning would build the classes that a file names, whatever they are."""
        raise NotImplementedError(
            f"{cls.__name__}.load_from_checkpoint would build any class that the file names: make the data module with "
            "its arguments, and give it the file's state with load_state_dict"
        )

    @abstractmethod
    def _batches(self, split: str, training: bool) -> tuple[Dataset[Any], BatchSampler]:
        """Return the items of "train", "val", "test" or "predict", and a sampler of their batches.

        In training it draws another order every epoch. Otherwise it returns every item once.
        """

    def train_dataloader(self) -> ResumableLoader:
        """Return a loader of the training items, in other batches each epoch unless their order is fixed."""
        items, sampler = self._batches("train", training=True)
        return self._loader(items, sampler=sampler, **loader_options(self.num_workers))

    def val_dataloader(self) -> DataLoader[Any]:
        """Return a loader of every validation item once."""
        return self._evaluation("val")

    def test_dataloader(self) -> DataLoader[Any]:
        """Return a loader of every test item once."""
        return self._evaluation("test")

    def predict_dataloader(self) -> DataLoader[Any]:
        """Return a loader of every item to predict once: the test items, unless others were given."""
        return self._evaluation("test")

    def _evaluation(self, split: str) -> DataLoader[Any]:
        items, sampler = self._batches(split, training=False)
        return DataLoader(items, sampler=sampler, **loader_options(self.num_workers))
