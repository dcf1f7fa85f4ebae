"""A synthetic document-grounded dialogue: a document of facts, a long chat, and questions about the facts."""

import math
from typing import Any

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lit_effattn.checks import at_least
from lit_effattn.datamodules.common.tokens import IGNORE, Response
from lit_effattn.datamodules.synthetic.base import SyntheticTask
from lit_effattn.datamodules.synthetic.segments import DrawnSequence, SegmentedSequences


class DialogueTask(SyntheticTask):
    """Dialogues about a document that has been read long before.

        k_1 v_1 … k_n v_n <start> | near questions | chat of `distance` tokens <start> | far questions
        a question and its response:  k_i <start> v_i <start>

    The document has n facts: a key k_i, and its value v_i of `value_len` tokens. The keys of a dialogue are different.
    Each key has `n_values` tokens of its own for its values. A value's tokens are drawn uniformly and independently,
    and so are those of the chat. No fact is asked for twice. `<start>`, the last token of the vocabulary, ends the
    document, the chat and every turn, and is the first input.

    In validation and test only the responses to the far questions are scored, including `<start>` at their ends. In
    training the responses to the near questions are scored too: from them a model learns to look facts up.
    `GroundedDialogues` has real data.

    A batch is a `TokenBatch` with one segment of each of `batch_size` dialogues, at the same position in all of them;
    `fresh` marks the first segment of a dialogue. The callback `MemoryCarry` carries the memory from segment to
    segment. The first segment is shorter if the length of a dialogue is not a multiple of `segment_len`.

    Without the document, every value is equally likely, whatever the earlier responses. A model that has forgotten the
    document has an expected loss of at least `nats_without_document`, and an expected rate of exact matches of at most
    `exact_match_without_document`.

    Args:
        distance: Tokens of the chat.
        n_facts: Number n of facts in a document.
        n_near: Number of questions before the chat.
        n_far: Number of questions after it.
        n_keys: Number of tokens that a key can be.
        n_values: Number of different tokens in the values of a key.
        n_chat: Number of different tokens in the chat.
        value_len: Tokens of a value.
        segment_len: Maximum length of a segment in tokens; null: the whole dialogue.
        batch_size: Dialogues per step and process.
        n_train: Dialogues per epoch. Every epoch draws new ones.
        n_val: Validation dialogues, always the same.
        options: Arguments of `SyntheticTask`.

    Raises:
        ValueError: If an argument is out of its range.

    Examples:
        >>> data = DialogueTask(4, n_facts=2, n_near=1, n_far=1, n_keys=9, n_values=10, n_chat=9, value_len=1)
        >>> batch = next(iter(data.test_dataloader()))
        >>> batch.inputs[0].tolist()
        [108, 2, 31, 6, 73, 108, 2, 108, 31, 108, 106, 103, 99, 102, 108, 6, 108, 73]
        >>> batch.targets[0, -3:].tolist(), batch.responses[0]
        ([-100, 73, 108], [Response(position=16, text='73', number=1)])
        >>> round(data.nats_without_document, 4), data.exact_match_without_document
        (1.1513, 0.1)
    """

    def __init__(
        self,
        distance: int = 4096,
        *,
        n_facts: int = 16,
        n_near: int = 8,
        n_far: int = 8,
        n_keys: int = 64,
        n_values: int = 64,
        n_chat: int = 64,
        value_len: int = 2,
        segment_len: int | None = 512,
        batch_size: int = 16,
        n_train: int = 16_000,
        n_val: int = 160,
        **options: Any,
    ) -> None:
        super().__init__(batch_size=batch_size, n_train=n_train, n_val=n_val, **options)
        self.save_hyperparameters(logger=False)
        at_least(0, n_near=n_near)
        at_least(1, distance=distance, n_far=n_far, n_chat=n_chat, value_len=value_len, segment_len=segment_len)
        at_least(2, n_values=n_values)
        at_least(n_facts, n_keys=n_keys)
        if n_facts < n_near + n_far:
            raise ValueError(
                f"n_facts={n_facts} must be at least n_near={n_near} plus n_far={n_far}: no fact is asked for twice"
            )
        self.distance = distance
        self.n_facts = n_facts
        self.n_near = n_near
        self.n_far = n_far
        self.n_keys = n_keys
        self.n_values = n_values
        self.n_chat = n_chat
        self.value_len = value_len
        self.segment_len = segment_len

    @property
    def vocab_size(self) -> int:
        """Number of tokens of keys, of values and of the chat plus 1, `<start>`."""
        return self.n_keys + self.n_keys * self.n_values + self.n_chat + 1

    @property
    def nats_without_document(self) -> float:
        """Lowest expected loss without the document, in nats per token scored: m ln n_values / (m + 1), m = value_len.

        A response has the entropy m ln n_values, and m + 1 tokens; the last is certain.
        """
        return self.value_len * math.log(self.n_values) / (self.value_len + 1)

    @property
    def exact_match_without_document(self) -> float:
        """Highest expected fraction of correct responses without the document: n_values^−value_len."""
        return float(self.n_values) ** -self.value_len

    def setup(self, stage: str) -> None:
        """Log the best scores that are possible without the document."""
        rank_zero_info(
            f"without the document: perplexity at least {math.exp(self.nats_without_document):.4g}, exact match at "
            f"most {self.exact_match_without_document:.4g}"
        )

    def sequences(self, split: str) -> "DialogueSequences":
        """Return the dialogues of "train", "val" or "test"."""
        return DialogueSequences(self, score_near=split == "train", stream=self._stream(split))


