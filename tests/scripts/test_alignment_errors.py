import json
from pathlib import Path

import numpy as np
import pytest

from lit_effattn.datamodules.speech.festvox import Segment
from scripts.alignment_errors import main, match
from tests.datamodules.speech.test_festvox import voice


def test_matched_phones_and_their_errors():
    """Of a b c, b is missed and x is inserted: a and c match."""
    true = [Segment("pau", 0, 1), Segment("a", 1, 1.2), Segment("b", 1.2, 1.4), Segment("c", 1.4, 2)]
    recognised = [Segment("a", 1.1, 1.2), Segment("x", 1.3, 1.4), Segment("pau", 1.4, 1.5), Segment("c", 2.1, 2.2)]
    matched = match(recognised, true)
    np.testing.assert_allclose(matched.errors, [[0.1, 0.05, 0.0], [0.7, 0.45, 0.2]])
    assert matched.inside.tolist() == [True, False]
    assert matched.n_true == 3


def test_the_table_of_a_voice(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Of k .3-.4, ay .4-.55, k .8-.9, the times are 40 ms late, and 140 once: the shift is 40, the rest 0, 0, 100."""
    voice(tmp_path / "nsh")
    phones = [("k", 0.34, 0.44), ("ay", 0.44, 0.59), ("k", 0.94, 1.04)]
    entry = {"id": "ru_0004", "phones": [{"phone": p, "start": start, "end": end} for p, start, end in phones]}
    path = tmp_path / "transcripts.jsonl"
    path.write_text(json.dumps(entry))
    main([str(path), str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "3 of 3 phones matched; the middle of 66.7% lies within the true phone"
    assert [line.split("|")[2:5] for line in lines[3:]] == [[" +40 ", " 73 ", " 120 "]] * 3
    assert [line.split("|")[5:7] for line in lines[3:]] == [[" 33 ", " 80 "]] * 3


def test_nothing_matches(tmp_path: Path):
    voice(tmp_path / "nsh")
    path = tmp_path / "transcripts.jsonl"
    path.write_text(json.dumps({"id": "ru_0004", "phones": []}))
    with pytest.raises(ValueError, match="no recognised phone matches a true one"):
        main([str(path), str(tmp_path)])
