import pytest

from benchmarks import __main__ as command


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("steps --device cuda:99", "cuda:99 does not exist"),
        ("steps --device gpu", "gpu is not a device"),
        ("steps --lengths 2", "2 is less than 3"),
        ("kernels --repeats many", "invalid integer value: 'many'"),
    ],
)
def test_what_can_not_be_measured_is_refused(words, complaint, capsys):
    with pytest.raises(SystemExit):
        command.main(words.split())
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("words", ["scaling", ""])
def test_missing_matplotlib_is_said_before_anything_runs(words, monkeypatch, capsys, tmp_path):
    ran = []
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    monkeypatch.setattr(command, "_run", ran.append)
    with pytest.raises(SystemExit):
        command.main([*words.split(), "--output", str(tmp_path)])
    assert "pip install 'lit-effattn[bench]'" in capsys.readouterr().err
    assert ran == []
