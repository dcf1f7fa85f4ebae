"""`python -m lit_effattn.cli`: the command, if it is not on the PATH."""

from lit_effattn.cli import main

main()
