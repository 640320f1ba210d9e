"""Channels between servers: secret, pairing, probes."""
