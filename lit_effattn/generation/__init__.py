"""Generation: sampling and beam search."""

from lit_effattn.generation.beam import beam_search, check_beam
from lit_effattn.generation.sampling import Sampling, check_sampling, draw, generate

__all__ = ["Sampling", "beam_search", "check_beam", "check_sampling", "draw", "generate"]
