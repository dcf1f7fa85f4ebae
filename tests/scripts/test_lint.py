"""Every check of `make lint` finds a fault that is planted in the repository's texts."""

import json

from scripts import lint

FORMS = '''def rest_of(x):
    """What is left of x.

    Raises:
        ValueError: x is dear.

    Example:
        >>> x
    """
    raise ValueError(f"{x} is no number, and 'stands for' one")  # a list is dealt over the layers
'''
IMPORTS = """import lit_effattn.attention.reference
import lit_effattn.ops.bad_circle
import rich
import triton


def late():
    FROM callbacks import MemoryCarry
    import transformers
"""
PAGE = """# A page

[gone](gone.md) and [no heading](#a-heading), [this page](#a-page); `tests/gone.py`, `make coffee`, `make lint`.
It stands for `x is no y`: `digits_{linear,cubic}`, --config counting, --config digits_linear, configs/none.yaml
`pip install lit-effattn[g2p,plots]`

```
x is no y
```

```py
print(1)
```
"""


def test_every_check_finds_a_planted_fault(monkeypatch):
    monkeypatch.setattr(lint, "ROOMS", {**lint.ROOMS, "attic": {"cellar"}, "cellar": {"attic"}})
    texts = lint.Repository().texts
    readme, notebook = texts["README.md"], json.loads(texts["docs/tutorial.ipynb"])
    (first, *_) = (cell for cell in notebook["cells"] if cell["cell_type"] == "code")
    first["execution_count"], first["outputs"] = 99, [{"text": "/home/somebody"}]
    planted = {
        "datamodules/bad.py": FORMS,
        "lit_effattn/ops/bad.py": IMPORTS.replace("FROM", "from"),
        "lit_effattn/ops/bad_circle.py": "import lit_effattn.ops.bad\n",
        "datamodules/images/bad.py": "import lit_effattn.datamodules.text\n",
        "lit_effattn/nowhere/bad.py": "",
        "lit_effattn/attention/reference.py": "from lit_effattn.ops import linear\n",
        "docs/bad.md": PAGE,
        "configs/bad.yaml": "",
        "README.md": readme.replace("lit-effattn fit", "lit-effattn sweep") + "word " * 1000,
        "docs/tutorial.ipynb": json.dumps(notebook),
    }
    messages = lint.problems(lint.Repository(planted))
    places = [message.partition(": ")[0] for message in messages]
    expected = {
        "datamodules/bad.py:2": 3,  # its opening, its section, an entry of Raises
        "datamodules/bad.py:5": 1,
        "datamodules/bad.py:10": 3,
        "lit_effattn/attention/reference.py:1": 1,
        "lit_effattn/ops/bad.py:1": 3,  # another room, the definitions, and a circle
        "lit_effattn/ops/bad.py:3": 1,
        "lit_effattn/ops/bad.py:4": 1,
        "lit_effattn/ops/bad.py:8": 1,
        "datamodules/images/bad.py:1": 1,
        "lit_effattn/nowhere/bad.py:1": 1,
        "docs/bad.md:3": 4,
        "docs/bad.md:4": 3,
        "docs/bad.md:5": 1,
        "docs/bad.md:11": 1,
        "docs/configurations.md:1": 1,
        "README.md:1": 2,
        "docs/tutorial.ipynb:1": 2,
        "scripts/lint.py:1": 3,  # two rooms that do not exist, and their circle
    }
    assert {place: places.count(place) for place in dict.fromkeys(places)} == expected, "\n".join(messages)
