"""KV blocks: their layout, seals, pools and storage."""
