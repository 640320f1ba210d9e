"""Generated from proto/kvlease/v1; made by scripts/proto."""
