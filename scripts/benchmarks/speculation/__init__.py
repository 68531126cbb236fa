"""Speculation: the same requests with drafts and without, and the cost of a forward that verifies drafts."""
