"""Building the data module that the user's own words describe."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.cli import LightningArgumentParser

from lit_effattn.settings.building import Builder
from lit_effattn.settings.texts import keep_texts


def build_data(spec: Any) -> pl.LightningDataModule:
    """Return the data module of a spec, `{"class_path": …, "init_args": …}`, or of a parsed one.

    Raises:
        ValueError: If an option is invalid.
    """
    parser = LightningArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(pl.LightningDataModule, "data", required=True)
    keep_texts(parser)
    builder = Builder(lambda kind, *args, **kwargs: kind(*args, **kwargs))
    parser.add_instantiator(builder, object)
    with builder.errors():
        data: pl.LightningDataModule = parser.instantiate_classes(parser.parse_object({"data": spec})).data
    return data