class DialogueSequences(SegmentedSequences):
    """Dialogues drawn by index."""

    def __init__(self, task: DialogueTask, *, score_near: bool, stream: int) -> None:
        turns = (task.n_near + task.n_far) * (task.value_len + 3)
        # Inputs: <start>, the document, the near questions, the chat, the far questions; not the last token.
        super().__init__(task.n_facts * (1 + task.value_len) + 1 + task.distance + 1 + turns, task.segment_len)
        self.sizes = task.n_facts, task.value_len, task.distance
        self.ranges = task.n_keys, task.n_values, task.n_chat
        self.n_questions = task.n_near, task.n_far
        self.score_near = score_near
        self.stream = stream

    def draw(self, i: int) -> DrawnSequence:
        """Return the i-th dialogue."""
        n_facts, value_len, distance = self.sizes
        n_keys, n_values, n_chat = self.ranges
        n_near, n_far = self.n_questions
        rng = np.random.default_rng((self.stream, i))
        first_chat = n_keys + n_keys * n_values
        start = first_chat + n_chat
        keys = rng.choice(n_keys, n_facts, replace=False)
        values = n_keys + keys[:, None] * n_values + rng.integers(n_values, size=(n_facts, value_len))
        facts = np.column_stack([keys, values])  # (n_facts, 1 + value_len)
        chat = first_chat + rng.integers(n_chat, size=distance)
        asked = rng.permutation(n_facts)[: n_near + n_far]
        border = np.full((len(asked), 1), start)
        turns = np.hstack([keys[asked, None], border, values[asked], border])  # (turns, value_len + 3)
        near, far = turns[:n_near], turns[n_near:]
        tokens = np.concatenate([[start], facts.ravel(), [start], near.ravel(), chat, [start], far.ravel()])
        targets, responses = np.full(len(tokens) - 1, IGNORE), []
        for number in range(0 if self.score_near else n_near, len(turns)):
            chat_before = distance + 1 if number >= n_near else 0
            position = facts.size + 3 + number * turns.shape[1] + chat_before  # of the input <start> before the value
            answer = turns[number, 2:]  # the value and <start>
            targets[position : position + len(answer)] = answer
            responses.append(Response(position, " ".join(map(str, answer[:-1].tolist())), i * len(turns) + number))
        return DrawnSequence(tokens[:-1], targets, responses)
