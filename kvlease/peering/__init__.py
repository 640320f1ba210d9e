"""Channels between servers: secret, pairing, probes, attempt streams."""
