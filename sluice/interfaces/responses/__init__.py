"""Responses in OpenAI's form."""
