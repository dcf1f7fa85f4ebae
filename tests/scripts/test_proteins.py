"""The splits of proteins, and their baselines."""

import math
import re
from pathlib import Path

import pytest

from lit_effattn.datamodules import TextStream
from lit_effattn.datamodules.text.records import records
from scripts.proteins import Protein, baseline, linked, main, split


def protein(i: int, family: str = "Uncharacterized protein", residues: bytes = b"MK") -> Protein:
    return Protein(f"tr|P{i}|N{i} {family} OS=x", residues)


def test_linked_names_are_in_one_cluster():
    clusters = linked([("a", "b"), ("c", "d"), ("e", "e"), ("b", "c"), ("f", "g")])
    of_each = {name: {other for other in clusters if clusters[other] == clusters[name]} for name in clusters}
    for name in clusters:
        assert of_each[name] == next(s for s in ({*"abcd"}, {"e"}, {*"fg"}) if name in s)


def test_clusters_and_families_are_in_one_split():
    families = [f"Protein {i} (Fragment)" if i % 2 else f"Protein {i}" for i in range(30)]
    proteins = [protein(i, families[i % 30].replace(str(i % 30), str(i % 30 // 2 * 2))) for i in range(1200)]
    clusters = linked((f"P{i}", f"P{i + 600}") for i in range(300))
    found = split(proteins, clusters, 30, 20)
    assert (len(found["test"]), len(found["val"])) == (30, 20)
    seen = [{p.accession for p in of_split} for of_split in found.values()]
    assert len(set.union(*seen)) == sum(map(len, seen))
    for i in range(300):
        assert sum(bool({f"P{i}", f"P{i + 600}"} & of_split) for of_split in seen) <= 1
    assert {p.family for p in found["families"]}.isdisjoint(p.family for p in found["train"])
    assert len({p.family for p in found["families"]}) == 15  # all of them


def test_the_baselines_count():
    train, test = [protein(0, residues=b"AAAC")], [protein(1, residues=b"AC"), protein(2, residues=b"D")]
    perplexity, accuracy = baseline(train, test, pairs=False)
    assert (perplexity, accuracy) == (pytest.approx((29**3 / (4 * 2 * 1)) ** (1 / 3)), pytest.approx(1 / 3))
    perplexity, accuracy = baseline(train, test, pairs=True)
    nats = -math.log(2 / 26) - math.log(2 / 28) - math.log(1 / 26)
    assert (perplexity, accuracy) == (pytest.approx(math.exp(nats / 3)), pytest.approx(1 / 3))


def test_the_command_writes_folders_that_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    texts = [f">{kind}|P{i}|N Protein {i % 2 and i} OS=x\nMKLV{'A' * i}\n" for i in range(60) for kind in ("tr", "sp")]
    (tmp_path / "x.fasta").write_text("".join(texts))
    (tmp_path / "pairs.tsv").write_text("P0\tP1\t0.9\nP1\tP2\t0.8\n")
    arguments = ["--similar", str(tmp_path / "pairs.tsv"), "--n_test", "5", "--n_val", "4"]
    main([str(tmp_path / "x.fasta"), str(tmp_path / "out"), *arguments])
    assert "test, pairs: perplexity" in capsys.readouterr().out
    data = TextStream("files", root=str(tmp_path / "out" / "families"), tokens="amino_acids", cache=str(tmp_path / "c"))
    data.prepare_data()
    written = {
        split: [header for _, header, _ in records(tmp_path / "out" / "all" / split / "proteins.fasta", "text")]
        for split in ("train", "val", "test")
    }
    assert [len(written[split]) for split in ("val", "test")] == [4, 5]
    assert all(header.startswith("tr|") for headers in written.values() for header in headers)
    assert not any("Protein 0" in header for header in written["train"])
    (tmp_path / "one.tsv").write_text("P0\n")
    (tmp_path / "other.tsv").write_text("tr|P0|N\ttr|P1|N\n")
    for more, message in (
        (["x", "--similar", str(tmp_path / "other.tsv"), *arguments[2:]], r"none .*, such as P0, but 'tr\|P\d\|N'"),
        (["out", *arguments], "is there already; name another folder"),
        (["few", "--n_test", "60"], r"x.fasta: 60 TrEMBL sequences .* are too few for n_test=60, n_val=500 and train"),
        (["few", "--similar", str(tmp_path / "one.tsv")], "has the line 'P0' without a TAB"),
    ):
        with pytest.raises(SystemExit):
            main([str(tmp_path / "x.fasta"), str(tmp_path / more[0]), *more[1:]])
        assert re.search(message, capsys.readouterr().err)
