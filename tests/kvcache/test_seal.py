"""Seals: what is packed is read back, and nothing else is."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.kvcache.layout import attention_layout
from kvlease.kvcache.seal import (
    SEAL_BYTES,
    SEAL_VERSION,
    Seal,
    SealFault,
    chain_hashes,
    claimed_lease,
    sealed_block_bytes,
)

identities = st.binary(min_size=16, max_size=16)
seals = st.builds(
    Seal,
    identities,
    identities,
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
    identities,
    identities,
    identities,
)
SEAL = Seal(b"l" * 16, b"n" * 16, 5, 13, b"f" * 16, b"c" * 16, b"d" * 16)


@given(seals)
def test_a_packed_seal_is_read_back(seal: Seal) -> None:
    packed = seal.pack()
    assert len(packed) == SEAL_BYTES
    assert Seal.unpack(packed) == seal
    assert Seal.unpack(memoryview(bytearray(packed) + b"content")) == seal
    assert claimed_lease(packed) == seal.lease_id


@given(st.binary(max_size=600))
def test_foreign_bytes_never_raise_and_are_never_a_seal(data: bytes) -> None:
    assert isinstance(Seal.unpack(data), SealFault)
    claimed_lease(data)


@given(seals, st.binary(min_size=1, max_size=244), st.integers(0, 255))
def test_a_seal_overwritten_with_foreign_bytes_never_raises(seal: Seal, noise: bytes, start: int) -> None:
    packed = bytearray(seal.pack())
    packed[start : start + len(noise)] = noise
    data = bytes(packed[:SEAL_BYTES])
    assert isinstance(Seal.unpack(data), SealFault) or data == seal.pack()


@pytest.mark.parametrize("index", range(SEAL_BYTES))
def test_every_byte_of_the_header_is_under_a_check(index: int) -> None:
    expected = "magic" if index < 8 else "version" if index < 10 else "algorithm" if index < 12 else "tag"
    for flip in (0x01, 0x80):
        packed = bytearray(SEAL.pack())
        packed[index] ^= flip
        fault = Seal.unpack(packed)
        assert isinstance(fault, SealFault)
        assert fault.check == expected


@pytest.mark.parametrize("length", [0, 1, 8, 16, 240, 255])
def test_a_short_header_is_refused_by_its_length(length: int) -> None:
    fault = Seal.unpack(SEAL.pack()[:length])
    assert isinstance(fault, SealFault)
    assert fault.check == "length"
    assert claimed_lease(SEAL.pack()[:length]) is None


def test_the_tag_is_keyed_by_the_nonce() -> None:
    packed = SEAL.pack()
    keyed, bare = (
        hashlib.blake2b(packed[:240], digest_size=16, key=key, person=b"kvlease-seal").digest()
        for key in (SEAL.nonce, b"")
    )
    assert packed[240:] == keyed
    assert isinstance(Seal.unpack(packed[:240] + bare), SealFault)


def test_an_unknown_version_is_named_on_both_sides() -> None:
    packed = bytearray(SEAL.pack())
    packed[8] = SEAL_VERSION + 1
    fault = Seal.unpack(packed)
    assert isinstance(fault, SealFault)
    assert f"version {SEAL_VERSION + 1}" in fault.message
    assert f"speaks {SEAL_VERSION}" in fault.message


def test_the_lease_of_a_spoiled_seal_can_still_be_looked_up() -> None:
    packed = bytearray(SEAL.pack())
    packed[200] ^= 1
    assert isinstance(Seal.unpack(packed), SealFault)
    assert claimed_lease(packed) == SEAL.lease_id
    assert claimed_lease(bytes(SEAL_BYTES)) is None


def test_fields_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        Seal(b"short", b"n" * 16, 0, 1, b"f" * 16, b"c" * 16, b"d" * 16)
    with pytest.raises(ValueError, match="do not fit"):
        Seal(b"l" * 16, b"n" * 16, -1, 1, b"f" * 16, b"c" * 16, b"d" * 16)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=70), st.integers(1, 20))
def test_a_chain_has_one_hash_a_block_over_all_tokens_before_its_end(tokens: list[int], block_size: int) -> None:
    chains = chain_hashes(tokens, block_size)
    assert len(chains) == -(-len(tokens) // block_size)
    for index, chain in enumerate(chains):
        prefix = tokens[: (index + 1) * block_size]
        assert chain == chain_hashes(prefix, len(prefix))[0]


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40), st.data())
def test_another_token_changes_every_hash_from_its_block_on(tokens: list[int], data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(tokens) - 1))
    other = tokens.copy()
    other[index] ^= 1
    pairs = list(zip(chain_hashes(tokens, 4), chain_hashes(other, 4), strict=True))
    assert [a == b for a, b in pairs] == [block < index // 4 for block in range(len(pairs))]


def test_a_sealed_block_fits_an_aligned_slot() -> None:
    layout = attention_layout(3, 1, 5, "bfloat16")
    assert sealed_block_bytes(layout, 3) == SEAL_BYTES + 3 * 2 * 64
    assert sealed_block_bytes(layout, 7) % 64 == 0
