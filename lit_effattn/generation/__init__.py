"""Generation: sampling and beam search."""

from lit_effattn.generation.beam import beam_search, check_beam
from lit_effattn.generation.sampling import Kept, Sampling, draw, generate

__all__ = ["Kept", "Sampling", "beam_search", "check_beam", "draw", "generate"]
