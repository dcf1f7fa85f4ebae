"""`python -m lit_effattn.laws my_module:MyAttention`."""

from lit_effattn.laws.command import main

if __name__ == "__main__":
    main()
