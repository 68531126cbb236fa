"""The HTTP gateway: OpenAI's and Anthropic's interfaces to the queue. `app` mounts into an existing application."""

from sluice.gateway.app import app
from sluice.gateway.settings import ServeSettings, read_serve_settings

__all__ = ["ServeSettings", "app", "read_serve_settings"]
