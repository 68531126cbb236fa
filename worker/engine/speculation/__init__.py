"""Speculative decoding: drafts of several tokens per row, which one forward of the batch verifies."""
