"""The kvlease command."""
