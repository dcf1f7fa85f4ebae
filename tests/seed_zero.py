"""The parameters that configurations draw from seed 0: `python -m tests.seed_zero` compares, `--write` stores them.

A configuration is instantiated at its full size, as `lit-effattn fit` does it. Three things are noted: the values of
the parameters and buffers in their order; the names in the checkpoint with shapes and types; and the state of the
random generator afterwards, from which training starts. A change that only moves code leaves them as they are.

Vectorised logarithms and cosines differ in the last bit between types of CPU, so the bits are compared only where the
file was written with the same version of torch and the same instructions. A weighted sum of all values is compared
everywhere; without vector instructions it differs by up to 5e-5.
"""

import hashlib
import json
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.cli.test_command import CONFIGS, OFFLINE, built
from tests.cli.test_every_kind import synthetic
from tests.support.variants import variants

STORED = Path(__file__).parent / "seed_zero.json"
NOT_BIT_STABLE = "omega"
"""Performer's random features: their QR decomposition differs between versions of BLAS. In the sum alone."""
LIMITED = ("--data.vocab_size", "300")
"""Vocabulary of the data sets that are not available; adaptive embeddings need that of their cutoffs."""
RUNS: dict[str, tuple[Path, list[str]]] = {**{config.stem: (config, []) for config in CONFIGS}, **variants()}
"""The file of every shipped configuration and of every variant, and its flags."""


def machine() -> dict[str, str]:
    """Return the version and the CPU that determine the bits of random numbers."""
    return {"torch": torch.__version__.partition("+")[0], "cpu": torch.backends.cpu.get_cpu_capability()}


def as_stored() -> bool:
    """Return whether bits can be compared: the stored ones were computed with the same torch and instructions."""
    return bool(machine() == json.loads(STORED.read_text(encoding="utf-8"))["machine"])


def drawn(config: Path, flags: list[str]) -> dict[str, Any]:
    """Instantiate a configuration, and return hashes of its parameters.

    Data that need no file are the configuration's own; for all other, synthetic data of the same kind take their place.
    """
    words = ["--seed_everything", "0", "--trainer.accelerator", "cpu", "--trainer.devices", "1"]
    if not config.stem.startswith(OFFLINE):
        words += [*synthetic(config), *(() if "cutoffs" in config.read_text() else LIMITED)]
    model = built(config, *flags, *words, device="cpu").model
    generator = _hash(torch.get_rng_state())
    values = [*model.named_parameters(), *model.named_buffers()]
    bits = hashlib.sha256()
    total = torch.zeros((), dtype=torch.float64)
    for k, (name, value) in enumerate(values):
        total += math.cos(k + 1) * weighted_sum(value.detach())
        if not name.endswith(NOT_BIT_STABLE):
            bits.update(value.detach().contiguous().numpy().tobytes())
    names = [(name, tuple(value.shape), str(value.dtype)) for name, value in model.state_dict().items()]
    return {
        "values": bits.hexdigest()[:16],
        "names": hashlib.sha256(repr(names).encode()).hexdigest()[:16],
        "generator": generator,
        "sum": float(f"{total.item():.9g}"),
    }


def _hash(value: torch.Tensor) -> str:
    return hashlib.sha256(value.numpy().tobytes()).hexdigest()[:16]


def weighted_sum(value: torch.Tensor) -> torch.Tensor:
    """Return Σ_j j/n x_j over the n values: every change of order changes it."""
    flat = value.double().flatten()
    return flat @ torch.arange(1, flat.numel() + 1, dtype=torch.float64) / max(flat.numel(), 1)


def main() -> int:
    """Print the differences from the stored file, or write it; return the exit status."""
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()
    os.chdir(os.environ["XDG_CACHE_HOME"])
    new = {name: drawn(*run) for name, run in sorted(RUNS.items())}
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    if "--write" in sys.argv:
        # Other tests compare bits on the stored machine. It stays if this one draws the same.
        is_same = all(new.get(name, entry) == entry for name, entry in stored.items() if name != "machine")
        entries = {"machine": stored["machine"] if is_same else machine(), **new}
        lines = [f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items()]
        STORED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        return 0
    wrong = [name for name in new.keys() | stored.keys() - {"machine"} if new.get(name) != stored.get(name)]
    for name in sorted(wrong):
        print(name, stored.get(name), new.get(name), sep="\n  ")
    print(f"{len(new) - len(wrong)} of {len(new)} configurations draw the same; stored with {stored['machine']}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
