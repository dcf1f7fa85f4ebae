"""The cache of prefixes, beside a dictionary of all prefixes."""

import random

import pytest
import torch

from lit_effattn.generation import PrefixCache
from lit_effattn.generation.prefixes import Tokens, shared, stops
from lit_effattn.sequence import CALL_COST


def test_the_longest_prefix_and_the_least_recently_used():
    """Random sequences of two tokens; a dictionary in the order of use is the definition."""
    draw, cache, known = random.Random(0), PrefixCache(40), dict[Tokens, int]()
    hits = 0
    for number in range(3000):
        tokens = tuple(draw.randrange(2) for _ in range(draw.randint(1, 7)))
        if draw.random() < 0.5:
            size = draw.randint(1, 3)  # of 8 bytes each
            cache.add(tokens, torch.full((size,), number))
            known.pop(tokens, None)
            known[tokens] = number * 10 + size
            while sum(value % 10 for value in known.values()) > 5:
                known.pop(next(iter(known)))
        else:
            n, state = cache.longest(tokens)
            prefixes = [tokens[:i] for i in range(len(tokens), 0, -1) if tokens[:i] in known]
            assert n == len(prefixes[0] if prefixes else ())
            if prefixes:
                value = known[prefixes[0]] = known.pop(prefixes[0])
                assert state.tolist() == [value // 10] * (value % 10)
                hits += 1
            else:
                assert state is None
        assert cache.nbytes == 8 * sum(value % 10 for value in known.values()) <= 40
    assert hits > 100
    for token in range(2, 8):  # others push all out, and the trie does not keep their nodes
        cache.add((token,), torch.zeros(5, dtype=torch.long))
    assert [*cache._root.children] == [7]
    assert not cache._root.children[7].children


def test_a_state_larger_than_the_cache_is_not_kept():
    cache = PrefixCache(15)
    cache.add((1,), torch.zeros(1, dtype=torch.long))
    cache.add((1, 2), torch.zeros(2, dtype=torch.long))
    assert cache.longest((1, 2, 3))[0] == 1
    with pytest.raises(ValueError, match="max_bytes=-1"):
        PrefixCache(-1)


def test_stops_are_where_prompts_part_if_that_saves_a_call():
    long, longer = (0,) * CALL_COST, (0,) * 2 * CALL_COST
    assert stops([]) == []
    assert stops([(1, 2, 3)]) == [[]]
    assert stops([(*long, 1), (*long, 2)]) == [[], []]  # saves as much as it costs
    assert stops([(*long, 0, 1), (*long, 0, 2), (3,)]) == [[CALL_COST + 1], [], []]
    assert stops([long, long]) == [[], []]  # the last token is read by each
    assert stops([(*long, 0, 0)] * 3) == [[CALL_COST + 1], [], []]
    some = [(*longer, 0, 1), (*longer, 0, 2), (*long, 1), (*long, 2), (*long, 3)]
    assert stops(some) == [[CALL_COST, 2 * CALL_COST + 1], [], [], [], []]
    later = [(*long, 1), (*long, 2), *((*long, 3, *long, i) for i in range(3))]
    assert stops(later) == [[CALL_COST], [], [2 * CALL_COST + 1], [], []]


def test_shared_tokens():
    assert [shared(a, b) for a, b in (((), (1,)), ((1, 2), (1, 3)), ((1, 2), (1, 2, 3)), ((2,), (1,)))] == [0, 1, 2, 0]
