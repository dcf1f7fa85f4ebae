"""`python -m lit_effattn.cli`: the command where it is not on the PATH."""

from lit_effattn.cli import main

main()
