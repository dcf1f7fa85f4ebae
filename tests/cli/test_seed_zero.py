"""Every shipped configuration draws the same parameters from seed 0 as when `tests/seed_zero.json` was written."""

import json
from pathlib import Path

import pytest

from tests.cli.test_command import CONFIGS
from tests.seed_zero import STORED, as_stored, drawn

KEPT = json.loads(STORED.read_text(encoding="utf-8"))
SHORT = (
    "copy_lsh1",
    "digits_classes_linear",
    "digits_performer",
    "g2p_linear",
    "photos_smoke",
    "sorting_small_sticky",
    "timit_bilstm",
)
"""Of each task one, small; with hashes, random features, a decoder, a long-term memory, a recurrence."""


def test_every_configuration_has_its_entry():
    assert KEPT.keys() - {"machine"} == {config.stem for config in CONFIGS}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "config",
    [pytest.param(c, id=c.stem, marks=[] if c.stem in SHORT else pytest.mark.exhaustive) for c in CONFIGS],
)
def test_parameters_are_drawn_as_before(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    found, kept = drawn(config), dict(KEPT[config.stem])
    assert found.pop("names") == kept.pop("names")
    assert found.pop("sum") == pytest.approx(kept.pop("sum"), rel=1e-6 if as_stored() else 1e-3)
    if as_stored():
        assert found == kept
