"""From tokens to the answer's parts: text, reasoning, tool calls, stop strings."""
