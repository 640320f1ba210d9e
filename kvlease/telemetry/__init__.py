"""Logs: how an event becomes a line."""
