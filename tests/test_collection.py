"""The check of the tests' ids finds ids that differ from process to process."""

import pytest

from tests.collection import collect, main

pytestmark = pytest.mark.processes
HEAD = "import datetime, gzip, os, pathlib\n\nimport pytest\n\nHERE = pathlib.Path(__file__).parent\n"
DIFFERENT = {
    "clock": "[gzip.compress(b'a')]",
    "date": "[str(datetime.datetime.now().date())]",
    "iterdir": "[path.name for path in HERE.iterdir()]",
    "glob": "[path.name for path in HERE.glob('*.txt')]",
    "set": "{str(i) for i in range(9)}",
    "address": "[str(object())]",
    "folder": "[os.getcwd()]",
}


def case(name: str, ids: str) -> str:
    return f"\n\n@pytest.mark.parametrize('case', {ids})\ndef test_{name}(case):\n    pass\n"


def test_ids_that_differ_are_found(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").touch()
    cases = {**DIFFERENT, "sorted": "sorted(path.name for path in HERE.iterdir())"}
    (tmp_path / "test_it.py").write_text(HEAD + "".join(case(*item) for item in cases.items()))
    _, different = collect(tmp_path)
    assert {pair[0].partition("::test_")[2].partition("[")[0] for pair in different} == {*DIFFERENT}
    assert main(tmp_path) == 1


@pytest.mark.parametrize(("code", "status"), [(case("it", "'ab'"), 0), ("", 1), (case("it", "[1 / 0]"), 1)])
def test_equal_ids_pass_and_no_test_or_an_error_fails(code, status, tmp_path, capsys):
    (tmp_path / "test_it.py").write_text(HEAD + code)
    assert main(tmp_path) == status, capsys.readouterr().out
