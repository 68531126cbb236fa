"""Turns tokens into the parts of an answer: text, reasoning, tool calls, stop strings."""
