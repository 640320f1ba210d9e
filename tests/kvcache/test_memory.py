from __future__ import annotations

from kvlease.kvcache.layout import attention_layout
from kvlease.kvcache.ledger import SlotLedger
from kvlease.kvcache.memory import KVMemory
from kvlease.kvcache.pool import BlockPool
from kvlease.kvcache.storage import KVStorage

LAYOUT = attention_layout(1, 1, 4, "float32")


def test_a_rooms_table_is_made_once_and_says_where_its_blocks_are() -> None:
    kv = KVMemory(BlockPool(8), SlotLedger(8, 4), KVStorage(LAYOUT, 8, 4))
    first, second = kv.hold(3), kv.hold(2)
    assert first is not None and second is not None
    assert (first.table, second.table) == ((0, 1, 2), (3, 4))
    assert first.table is first.table, "it is asked for with every block of a prompt"


def test_only_memory_of_the_host_is_copied_without_staging() -> None:
    assert KVStorage(LAYOUT, 1, 4).is_on_host
    assert not KVStorage(LAYOUT, 1, 4, staged=True).is_on_host
