"""Tokens in place of the strings of a checkpoint."""

from pathlib import Path

import pytest
import yaml

from lit_effattn.checkpoints.allowlist import Trust, listed, listed_names
from lit_effattn.settings.sealed import Sealed, _classes, _words
from lit_effattn.settings.trainer import Trainer
from tests.support.commands import REPOSITORY


def test_words_of_the_named_classes_are_kept():
    """The options of other classes have other words, which are sealed: no option could mean them."""
    sealed = Sealed(Trust())
    saved = {"class_path": "SparseAttention", "init_args": {"pattern": "strided", "name": "fixed", "path": "cmudict"}}
    closed = sealed.seal(saved)
    assert closed["class_path"] == "SparseAttention"
    assert (closed["init_args"]["pattern"], closed["init_args"]["name"]) == ("strided", "fixed")
    assert closed["init_args"]["path"] != "cmudict"
    assert sealed.open(closed) == saved


@pytest.mark.exhaustive
def test_no_configuration_has_a_word_of_a_class_that_it_does_not_name():
    every = _words({Trainer, *filter(None, map(listed, listed_names()))})
    for path in sorted(Path(REPOSITORY, "configs").glob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        kept = _words({Trainer, *_classes(yaml.safe_load(text))})
        assert {word for word in every - kept if f": {word}\n" in text} <= set(), path.name
