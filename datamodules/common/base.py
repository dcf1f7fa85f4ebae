"""Base class of the data modules whose sampler forms the batches."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader


class DataModule(LightningDataModule, ABC):
    """A data module whose evaluation loaders are made by `_eval_dataloader`. Prediction uses the test split.

    Attributes:
        takes_inputs: The option for what `lit-effattn predict INPUT ...` is given; None if there is none.
    """

    takes_inputs: ClassVar[str | None] = None

    @classmethod
    def load_from_checkpoint(cls, *args: Any, **kwargs: Any) -> Any:
        """Not supported: Lightning would build the classes that a file names, whatever they are."""
        raise NotImplementedError(
            f"{cls.__name__}.load_from_checkpoint would build any class that the file names: make the data module with "
            "its arguments, and give it the file's state with load_state_dict"
        )

    @abstractmethod
    def _eval_dataloader(self, split: str) -> DataLoader[Any]:
        """Return a loader of every item of "val" or "test" once."""

    def val_dataloader(self) -> DataLoader[Any]:
        """Return a loader of every validation item once."""
        return self._eval_dataloader("val")

    def test_dataloader(self) -> DataLoader[Any]:
        """Return a loader of every test item once."""
        return self._eval_dataloader("test")

    def predict_dataloader(self) -> DataLoader[Any]:
        """Return a loader of every item to predict once: the test items, unless a file was given."""
        return self._eval_dataloader("test")
