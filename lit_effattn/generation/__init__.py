"""Generation: sampling, for many prompts too, and beam search."""

from lit_effattn.generation.beam import beam_search, check_beam
from lit_effattn.generation.sampling import Kept, Sampling, draw, generate, generate_each

__all__ = [
    "Kept",
    "Sampling",
    "beam_search",
    "check_beam",
    "draw",
    "generate",
    "generate_each",
]
