"""`python -m lit_effattn.cli`: the command, if it is not on the PATH."""

import sys

if __name__ == "__main__":  # not in a process that multiprocessing starts
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # this file's folder or the current one, whose modules would hide installed ones
    from lit_effattn.cli import main

    main()
