"""Model folders: finding, converting, tokenizing."""
