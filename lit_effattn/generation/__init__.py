"""Generation: sampling, for many prompts too, speculative decoding and beam search."""

from lit_effattn.generation.batching import generate_each
from lit_effattn.generation.beam import beam_search, check_beam
from lit_effattn.generation.drafts import DraftModel, NGrams
from lit_effattn.generation.prefixes import PrefixCache
from lit_effattn.generation.sampling import Kept, Sampling, draw, generate
from lit_effattn.generation.speculative import speculate

__all__ = [
    "DraftModel",
    "Kept",
    "NGrams",
    "PrefixCache",
    "Sampling",
    "beam_search",
    "check_beam",
    "draw",
    "generate",
    "generate_each",
    "speculate",
]
