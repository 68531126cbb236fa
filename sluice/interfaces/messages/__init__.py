"""Messages in Anthropic's form."""
