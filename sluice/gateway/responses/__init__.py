"""OpenAI's Responses interface."""

from sluice.gateway.responses.routes import routes

__all__ = ["routes"]
