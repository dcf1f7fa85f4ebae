"""Splits of proteins for training, validation and test, from a FASTA file of UniProt.

    python -m scripts.proteins DB.fasta.gz data/proteins --similar pairs.tsv

Of the TrEMBL sequences (`>tr|`), 1,500 are for test and 500 for validation. With `--similar`, the pairs that
`mmseqs easy-search` writes, similar sequences are in one split, and so are those that are similar to these. 20
families, each a protein name of at least 20 training sequences, are held out as a second test, out of the distribution:
`FOLDER/families`. See docs/proteins.md.

The command also prints the perplexity and the accuracy of the baselines: the counts, plus one, of single residues, and
of pairs of neighbours, the first after `<start>`.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import NamedTuple

from lit_effattn.datamodules.text.records import records
from lit_effattn.datamodules.text.tokenizers import AminoAcidTokenizer
from scripts import documented_parser

_UNNAMED = re.compile("uncharacteri[sz]ed|predicted protein|polyprotein|hypothetical", re.IGNORECASE)
_N_FAMILIES, _LEAST = 20, 20


class Protein(NamedTuple):
    """A sequence with its header in FASTA."""

    header: str
    residues: bytes

    @property
    def accession(self) -> str:
        """The accession number: `A0A1B2` in `>tr|A0A1B2|NAME`."""
        return self.header.split("|")[1]

    @property
    def family(self) -> str:
        """The protein's name, without `(Fragment)`."""
        return re.sub(r" \(Fragments?\)", "", self.header.partition(" OS=")[0].partition(" ")[2])


def linked(pairs: Iterable[Sequence[str]]) -> dict[str, str]:
    """Return the cluster of each name, one of its members: the connected components of the pairs."""
    towards: dict[str, str] = {}

    def first(name: str) -> str:
        while (following := towards.setdefault(name, name)) != name:
            towards[name] = name = towards[following]
        return name

    for a, b in pairs:
        towards[first(a)] = first(b)
    return {name: first(name) for name in list(towards)}


def split(proteins: Sequence[Protein], clusters: dict[str, str], n_test: int, n_val: int) -> dict[str, list[Protein]]:
    """Divide proteins into train, val, test and families.

    Args:
        proteins: The proteins.
        clusters: The cluster of an accession number. A protein without one is alone.
        n_test: Number of proteins for test.
        n_val: Number of proteins for validation.
    """
    groups: dict[str, list[Protein]] = defaultdict(list)
    for protein in proteins:
        groups[clusters.get(protein.accession, protein.accession)].append(protein)
    order = list(groups.values())
    Random(0).shuffle(order)
    found: dict[str, list[Protein]] = {name: [] for name in ("test", "val", "families", "train")}
    for name, n in (("test", n_test), ("val", n_val)):
        while order and len(found[name]) < n:  # what is left of a cluster is in no split
            found[name] += order.pop(0)[: n - len(found[name])]
    counts = Counter(p.family for group in order for p in group if not _UNNAMED.search(p.family))
    large = sorted(family for family, count in counts.items() if count >= _LEAST)
    held_out = {*Random(0).sample(large, min(_N_FAMILIES, len(large)))}
    for group in order:
        of_families = [p for p in group if p.family in held_out]
        found["families" if of_families else "train"] += of_families or group
    return found


def baseline(train: Sequence[Protein], test: Sequence[Protein], *, pairs: bool) -> tuple[float, float]:
    """Return the perplexity and the accuracy of counts of residues, or of pairs of neighbours, on `test`."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    texts, of_test = (["<" + protein.residues.decode() for protein in of_split] for of_split in (train, test))
    for text in texts:
        for before, residue in pairwise(text):
            counts[before if pairs else ""][residue] += 1
    nats, correct, n = 0.0, 0, 0
    likeliest = {before: following.most_common(1)[0][0] for before, following in counts.items()}
    totals = {before: following.total() + len(AminoAcidTokenizer.LETTERS) for before, following in counts.items()}
    for text in of_test:
        for before, residue in pairwise(text):
            known = before if pairs and before in counts else "<" if pairs else ""
            nats -= math.log((counts[known][residue] + 1) / totals[known])
            correct, n = correct + (likeliest[known] == residue), n + 1
    return math.exp(nats / n), correct / n


def main(args: Sequence[str] | None = None) -> None:
    """Write the splits, as FASTA, and print their sizes."""
    parser = documented_parser(__doc__)
    parser.add_argument("source", type=Path, metavar="FASTA")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--similar", type=Path, help="Lines of two accession numbers, with TABs between columns.")
    parser.add_argument("--n_test", type=int, default=1500)
    parser.add_argument("--n_val", type=int, default=500)
    given = parser.parse_args(args)
    if (written := given.folder / "all").exists():
        parser.error(f"{written} is there already; name another folder, or delete it")
    proteins = [Protein(header, residues) for _, header, residues in records(given.source, "text")]
    trembl = [protein for protein in proteins if protein.header.startswith("tr|")]
    clusters: dict[str, str] = {}
    if given.similar is not None:
        pairs = [line.split("\t")[:2] for line in given.similar.read_text().splitlines()]
        if short := [pair for pair in pairs if len(pair) < 2]:
            parser.error(f"similar={given.similar} has the line {short[0][0]!r} without a TAB")
        clusters = linked(pairs)
        if trembl and clusters.keys().isdisjoint(protein.accession for protein in trembl):
            named, known = next(iter(clusters), ""), trembl[0].accession
            parser.error(f"similar={given.similar} names none of the TrEMBL sequences, such as {known}, but {named!r}")
    found = split(trembl, clusters, given.n_test, given.n_val)
    if not found["train"]:
        parser.error(
            f"{given.source}: {len(trembl)} TrEMBL sequences (>tr|) are too few for n_test={given.n_test}, "
            f"n_val={given.n_val} and training; use smaller numbers, or more sequences"
        )
    for name, of_split in found.items():
        path = given.folder / ("families/test" if name == "families" else f"all/{name}") / "proteins.fasta"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"".join(b">%s\n%s\n" % (p.header.encode(), p.residues) for p in of_split))
        print(f"{path}: {len(of_split):,} proteins, {sum(len(p.residues) for p in of_split):,} residues")
    for name in ("train", "val"):
        (given.folder / "families" / name).symlink_to(Path("..", "all", name))
    for name in (name for name in ("test", "families") if found[name]):
        for of_pairs in (False, True):
            perplexity, accuracy = baseline(found["train"], found[name], pairs=of_pairs)
            unit = "pairs" if of_pairs else "residues"
            print(f"{name}, {unit}: perplexity {perplexity:.3f}, accuracy {accuracy:.2%}")


if __name__ == "__main__":
    main()
