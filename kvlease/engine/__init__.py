"""The model's forward pass over blocks."""
