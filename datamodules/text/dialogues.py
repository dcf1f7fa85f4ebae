"""Document-grounded dialogues as streams: the document, then the turns. Only the turns are scored."""

from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_effattn.checks import one_of
from lit_effattn.datamodules.common.sampling import digest, processes
from lit_effattn.datamodules.common.store import StoredArray
from lit_effattn.datamodules.common.tokens import IGNORE, Response, TokenBatch
from lit_effattn.datamodules.text.dialogue_sources import DialogueSource, Passage, Shown, cmu_dog
from lit_effattn.datamodules.text.sources import Document, TextSource
from lit_effattn.datamodules.text.streams import TokenStreams
from lit_effattn.datamodules.text.text_stream import TextStream


class GroundedDialogues(TextStream):
    """Conversations about documents, CMU DoG (Zhou, Prabhumoye & Black 2018), read segment by segment.

        <start> section <start> turn <start> turn <start> …

    A batch is a `TokenBatch` (B, N). Whole conversations are divided over B · processes streams; a stream has the same
    row in all batches. `fresh` marks the first segment of a conversation, so that the callback `MemoryCarry` carries
    the memory from the document through all its turns, and resets it after them. `<start>`, the last token of the
    vocabulary, is read first and ends every section and turn. Only turns are scored, with the `<start>` at their ends.
    The loss and the perplexity are those of the responses. `responses` holds the turns that begin in a segment.

    Streams are not equally long. A stream that has ended gives empty rows. The files, and what is taken from them, are
    described in `dialogue_sources.cmu_dog`. The synthetic dialogues are those of `DialogueTask`.

    Args:
        root: Folder of the folders `Conversations` and `WikiData`.
        document: "apart": each section, and then the turns during which it was shown, is a conversation. "before": a
            conversation has all sections that were shown in it, and then all turns. "when_shown": each section comes
            before the first turn during which it was shown. But for "before", a section that is shown again after
            another is read again.
        segment_len: N in training.
        batch_size: B in training: streams of each process.
        packed: In training, segments cross the borders of conversations without padding, and a conversation depends on
            nothing before it (`TokenBatch.starts`). Otherwise, and in evaluation, a conversation begins a new segment.
        options: Further arguments of `TextStream`: tokens, their vocabulary, evaluation, workers and the cache.

    Raises:
        ValueError: If an argument is out of its range.
    """

    unit = "token"
    """Always token, since the ends of turns are scored, too."""

    def __init__(
        self,
        root: str = "data/cmu_dog",
        *,
        document: Shown = "apart",
        segment_len: int = 512,
        batch_size: int = 8,
        packed: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(
            "files",
            root=root,
            segment_len=segment_len,
            batch_size=batch_size,
            # Options of texts, which do not apply.
            documents="apart",
            glob=None,
            path=None,
            subset=None,
            column=None,
            max_bytes=None,
            shuffle_seed=None,
            **options,
        )
        one_of(Shown, document=document)
        self.source = "cmu_dog"
        self.root = Path(root)
        self.document = document
        self.packed = packed

    def documents_at(self, split: str, offsets: np.ndarray) -> tuple[np.ndarray, int, list[str]]:
        """Return the numbers of the conversations at offsets of a split, and how many it has. They have no titles."""
        borders = self._streams(split, 1, 1).documents
        return np.searchsorted(borders, offsets, side="right") - 1, len(borders) - 1, []

    @cached_property
    def _dialogues(self) -> DialogueSource:
        return cmu_dog(self.root, self.document)

    def _text(self) -> TextSource:
        """Return every section and turn as a document of its own."""
        texts = {
            split: [p.text.encode() for passages in conversations for p in passages]
            for split, conversations in self._dialogues.splits.items()
        }
        return TextSource(
            name=self.source,
            splits={split: [Document(self.source, 0, partial(iter, (t,))) for t in of] for split, of in texts.items()},
            identity=self._dialogues.identity,
            n_bytes={split: sum(map(len, of_split)) for split, of_split in texts.items()},
        )

    def setup(self, stage: str) -> None:
        """Log the number of tokens, and the files that are left out."""
        super().setup(stage)
        if faults := self._dialogues.faults:
            rank_zero_warn(f"{self.root}: {len(faults)} left out:\n  {faults}")

    def _streams(self, split: str, segment_len: int, batch_size: int) -> "DialogueStreams":
        return DialogueStreams(
            self._dialogues.splits[split],
            self._store.shard(split),
            start=self._tokenizer.start,
            segment_len=segment_len,
            batch_size=batch_size,
            **processes(self.trainer),
            packed=self.packed and split == "train",
        )


class DialogueStreams(TokenStreams):
    """A data set whose item t is the t-th segment of each of this process's streams of conversations.

    The token `start` begins a conversation, and ends each of its `passages`. Options are those of `TokenStreams`.

    Raises:
        ValueError: If there are fewer conversations than streams, or a passage has no tokens.
    """

    def __init__(
        self,
        conversations: list[list[Passage]],
        passages: StoredArray,
        *,
        start: int,
        packed: bool = False,
        **options: Any,
    ) -> None:
        all_passages = [passage for conversation in conversations for passage in conversation]
        lengths = passages.lengths() + 1  # with the end
        if len(all_passages) != len(lengths):
            raise ValueError(f"{len(all_passages)} passages have {len(lengths)} texts with tokens; each needs one")
        borders = np.concatenate([[0], np.cumsum(lengths)])
        tokens = np.full(borders[-1], start, np.promote_types(passages.rows.dtype, np.min_scalar_type(start)))
        is_text = np.ones(len(tokens), bool)
        is_text[borders[1:] - 1] = False
        tokens[is_text] = passages.rows
        super().__init__(
            tokens,
            borders[np.cumsum([0, *map(len, conversations)])],
            start=start,
            joined=False,
            packed=packed,
            drop_last=False,
            **options,
        )
        if len(conversations) < len(self.ends):
            raise ValueError(
                f"batch_size={self.batch_size} in each of {self.num_replicas} processes needs as many conversations, "
                f"but there are {len(conversations)}; use a smaller one"
            )
        # No stream begins within a conversation.
        last = np.searchsorted(self.first, self.ends)  # the conversation after each stream
        if packed:  # the units that are cut into segments are the streams
            self.borders = self.documents[np.append(0, last)]
            self.first = np.append(0, np.cumsum(-(-np.diff(self.borders) // self.segment_len)))
            last = np.arange(1, len(last) + 1)
        self.ends = self.first[last]
        self.begins = np.concatenate([[0], self.ends[:-1]])
        is_scored = np.array([passage.scored for passage in all_passages])
        self.scored = np.repeat(is_scored, lengths)
        self.turns = np.flatnonzero(is_scored)  # indices of passages
        self.turn_begins = borders[self.turns]
        self.texts = [all_passages[i].text for i in self.turns]

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The number of conversations, and a digest of their tokens and their division."""
        return {"conversations": len(self.documents) - 1, "digest": digest(self.tokens, self.documents, self.scored)}

    def __getitem__(self, step: int) -> TokenBatch:
        batch = super().__getitem__(step)
        begins, lengths = (of_all[self.rows].tolist() for of_all in self._segments(step)[:2])
        responses = []
        for row, (begin, length) in enumerate(zip(begins, lengths, strict=True)):
            batch.targets[row, :length][~self.scored[begin : begin + length]] = IGNORE
            first, last = np.searchsorted(self.turn_begins, (begin, begin + length))
            responses.append([Response(int(self.turn_begins[i]) - begin, self.texts[i], i) for i in range(first, last)])
        return batch._replace(responses=responses)
