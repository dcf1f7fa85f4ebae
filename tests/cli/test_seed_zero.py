"""Every shipped configuration draws the same parameters from seed 0 as when `tests/seed_zero.json` was written."""

import json
from pathlib import Path

import pytest

from tests.seed_zero import RUNS, STORED, as_stored, drawn

KEPT = json.loads(STORED.read_text(encoding="utf-8"))
SHORT = (
    "copy_lsh4",
    "digits_performer",
    "g2p_linear",
    "sorting_small_sticky",
    "timit_bilstm",
)
"""Of each task one, small; with hashes, random features, a decoder, a long-term memory, a recurrence."""


def test_every_configuration_has_its_entry():
    assert KEPT.keys() - {"machine"} == RUNS.keys()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SHORT else pytest.mark.exhaustive) for name in RUNS]
)
def test_parameters_are_drawn_as_before(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    result, kept = drawn(*RUNS[name]), dict(KEPT[name])
    assert result.pop("names") == kept.pop("names")
    assert result.pop("sum") == pytest.approx(kept.pop("sum"), rel=1e-3)
    if as_stored():
        assert result == kept
