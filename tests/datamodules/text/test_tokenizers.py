import json
import re

import numpy as np
import pytest
import tokenizers

import lit_effattn.datamodules.text.tokenizers as module
from lit_effattn.datamodules.text.tokenizers import (
    BPETokenizer,
    ByteTokenizer,
    CharacterTokenizer,
    PretrainedTokenizer,
    Tokenizer,
    WordTokenizer,
)

TEXT = (
    "Ein Haus,\n  zwei  Häuser\t– drei\n\n\nHäuser; \u3000 vier 屋 \N{PILE OF POO}\r\n"
    " it 's  \u00a0x\u3000 \u00a0y  end"
)
KINDS = [ByteTokenizer, CharacterTokenizer, WordTokenizer, BPETokenizer]


def learnt(kind, text=TEXT, vocab_size=None):
    if kind is BPETokenizer:
        return kind.learn([text] * 20, 360)  # tokens of several characters, white space among them
    return kind.learn([text], vocab_size)


@pytest.mark.parametrize("kind", KINDS)
def test_start_is_the_last_token_never_encoded_and_decodes_to_nothing(kind):
    made = learnt(kind)
    ids = made.encode(TEXT).tolist()
    assert made.start == made.n_tokens - 1
    assert 0 <= min(ids) <= max(ids) < made.start
    assert made.decode([made.start, *ids, made.start]) == made.decode(ids)
    assert made.decode([]) == ""


@pytest.mark.parametrize("kind", KINDS)
def test_a_spec_rebuilds_it(kind):
    made = learnt(kind)
    for spec in (made.spec(), made.to_json(), json.loads(json.dumps(made.spec()))):
        again = Tokenizer.from_spec(spec)
        assert type(again) is kind
        assert (again.n_tokens, again.to_json()) == (made.n_tokens, made.to_json())
        assert np.array_equal(again.encode(TEXT + " neu"), made.encode(TEXT + " neu"))


@pytest.mark.parametrize("kind", [ByteTokenizer, CharacterTokenizer, BPETokenizer])
def test_decoding_undoes_encoding(kind):
    made = learnt(kind)
    assert made.decode(made.encode(TEXT)) == made.decode(made.encode(TEXT.encode())) == TEXT


