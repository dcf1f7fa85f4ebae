"""`make test-machines`: the tests of numbers as other processors would run them; a table, a line a setting.

A setting is one value of each of `FACTORS`. They are not multiplied: each pair of values is in one setting at least.
What the processor lacks is left out, and said. `TORCH_OLD` names the interpreter of an environment with the oldest
supported torch; make one with

    python -m venv build/oldest && build/oldest/bin/pip install 'torch==2.11.*' 'numpy<2.4' --editable '.[dev]'

The interpreter of its Triton, 3.6, does not run with numpy 2.4.

`python -m tests.machines 3 4` runs the settings of these numbers alone; the table's lines are those of all settings,
counted from 0.

Logs and the names of failed tests are in build/machines/.
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

from tests.support.cases import pairwise

FOLDERS = (
    "ops",
    "attention",
    "nn",
    "laws",
    "generation",
    "interchange/test_config_keys.py",
    "tasks",
    "test_sequence.py",
)
WITHOUT = ("ops/test_triton_kernels.py", "ops/runtime", "laws/test_command.py", "tasks/test_responses.py")
"""Triton's interpreter computes in numpy; the others compute next to nothing."""
LEVELS = ["default", "avx2", "avx512"]
INSTRUCTIONS = dict(zip(LEVELS, ("SSE4_2", "AVX2", "AVX512"), strict=True))
ONEDNN = {"default": "SSE41", "avx2": "AVX2"}
"""PyTorch asks oneDNN whether there is AMX, and then needs AVX-512: no processor has the one without the other."""
FACTORS = ("ATen", "MKL", "threads", "compiler", "torch")
LOGS = Path("build/machines")


def asked(python: str, expression: str) -> str:
    """Return the value of an expression of torch in a process without settings."""
    command = [python, "-c", f"import torch; print({expression})"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def values() -> dict[str, list[str]]:
    """Return the values of each of `FACTORS` that this machine has; say which are left out."""
    capability = asked(sys.executable, "torch.backends.cpu.get_cpu_capability()").lower()
    levels = LEVELS[: LEVELS.index(capability) + 1] if capability in LEVELS else LEVELS[:1]
    for level in LEVELS[len(levels) :]:
        print(f"left out: {level}, which the processor lacks")
    mkl = [INSTRUCTIONS[level] for level in levels]
    if asked(sys.executable, "torch.backends.mkl.is_available()") != "True":
        print("left out: MKL_ENABLE_INSTRUCTIONS, because this torch has no MKL")
        mkl = ["-"]
    torches = list(filter(None, (sys.executable, os.environ.get("TORCH_OLD"))))
    if len(torches) == 1:
        print("left out: the oldest torch; name its interpreter in TORCH_OLD (see tests/machines.py)")
    return dict(zip(FACTORS, (levels, mkl, ["1", "2", "3"], ["with", "without"], torches), strict=True))


def run(number: int, setting: tuple[str, ...]) -> tuple[str, list[str]]:
    """Run the tests under a setting; return the table's columns and the failed tests."""
    level, mkl, threads, compiler, python = setting
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": level, "TEST_THREADS": threads, "OMP_NUM_THREADS": threads}
    environment |= {"OMP_WAIT_POLICY": "passive"}  # two processes have more threads than two cores
    environment |= {} if mkl == "-" else {"MKL_ENABLE_INSTRUCTIONS": mkl}
    environment |= {"ONEDNN_MAX_CPU_ISA": ONEDNN[level]} if level in ONEDNN else {}
    environment |= {"CXX": "no-compiler"} if compiler == "without" else {}
    marks = "not exhaustive and not processes and not slow"
    command = [python, "-m", "pytest", "-n", "2", "-q", "-p", "no:cacheprovider", "-m", marks]
    command += [f"--ignore=tests/{name}" for name in WITHOUT]
    start = time.monotonic()
    with (LOGS / f"{number}.log").open("w") as log:
        code = subprocess.run(
            [*command, *(f"tests/{name}" for name in FOLDERS)], env=environment, stdout=log, stderr=log, check=False
        ).returncode
    text = (LOGS / f"{number}.log").read_text()
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
    if code and not failed:
        failed = [f"pytest ended with {code}: see {log.name}"]
    passed = re.findall(r"(\d+) passed", text)
    return f"{(passed or ['0'])[-1]} | {len(failed)} | {time.monotonic() - start:.0f}", failed


def main() -> int:
    """Print the table; return whether any test failed."""
    LOGS.mkdir(parents=True, exist_ok=True)
    settings, failures = [tuple(setting.values()) for setting in pairwise(values())], []
    print(
        "| ATEN_CPU_CAPABILITY | MKL_ENABLE_INSTRUCTIONS | threads | C++ compiler | torch | passed | failed | seconds |"
    )
    print("|---|---|--:|---|---|--:|--:|--:|")
    chosen = [int(number) for number in sys.argv[1:]] or range(len(settings))
    for number, setting in ((number, settings[number]) for number in chosen):
        columns, failed = run(number, setting)
        version = asked(setting[-1], "torch.__version__")
        print("|", " | ".join(setting[:-1]), "|", version, "|", columns, "|", flush=True)
        failures += [f"{number}: {name}" for name in failed]
    print(*failures, sep="\n")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
