"""Offline runs: files in OpenAI's Batch format, processed through the batch lane and resumed after any crash."""
