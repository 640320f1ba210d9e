"""Layouts: where each array of a canonical block lies, and what identifies a layout."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.kvcache.layout import ALIGNMENT, ArraySpec, Layout, attention_layout

MODEL = b"m" * 16

specs = st.builds(
    lambda size, dtype: (size, dtype),
    st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple),
    st.sampled_from(["float32", "bfloat16", "float16"]),
)
layouts = st.lists(st.lists(specs, min_size=1, max_size=3), min_size=1, max_size=4).map(
    lambda layers: Layout(
        tuple(tuple(ArraySpec(f"a{i}", shape, dtype) for i, (shape, dtype) in enumerate(layer)) for layer in layers)
    )
)


@given(layouts, st.integers(1, 40))
def test_spans_are_aligned_in_order_without_overlap_and_end_inside_the_content(layout: Layout, block_size: int) -> None:
    end = 0
    for span in layout.spans(block_size):
        assert span.offset_bytes % ALIGNMENT == 0
        assert end <= span.offset_bytes < end + ALIGNMENT
        end = span.offset_bytes + span.num_bytes
    assert end <= layout.content_bytes(block_size) < end + ALIGNMENT
    assert layout.content_bytes(block_size) % ALIGNMENT == 0
    assert sum(span.num_bytes for span in layout.spans(block_size)) == layout.token_bytes * block_size


def test_the_content_of_the_default_model_has_no_gaps() -> None:
    layout = attention_layout(30, 3, 64, "float32")
    assert layout.content_bytes(16) == 30 * 2 * 16 * 3 * 64 * 4 == layout.token_bytes * 16
    assert layout.describe() == "30 layers, k[3x64] v[3x64], float32"


def test_a_layout_of_unequal_layers_describes_each_kind() -> None:
    latent = (ArraySpec("latent", (512,), "bfloat16"), ArraySpec("rope", (64,), "bfloat16"))
    layout = Layout((*attention_layout(2, 2, 4, "float16").layers, latent))
    assert layout.describe() == "2 layers, k[2x4] v[2x4], float16; 1 layer, latent[512] rope[64], bfloat16"


def test_the_fingerprint_tells_every_part_of_a_layout_and_the_model_apart() -> None:
    variants = [
        attention_layout(2, 3, 8, "float32"),
        attention_layout(3, 3, 8, "float32"),
        attention_layout(2, 8, 3, "float32"),
        attention_layout(2, 3, 8, "bfloat16"),
        attention_layout(2, 3, 8, "float16"),
        Layout(((ArraySpec("v", (3, 8), "float32"), ArraySpec("k", (3, 8), "float32")),) * 2),
        Layout(((ArraySpec("k", (24,), "float32"), ArraySpec("v", (3, 8), "float32")),) * 2),
    ]
    prints = [layout.fingerprint(MODEL) for layout in variants] + [variants[0].fingerprint(b"n" * 16)]
    assert len(set(prints)) == len(prints)
    assert {len(fingerprint) for fingerprint in prints} == {16}
    assert attention_layout(2, 3, 8, "float32").fingerprint(MODEL) == prints[0]


def test_equal_layouts_are_equal_and_hash_alike() -> None:
    first, second = attention_layout(2, 3, 8, "float32"), attention_layout(2, 3, 8, "float32")
    assert first.token_bytes == 2 * 2 * 96
    assert first == second
    assert hash(first) == hash(second)


def test_impossible_layouts_are_refused() -> None:
    with pytest.raises(ValueError, match="int8"):
        ArraySpec("k", (1,), "int8")
    for shape in ((), (0,), (3, -1)):
        with pytest.raises(ValueError, match="positive"):
            ArraySpec("k", shape, "float32")
    with pytest.raises(ValueError, match="1 to"):
        Layout(())
    with pytest.raises(ValueError, match="different names"):
        Layout(((ArraySpec("k", (1,), "float32"),) * 2,))
    for block_size in (0, -1, 1 << 20):
        with pytest.raises(ValueError, match="tokens"):
            attention_layout(1, 1, 1, "float32").spans(block_size)
    with pytest.raises(ValueError, match="16 bytes"):
        attention_layout(1, 1, 1, "float32").fingerprint(b"short")
