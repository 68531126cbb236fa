"""How models write thoughts, answers and tool calls."""
