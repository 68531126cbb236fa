"""Chat completions in OpenAI's form."""

from sluice.gateway.chat.routes import routes

__all__ = ["routes"]
