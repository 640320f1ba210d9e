"""Measurements of a running cluster and of its parts: `kvlease bench`."""
