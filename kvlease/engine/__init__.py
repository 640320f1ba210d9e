"""The model's forward pass over blocks.

Never: imports torch here, so that `kvlease.engine.threads` can still set up the environment before torch is loaded.
"""
