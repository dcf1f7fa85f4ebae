import pickle

import numpy as np

from lit_effattn.datamodules.text.documents import Documents, MappedTokens


def test_slices_of_documents_in_any_order(tmp_path):
    """Files with 7, 0 and 5 tokens; every slice equals that of the documents' tokens, written one after the other."""
    np.arange(7, dtype=np.uint16).tofile(tmp_path / "a")
    np.arange(7, 12, dtype=np.uint16).tofile(tmp_path / "c")
    (tmp_path / "b").touch()
    tokens = MappedTokens([tmp_path / name for name in "abc"], [7, 0, 5], np.dtype(np.uint16))
    assert len(tokens) == 12
    documents = Documents(tokens, np.array([0, 3, 7, 8]), np.array([3, 4, 1, 4])).reordered(np.array([3, 0, 2, 1]))
    expected = [8, 9, 10, 11, 0, 1, 2, 7, 3, 4, 5, 6]
    assert documents.borders.tolist() == [0, 4, 7, 8, 12]
    for begin in range(12):
        for end in range(begin + 1, 13):
            assert documents[begin:end].tolist() == expected[begin:end]
    assert documents._tokens._opened
    sent = pickle.loads(pickle.dumps(documents))  # the names of the files, not their contents
    assert not sent._tokens._opened
    assert sent[2:9].tolist() == expected[2:9]


def test_neighbours_in_one_file_are_read_in_one_piece(tmp_path):
    """Ten documents of 3 tokens in each of two files: no slice crosses a file, and each file is sliced once."""
    np.arange(30, dtype=np.uint16).tofile(tmp_path / "a")
    np.arange(30, 60, dtype=np.uint16).tofile(tmp_path / "b")
    slices = []

    class Recorded(MappedTokens):
        def __getitem__(self, part):
            slices.append((part.start, part.stop))
            return super().__getitem__(part)

    tokens = Recorded([tmp_path / "a", tmp_path / "b"], [30, 30], np.dtype(np.uint16))
    documents = Documents(tokens, np.arange(0, 60, 3), np.full(20, 3))
    assert documents[2:47].tolist() == list(range(2, 47))
    assert slices == [(2, 30), (30, 47)]
    assert documents.reordered(np.arange(19, -1, -1))[0:6].tolist() == [57, 58, 59, 54, 55, 56]