@pytest.mark.parametrize("in_lines", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_cut_where_it_says_give_the_tokens_of_the_whole(kind, in_lines):
    text = TEXT.encode() if in_lines else TEXT.replace("\n", "").encode()
    made = learnt(kind, text.decode())
    whole = made.encode(text).tolist()
    cuts = set()
    for end in range(1, len(text) + 1):
        cut = kind.cut(text[:end])
        assert 0 <= cut <= end
        cuts.add(cut)
        first, second = text[:cut].decode(errors="surrogateescape"), text[cut:].decode(errors="surrogateescape")
        if kind is ByteTokenizer:
            first, second = text[:cut], text[cut:]
        assert [*made.encode(first), *made.encode(second)] == whole
    assert len(cuts) > 5


def test_bytes_take_anything():
    made = ByteTokenizer()
    assert made.n_tokens == 257
    assert made.encode(bytes(range(256))).tolist() == list(range(256))
    assert made.encode("é").tolist() == [0xC3, 0xA9]
    assert made.decode([0x61, 0xC3]) == "a\ufffd"


def test_characters_are_those_of_the_training_text():
    made = CharacterTokenizer.learn(["cab", "屋a"], None)
    assert made.characters == "abc屋"
    assert made.n_tokens == 6
    assert made.encode("屋bxc\U0010ffff").tolist() == [3, 1, 4, 2, 4]
    assert made.n_replaced == 2
    assert made.decode([0, 4, 3]) == "a\ufffd屋"


def test_words_are_ranked_by_frequency_and_rare_ones_unknown():
    text = "b a b\nc  b a\n\nd <unk> e\n"
    whole = WordTokenizer.learn([text], None)
    assert whole.words == ["<eos>", "b", "a", "<unk>", "c", "d", "e"]
    assert whole.n_tokens == 8
    assert whole.encode("a\nzebra b").tolist() == [2, 0, 3, 1]
    assert whole.decode([2, 0, 0, 3, 1]) == "a\n\n<unk> b"
    few = WordTokenizer.learn([text[:6], text[6:]], 5)
    assert few.words == ["<eos>", "<unk>", "b", "a"]  # <unk> counts <unk>, c, d, e: 4 times, like <eos>
    assert few.n_tokens == 5
    assert few.encode("c d a <unk>").tolist() == [1, 1, 3, 1]
    assert few.encode("x\x1c<unk>").tolist() == [1]
    assert (few.n_replaced, whole.n_replaced) == (3, 1)
    odd = WordTokenizer.learn(["a\x1cb a\x85b"], None)
    assert odd.encode("a\x1cb a\x85b").tolist() == [odd.words.index(word) for word in ("a\x1cb", "a", "b")]


def test_words_never_known_have_a_place():
    assert WordTokenizer.learn(["a a"], None).words == ["a", "<unk>"]


def test_what_is_unknown_is_named():
    assert CharacterTokenizer("ab").unknown("cabxc") == ["c", "x"]
    assert WordTokenizer(["a", "<unk>", "<eos>"]).unknown("a b\na c b") == ["b", "c"]
    assert ByteTokenizer().unknown("\u20ac") == []


def test_bpe_merges_the_most_frequent_pairs_up_to_its_size():
    made = BPETokenizer.learn(["abab abab\n" * 20], 259)
    assert made.n_tokens == 259
    assert len(made.encode("abab")) == 1  # merged: ab, then abab
    assert made.encode("\x00\x7fé").size == 4  # all bytes are known


@pytest.mark.parametrize("spec", ["[]", "{}", '{"tokens": "runes"}', {"tokens": None}])
def test_what_is_no_tokenizer_is_refused(spec):
    with pytest.raises(ValueError, match=r"spec=.*'bytes', 'characters', 'words', 'bpe'"):
        Tokenizer.from_spec(spec)


@pytest.mark.parametrize(
    "spec",
    [
        "no JSON",
        '{"tokens": ["bytes"]}',
        '{"tokens": "bytes", "vocabulary": ' + 200_000 * "[",
        {"tokens": "characters", "vocabulary": 7},
        {"tokens": "words", "vocabulary": "<unk>"},
        {"tokens": "words", "vocabulary": [1, 2]},
        {"tokens": "bpe", "vocabulary": {"model": 1}},
    ],
    ids=range(7),
)
def test_a_damaged_spec_is_refused(spec):
    with pytest.raises(
        ValueError, match=r"does not describe a tokenizer|does not have a vocabulary of|is not a model of byte pairs"
    ) as caught:
        Tokenizer.from_spec(spec)
    assert len(str(caught.value)) < 400


# Those of pretrained models


def like_llamas(**more) -> dict:
    """The content of tokenizer.json: words begin with ▁, a text's first word too, and <s> is put before a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    vocabulary = {word: i for i, word in enumerate(["<unk>", "▁one", "▁two", "▁a", "a", "▁", "<s>"])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 6)])
    made.enable_truncation(2)
    made.enable_padding(length=5)
    return json.loads(made.to_str()) | more


def test_a_pretrained_tokenizer_adds_no_token_and_drops_none():
    made = PretrainedTokenizer(like_llamas(), 9, start=6, end=0)
    assert made.encode("one two one").tolist() == [1, 2, 1]
    assert made.decode([2, 1]) == " two one"  # a text that goes on
    assert made.decode([6, 2, 6]) == " two"
    assert made.decode([]) == ""
    assert (made.n_tokens, made.start, made.end, made.largest) == (9, 6, 0, 8)
    again = Tokenizer.from_spec(made.to_json())
    assert again.to_json() == made.to_json()
    assert (again.start, again.end, again.n_tokens) == (6, 0, 9)


@pytest.mark.parametrize(
    ("vocabulary", "words"),
    [
        ({"n_tokens": 6, "start": 0}, "largest=6, beyond the model's vocabulary of 6"),
        ({"start": 9}, "start=9"),
        ({"end": -1}, "end=-1"),
        ({"model": {}}, "does not describe a tokenizer"),
        ({"start": "<s>"}, "model, n_tokens, start and end"),
    ],
)
def test_what_is_wrong_with_a_pretrained_tokenizer(vocabulary, words):
    whole = {"model": like_llamas(), "n_tokens": 9, "start": 6, "end": None}
    with pytest.raises(ValueError, match=words):
        Tokenizer.from_spec({"tokens": "pretrained", "vocabulary": whole | vocabulary})


TEXTS = ["a bird, a box\n\n  in it\n", "naïve 屋根 🐦\t\u00a0x", "", "a<|end|>b"]


def byte_pairs(**more) -> dict:
    """A tokenizer.json like GPT-2's."""
    model = BPETokenizer.learn(["a bird in a box\n" * 9], 280).spec()["vocabulary"]
    end = {"id": 279, "content": "<|end|>", "single_word": False, "lstrip": False, "rstrip": False}
    return {**model, "added_tokens": [{**end, "normalized": False, "special": True}], **more}


def test_the_bytes_of_a_texts_tokens_are_those_of_the_text():
    learnt = BPETokenizer.learn(["a bird in a box\n" * 9], 280)
    pretrained = PretrainedTokenizer(byte_pairs(), 290, start=279)
    normalised = PretrainedTokenizer(byte_pairs(normalizer={"type": "NFC"}), 290, start=279)
    for made in (learnt, pretrained, normalised):
        sizes = made.token_bytes()
        assert sizes is not None
        assert sizes.shape == (made.n_tokens,)
        for text in TEXTS:
            assert sizes[made.encode(text)].sum() == len(text.encode())
    assert learnt.token_bytes()[learnt.start] == 0
    assert len(pretrained.encode("<|end|>")) == 1
    decomposed = "nai\u0308ve"
    assert normalised.token_bytes()[normalised.encode(decomposed)].sum() == len("naïve".encode())


def test_where_bytes_would_not_be_exact_there_are_none():
    spaced = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    stripped = [{**byte_pairs()["added_tokens"][0], "lstrip": True}]
    for content in (
        like_llamas(),
        byte_pairs(normalizer={"type": "Lowercase"}),
        byte_pairs(pre_tokenizer=spaced),
        byte_pairs(added_tokens=stripped),
    ):
        assert PretrainedTokenizer(content, 290, start=0).token_bytes() is None
    assert WordTokenizer.learn(["a b"], None).token_bytes() is None


def test_a_file_without_spaces_takes_bounded_memory(monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder):
    """Words are cut for learning and encoding; of long ones, only so much is learnt from."""
    cut = BPETokenizer._pieces
    monkeypatch.setattr(module, "_LONGEST", 8)
    monkeypatch.setattr(module, "_ENDS", re.compile(r"\n|\S{8}(?=\S)"))
    monkeypatch.setattr(module, "_MOST_OF_LONG", 20)
    monkeypatch.setattr(module, "_AT_ONCE", 3)
    pieces = [piece for text in ("short\n", "x" * 40, "a b c d e f g h i\n", "y" * 9) for piece in cut(text)]
    assert list(BPETokenizer._to_learn(pieces)) == ["short\n", "x" * 8, "x" * 8, "x" * 8, "a b c d e f g h i\n", "y"]
    assert ["of more than 8 characters" in str(w.message) for w in recwarn].count(True) == 1
    text = "abcabcabcabc" * 9 + "\nand so on\n"
    tokenizer = BPETokenizer.learn([text], 270)
    whole = tokenizer.encode(text)
    assert tokenizer.decode(whole) == text
    pieces = [text[i : i + 8] for i in range(0, 108, 8)] + [text[104:][8:]]
    assert [*whole] == [i for piece in pieces for i in tokenizer.encode(piece)]
    several = tokenizer.encode_all([text, "", "abc", text])
    assert [[*ids] for ids in several] == [[*tokenizer.encode(part)] for part in (text, "", "abc", text)]


def test_usual_words_are_learnt_and_encoded_as_before():
    text = "a rose is a rose is a rose, " * 400 + "\n" + "w" * 10_000 + "\n"
    tokenizer = BPETokenizer.learn([text], 280)
    plain = tokenizers.Tokenizer.from_str(json.dumps(tokenizer.spec()["vocabulary"]))
    lines = text.split("\n")
    expected = [i for line in (f"{lines[0]}\n", f"{lines[1]}\n") for i in plain.encode(line).ids]
    assert [*tokenizer.encode(text)] == expected


def test_a_pretrained_tokenizer_that_explodes_is_refused():
    """At once: a normaliser makes millions of characters."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, []))
    model.normalizer = tokenizers.normalizers.Replace("a", "b" * 1_000_000)
    with pytest.raises(ValueError, match="makes 1,000,000 tokens of 1 characters"):
        PretrainedTokenizer(json.loads(model.to_str()), 3, 2)


@pytest.mark.parametrize(
    "more",
    [
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
        {"decoder": {"type": "Strip", "content": "a", "start": 5, "stop": 9}},
    ],
)
def test_a_panic_of_the_library_is_one_line(more, capfd):
    with pytest.raises(ValueError, match="does not describe a tokenizer: ") as raised:
        PretrainedTokenizer({**BPETokenizer.learn(["ab"], 258).vocabulary, **more}, 300, 2)
    assert "\n" not in str(raised.value)
    assert capfd.readouterr().err == ""
