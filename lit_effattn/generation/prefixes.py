"""A cache of states after prefixes that sequences share."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

from lit_effattn.checks import at_least
from lit_effattn.sequence import CALL_COST, State, nbytes

Tokens = tuple[int, ...]


class _Node:
    """A node of a trie, reached from its parent by the tokens `edge`."""

    def __init__(self, edge: Tokens = (), parent: _Node | None = None) -> None:
        self.edge, self.parent = edge, parent
        self.children: dict[int, _Node] = {}  # by the first token of the edge
        self.state: State | None = None


class PrefixCache:
    """States after prefixes of sequences, in a trie over tokens. The least recently used state is dropped first.

    The states must be of one model. A state is never changed, so a sequence can begin at it any number of times.

    Attributes:
        max_len: The states have room for so many positions, in kinds whose state grows.
        nbytes: Bytes of the states.

    Args:
        max_bytes: Largest number of bytes of the states. 0: nothing is kept.
    """

    def __init__(self, max_bytes: int = 2**28) -> None:
        at_least(0, max_bytes=max_bytes)
        self.max_bytes, self.max_len, self.nbytes = max_bytes, 0, 0
        self._root = _Node()
        self._used: OrderedDict[_Node, int] = OrderedDict()  # bytes of each state, the latest last

    def longest(self, tokens: Tokens) -> tuple[int, State | None]:
        """Return the length of the longest prefix of `tokens` with a state, and that state of one row; 0 and None."""
        node, n, best, length = self._root, 0, self._root, 0
        while n < len(tokens) and (child := node.children.get(tokens[n])) is not None:
            if tokens[n : n + len(child.edge)] != child.edge:
                break
            node, n = child, n + len(child.edge)
            if node.state is not None:
                best, length = node, n
        if length:
            self._used.move_to_end(best)
        return length, best.state

    def add(self, tokens: Tokens, state: State) -> None:
        """Keep the state of one row after `tokens`, at least one, if it is not larger than the whole cache."""
        size = nbytes(state)
        if size > self.max_bytes:
            return
        node = self._node(tokens)
        self.nbytes += size - self._used.pop(node, 0)
        node.state, self._used[node] = state, size
        while self.nbytes > self.max_bytes:
            self._drop()

    def _node(self, tokens: Tokens) -> _Node:
        """Return the node after `tokens`, a new one if there is none."""
        node = self._root
        while tokens:
            child = node.children.get(tokens[0])
            if child is None:
                child = node.children[tokens[0]] = _Node(tokens, node)
            n = shared(tokens, child.edge)
            if n < len(child.edge):
                upper = node.children[tokens[0]] = _Node(child.edge[:n], node)
                upper.children[child.edge[n]] = child
                child.edge, child.parent, child = child.edge[n:], upper, upper
            node, tokens = child, tokens[n:]
        return node

    def _drop(self) -> None:
        node, size = self._used.popitem(last=False)
        self.nbytes -= size
        node.state = None
        while node.parent is not None and not node.children and node.state is None:
            del node.parent.children[node.edge[0]]
            node = node.parent


def stops(ordered: Sequence[Tokens]) -> list[list[int]]:
    """Return where to keep the state while reading each of some prompts in lexical order, for those that follow.

    A state is kept if the positions that it saves are more than a call costs: those since the state before, once for
    each later prompt that has them too.
    """
    common = [*(shared(a, b) for a, b in pairwise(ordered)), 0]  # tokens of each that the next one shares
    result, kept = [], list[int]()  # lengths of the prefixes of the current prompt that are kept
    for i, prompt in enumerate(ordered):
        kept = [n for n in kept if n <= common[i - 1]] if i else []
        last, users, most = i, dict[int, int](), len(prompt) - 1
        while (most := min(most, common[last])) > (kept[-1] if kept else 0):
            last += 1
            users[most] = last - i  # the later prompts that share so much
        own = list[int]()
        for n in sorted(users):
            if users[n] * (n - (kept[-1] if kept else 0)) > CALL_COST:
                kept.append(n)
                own.append(n)
        result.append(own)
    return result


def shared(a: Tokens, b: Tokens) -> int:
    """Return the number of first tokens that are equal."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
