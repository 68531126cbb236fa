"""The clients: how each is installed, and which checks it runs."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Client:
    """A client. `script` is a file of `tests/support/conformance/checks`; one in JavaScript runs on Node."""

    name: str
    packages: tuple[str, ...]
    script: str
    runs_s: float = 300.0  # that its checks may take together
    played: bool = False  # against the worker that plays answers: the checks need a model that can do all

    @property
    def needs_node(self) -> bool:
        """True if it is installed by npm."""
        return self.script.endswith(".mjs")


_ALL = (
    Client("openai", ("openai",), "openai_sdk.py"),
    Client("openai-node", ("openai",), "openai.mjs"),
    Client("anthropic", ("anthropic",), "anthropic_sdk.py"),
    Client("litellm", ("litellm", "mcp"), "litellm_sdk.py"),
    Client("langchain-openai", ("langchain-openai",), "langchain_chat.py"),
    Client("pydantic-ai", ("pydantic-ai-slim[openai,anthropic]",), "pydantic_agents.py"),
    Client("ai-sdk", ("ai", "@ai-sdk/openai-compatible"), "ai_sdk.mjs"),
    Client("llm-comply", ("llm-comply",), "comply.py", played=True),
    Client("schemathesis", ("schemathesis>=4",), "fuzz.py", runs_s=900.0),
)
CLIENTS = {client.name: client for client in _ALL}
