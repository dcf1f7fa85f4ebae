"""The check of the tests' ids finds ids that differ from process to process."""

import pytest

from tests.collection import main

HEAD = "import datetime, gzip, os, pathlib, time\n\nimport pytest\n\nHERE = pathlib.Path(__file__).parent\n\n"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("ids", "status"),
    [
        pytest.param("sorted(path.name for path in HERE.iterdir())", 0, id="sorted"),
        pytest.param("[]", 1, id="no test"),
        pytest.param("[gzip.compress(b'a')]", 1, id="clock in bytes"),
        pytest.param("[str(datetime.datetime.now().date())]", 1, id="date"),
        pytest.param("[path.name for path in HERE.iterdir()]", 1, id="iterdir"),
        pytest.param("[path.name for path in HERE.glob('*.txt')]", 1, id="glob"),
        pytest.param("{str(i) for i in range(9)}", 1, id="set"),
        pytest.param("[str(object())]", 1, id="address"),
        pytest.param("[os.getcwd()]", 1, id="working directory"),
        pytest.param("[1 / 0]", 1, id="error"),
    ],
)
def test_ids_that_differ_are_found(ids, status, tmp_path, capsys):
    for name in "ab":
        (tmp_path / f"{name}.txt").touch()
    case = f"@pytest.mark.parametrize('case', {ids})\ndef test_it(case):\n    pass\n" if ids != "[]" else ""
    (tmp_path / "test_it.py").write_text(HEAD + case)
    assert main(tmp_path) == status, capsys.readouterr().out
