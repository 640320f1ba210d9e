"""Text to ids and back, in whole and in pieces."""

import json
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from kvlease.models.errors import ModelFolderInvalid, TextInvalid
from kvlease.models.tiny import SPECIAL_TOKENS
from kvlease.models.tokenizer import Spelling, Tokenizer

EMOJI = "🙂"
FAMILY = "👩‍👩‍👧"
SCRIPTS = (
    "The quick brown fox",
    "Съешь же ещё этих мягких булок",
    "敏捷的棕色狐狸",
    "いろはにほへと",
    "हिन्दी में लिखना",
    "نص عربي مع تشكيلٌ",
    "한국어 문장",
    f"{EMOJI}{FAMILY}🏳️‍🌈",
    "tabs\tand\r\nnewlines\n\n  and   spaces ",
    "\x00\x7f\ufeff\ufffd",
    "",
)


def sentencepiece() -> tokenizers.Tokenizer:
    """A tokenizer of SentencePiece's kind: `▁` for spaces, 256 byte tokens, BOS before a raw prompt."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefgh", "▁a", "bc"]
    vocab = {token: index for index, token in enumerate(tokens)}
    model = tokenizers.models.BPE(
        vocab=vocab, merges=[("▁", "a"), ("b", "c")], unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    backend.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", vocab["<s>"])]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def wrap(backend: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(backend, Spelling.parse(json.loads(backend.to_str())["decoder"]))


@pytest.fixture(scope="session")
def byte_level(tiny: Path) -> Tokenizer:
    return Tokenizer.load(tiny)


@pytest.fixture(scope="session")
def with_bos() -> Tokenizer:
    return wrap(sentencepiece())


def streamed(tokenizer: Tokenizer, ids: Iterable[int]) -> list[str]:
    stream = tokenizer.detokenizer()
    return [*(stream.push([each]) for each in ids), stream.flush()]


@pytest.mark.parametrize("text", SCRIPTS)
def test_text_survives_the_round_trip(byte_level: Tokenizer, with_bos: Tokenizer, text: str) -> None:
    for tokenizer in (byte_level, with_bos):
        assert tokenizer.decode(tokenizer.encode(text, False)) == text


@given(ids=st.lists(st.integers(0, 320), max_size=60))
def test_a_stream_equals_the_librarys_decode_of_any_bytes(ids: list[int], byte_level: Tokenizer, tiny: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(tiny / "tokenizer.json"))
    assert "".join(streamed(byte_level, ids)) == backend.decode(ids) == byte_level.decode(ids)


@given(
    text=st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="<▁"), max_size=40),
    cut=st.integers(0, 40),
)
def test_sentencepiece_text_streams_as_the_library_decodes_it(text: str, cut: int, with_bos: Tokenizer) -> None:
    backend = sentencepiece()
    ids = with_bos.encode(text, True)
    assert ids == backend.encode(text).ids
    assert "".join(streamed(with_bos, ids)) == backend.decode(ids) == text
    assert "".join(streamed(with_bos, ids[:cut])) == with_bos.decode(ids[:cut])


def test_half_a_character_is_held_back_until_it_is_whole(byte_level: Tokenizer) -> None:
    ids = byte_level.encode(EMOJI, False)
    assert len(ids) == 4
    assert streamed(byte_level, ids) == ["", "", "", EMOJI, ""]


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
def test_a_cut_character_ends_as_one_replacement_in_both_modes(byte_level: Tokenizer, num_tokens: int) -> None:
    ids = byte_level.encode("hi" + EMOJI, False)[: 2 + num_tokens - 1]
    assert "".join(streamed(byte_level, ids)) == byte_level.decode(ids)
    assert byte_level.decode(ids).startswith("hi")
    assert byte_level.decode(ids).count("\ufffd") == 1


def test_bytes_that_never_form_a_character_are_settled_as_they_come(with_bos: Tokenizer) -> None:
    stray = with_bos.token_id("<0x9F>")
    assert stray is not None
    assert streamed(with_bos, [stray] * 4) == ["\ufffd"] * 4 + [""]


def test_a_cut_character_spares_the_whole_one_before_it(with_bos: Tokenizer) -> None:
    ids = with_bos.encode(EMOJI * 2, False)
    assert with_bos.decode(ids[:-1]) == EMOJI + "\ufffd"


def test_only_the_tokenizers_own_leading_space_is_stripped(with_bos: Tokenizer) -> None:
    space, letter = with_bos.token_id("▁"), with_bos.token_id("a")
    assert space is not None
    assert letter is not None
    ids = [space, space, letter, space, letter]
    assert streamed(with_bos, ids) == ["", " ", "a", " ", "a", ""]
    assert with_bos.decode(ids) == " a a"


def test_special_and_unknown_ids_have_no_text(byte_level: Tokenizer) -> None:
    ids = [byte_level.token_id(token) for token in SPECIAL_TOKENS]
    assert byte_level.decode([each for each in ids if each is not None] + [-1, 10**6]) == ""


def test_a_plain_added_token_is_read_as_it_is_written(tiny: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(tiny / "tokenizer.json"))
    backend.add_tokens(["two words", "größer"])
    tokenizer = wrap(backend)
    ids = tokenizer.encode("a two words größer b", False)
    assert tokenizer.token_id("two words") in ids
    assert tokenizer.decode(ids) == backend.decode(ids)
    assert tokenizer.decode(ids).startswith("a two words gr")


def test_bos_is_written_once(with_bos: Tokenizer) -> None:
    bos = with_bos.token_id("<s>")
    assert with_bos.encode("abc", True)[0] == bos
    assert bos not in with_bos.encode("abc", False)
    assert with_bos.encode("<s>abc", False).count(bos or 0) == 1
    assert with_bos.encode("<s>abc", True).count(bos or 0) == 1
    assert with_bos.encode("", True) == [bos]


def test_special_tokens_in_text_are_one_token(byte_level: Tokenizer) -> None:
    assert byte_level.encode("<|im_end|>", False) == [byte_level.token_id("<|im_end|>")]


def test_a_lone_surrogate_is_the_clients_fault(byte_level: Tokenizer) -> None:
    with pytest.raises(TextInvalid, match="surrogate") as caught:
        byte_level.encode("a\ud800", True)
    assert caught.value.http_status == 400


def test_encoding_lets_other_threads_run(byte_level: Tokenizer) -> None:
    started = threading.Event()
    encoded = threading.Event()

    def encode() -> None:
        started.set()
        byte_level.encode("some words to encode, " * 40_000, False)
        encoded.set()

    thread = threading.Thread(target=encode)
    thread.start()
    started.wait(5)
    num_beats = 0
    while not encoded.is_set():
        num_beats += 1
        encoded.wait(0.001)
    thread.join()
    assert num_beats > 5


def test_detokenizing_takes_linear_time(byte_level: Tokenizer) -> None:
    ids = byte_level.encode(FAMILY * 4_000, False)

    def seconds(num: int) -> float:
        begin = time.thread_time()
        streamed(byte_level, ids[:num])
        return time.thread_time() - begin

    few, many = (min(seconds(num) for _ in range(3)) for num in (len(ids) // 10, len(ids)))
    assert many < 40 * few  # ten times the work; quadratic would be a hundred


def test_a_missing_or_foreign_tokenizer_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderInvalid, match=r"tokenizer\.json is missing"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelFolderInvalid, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"decoder": {"type": "ByteLevel"}}')
    with pytest.raises(ModelFolderInvalid, match="is not a tokenizer"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"decoder": {"type": "WordPiece"}}')
    with pytest.raises(ModelFolderInvalid, match="unsupported decoder step"):
        Tokenizer.load(tmp_path)
