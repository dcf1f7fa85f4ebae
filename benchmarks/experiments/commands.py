"""The command `lit-effattn`, run as a user runs it, and the scores that it prints."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys


def command(*args: str) -> str:
    """Run the command with its progress shown, and return what it prints."""
    print(f"$ lit-effattn {shlex.join(args)}", file=sys.stderr, flush=True)
    done = subprocess.run([sys.executable, "-m", "lit_effattn.cli", *args], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"lit-effattn {args[0]} failed, see above")
    return done.stdout


def scores(printed: str) -> dict[str, str]:
    """Return the scores in lines such as `test bits/dim: 1.8022` and `test PER: 9.38 %`; counts are no scores."""
    return dict(re.findall(r"^test (\S+): (\d+\.\d+(?: %)?)$", printed, re.M))
