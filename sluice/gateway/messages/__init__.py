"""Messages in Anthropic's form."""

from sluice.gateway.messages.routes import routes

__all__ = ["routes"]
