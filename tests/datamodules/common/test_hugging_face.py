import pytest

from lit_effattn.datamodules.common import hugging_face
from tests.datamodules.hugging_face import fake_datasets


@pytest.mark.parametrize("path", ["pandas", "csv", "hf://buckets/x", "https://a.b/c", "a/b/c", "../x", "none"])
def test_builders_and_addresses_are_refused(path, monkeypatch):
    fake_datasets(monkeypatch)
    with pytest.raises(ValueError, match=r"path=.* is neither a data set's name, such as .*, nor a folder"):
        hugging_face.load("x", path, None)


def test_a_folder_named_as_a_builder_is_read_as_a_folder(tmp_path, monkeypatch):
    """`datasets` takes the name itself for its builder, which unpickles files."""
    monkeypatch.chdir(tmp_path)
    fake_datasets(monkeypatch)
    (tmp_path / "pandas").mkdir()
    asked = []
    monkeypatch.setattr("datasets.load_dataset", lambda path, subset, **more: asked.append((path, more)))
    hugging_face.load("x", "pandas", None)
    monkeypatch.setattr("datasets.__version__", "3.6.0")
    hugging_face.load("x", "pandas", None)
    hugging_face.load("x", "owner/name", None)
    here = str(tmp_path / "pandas")
    assert asked == [(here, {}), (here, {"trust_remote_code": False}), ("owner/name", asked[1][1])]
    (tmp_path / "pandas" / "README.md").write_text("---\nconfigs:\n- data_files:\n  - path: http://a.b/c\n---\n")
    with pytest.raises(ValueError, match=r"README\.md: its data_files name addresses"):
        hugging_face.load("x", "pandas", None)
