import doctest
import math
from typing import Any

import numpy as np
import pytest
import torch

from lit_effattn.datamodules import DialogueTask
from lit_effattn.datamodules.common.tokens import IGNORE
from lit_effattn.datamodules.synthetic import dialogue_task

SIZES = {"n_facts": 5, "n_near": 2, "n_far": 2, "n_keys": 6, "n_values": 3, "n_chat": 4, "value_len": 2}
KEYS, CHAT, START = 6, 6 + 6 * 3, 6 + 6 * 3 + 4


def task(**options: Any) -> DialogueTask:
    return DialogueTask(20, **{**SIZES, "batch_size": 4, "n_train": 8, "n_val": 6, "n_test": 5, **options})


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("segment_len", [None, 9])
def test_a_dialogue_is_a_document_turns_a_chat_and_turns(split: str, segment_len: int | None):
    data = task(segment_len=segment_len)
    assert data.vocab_size == START + 1
    length = 1 + 5 * 3 + 1 + 2 * 5 + 21 + 2 * 5 - 1
    n = 1 if segment_len is None else -(-length // segment_len)
    batches = list(getattr(data, f"{split}_dataloader")())
    assert len(batches) == 2 * n
    for first in (0, n):
        segments = batches[first : first + n]
        assert [bool(s.fresh.all()) for s in segments] == [True] + [False] * (n - 1)
        for row in range(3):
            inputs, targets = (torch.cat([s[i][row] for s in segments]).tolist() for i in (0, 1))
            if segments[0].lengths is not None and not segments[0].lengths[row]:
                continue
            assert len(inputs) == length
            assert (inputs[0], inputs[16], inputs[47]) == (START,) * 3
            facts = {inputs[i]: inputs[i + 1 : i + 3] for i in range(1, 16, 3)}
            assert len(facts) == 5
            assert all(KEYS + 3 * k <= v < KEYS + 3 * k + 3 for k, value in facts.items() for v in value)
            assert all(CHAT <= token < START for token in inputs[27:47])
            asked = []
            for place in (17, 22, 48, 53):
                key, start, *value = inputs[place : place + 4]
                asked.append(key)
                assert (start, value) == (START, facts[key])
                scored = split == "train" or place > 27
                expected = [*value, START] if scored else [IGNORE] * 3
                assert targets[place + 1 : place + 4] == expected
            assert len(set(asked)) == 4
            n_scored = 12 if split == "train" else 6
            assert sum(t != IGNORE for t in targets) == n_scored


@pytest.mark.parametrize("segment_len", [None, 8])  # 8: some at the beginning of a segment
def test_responses_begin_where_their_first_token_is_predicted(segment_len: int | None):
    found = []
    for batch in task(segment_len=segment_len).test_dataloader():
        for row, of_row in enumerate(batch.responses or ()):
            for r in of_row:
                assert batch.inputs[row, r.position] == START
                assert batch.targets[row, r.position] == int(r.text.split()[0])
                found.append(r.number)
    assert len(found) == len(set(found)) == 5 * 2


def test_the_bound_is_the_entropy_of_a_response():
    """Of the values that occur in very many dialogues, whose keys are known, but not their document."""
    data = task(value_len=1, n_keys=5, n_test=1500, eval_batch_size=1500, segment_len=None)
    assert data.nats_without_document == math.log(3) / 2
    assert data.exact_match_without_document == pytest.approx(1 / 3)
    assert task().nats_without_document == pytest.approx(2 * math.log(3) / 3)
    assert task().exact_match_without_document == pytest.approx(1 / 9)
    (batch,) = data.test_dataloader()
    values = batch.targets[batch.targets != IGNORE].view(-1, 2)[:, 0].numpy()
    counts = np.bincount(values - 5, minlength=15)
    p = counts / counts.reshape(5, 3).sum(1).repeat(3)
    entropy = -(counts * np.log(p)).sum() / counts.sum()
    assert entropy / 2 == pytest.approx(data.nats_without_document, rel=0.003)


def test_example():
    assert doctest.testmod(dialogue_task) == (0, 5)
