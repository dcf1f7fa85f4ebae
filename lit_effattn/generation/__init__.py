"""Generation: sampling and beam search."""

from lit_effattn.generation.beam import beam_search, check_beam
from lit_effattn.generation.sampling import Sampling, draw, generate

__all__ = ["Sampling", "beam_search", "check_beam", "draw", "generate"]
