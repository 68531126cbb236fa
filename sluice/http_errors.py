"""The errors of HTTP interfaces, as OpenAI's and Anthropic's clients decide by them.

Clients retry, compact their conversation, drop an image or give up by a status, a code, a type or words of the message.
`tests/gateway/test_client_conditions.py` holds this table to what each of them reads, from its own source.
"""

from enum import Enum

INVALID = "invalid_request_error"
SERVER = "server_error"


class ErrorForm(Enum):
    """An error: its status, OpenAI's code and type, and the words that its message begins with in OpenAI's form and in
    Anthropic's. Nothing is `insufficient_quota`: clients would give up, and the limits of a key refill."""

    INVALID_REQUEST = 400, "invalid_request"
    UNSUPPORTED = 400, "unsupported"
    TOO_LARGE = 400, "too_large"
    # Clients compact their conversation; a worker writes OpenAI's sentence.
    CONTEXT_EXCEEDED = 400, "context_length_exceeded", INVALID, "", "prompt is too long: "
    # Codex and Claude Code go on without the block.
    BAD_IMAGE = (
        400, "invalid_request", INVALID, "The image data you provided does not represent a valid image: ",
        "Could not process image: ",
    )  # fmt: skip
    BAD_DOCUMENT = 400, "invalid_request", INVALID, "", "The PDF specified was not valid: "
    INVALID_TYPE = 400, "invalid_type"
    INVALID_VALUE = 400, "invalid_value"
    UNSUPPORTED_VALUE = 400, "unsupported_value"
    UNSUPPORTED_PARAMETER = 400, "unsupported_parameter"
    MISSING_PARAMETER = 400, "missing_required_parameter"
    INVALID_IDEMPOTENCY_KEY = 400, "invalid_key"
    STREAM_EXPIRED = 400, "stream_expired"
    NOT_HTTP = 400, None
    # LiteLLM knows a wrong key by these words.
    INVALID_API_KEY = 401, "invalid_api_key", INVALID, "Incorrect API key provided: ", "Invalid API Key: "
    LANE_NOT_ALLOWED = 403, "lane_not_allowed", "permission_error"
    NOT_ALLOWED = 403, None, "permission_error"
    MODEL_NOT_FOUND = 404, "model_not_found", INVALID, "", "model: "
    UNKNOWN_JOB = 404, "unknown_job"
    NOT_FOUND = 404, "not_found"
    NO_PATH = 404, None
    NO_METHOD = 405, None
    TIMEOUT = 408, "timeout", "timeout_error"
    IDEMPOTENCY_KEY_REUSED = 409, "idempotency_key_reused"
    IDEMPOTENCY_KEY_IN_USE = 409, "idempotency_key_in_use"
    CONFLICT = 409, "conflict"
    ANSWER_EXPIRED = 410, "answer_expired"
    BODY_TOO_LARGE = 413, "too_large"
    BODY_ENCODING = 415, "unsupported"
    REQUESTS_EXCEEDED = 429, "rate_limit_exceeded", "requests"
    TOKENS_EXCEEDED = 429, "rate_limit_exceeded", "tokens"
    TOO_MANY_CONNECTIONS = 429, "too_many_connections", "requests"
    TOO_MANY_BYTES = 429, "too_many_bytes", "requests"
    TOO_MANY_RUNS = 429, "too_many_batches", "requests"
    STORAGE_EXCEEDED = 403, "storage_exceeded", "permission_error"
    # The status that proxies log for a disconnected client; OpenAI clients do not retry it.
    CANCELLED = 499, "cancelled"
    INTERNAL = 500, "internal", SERVER
    FAILED = 500, None, SERVER
    OVERLOADED = 503, "overloaded", SERVER
    STORAGE_FULL = 507, "storage_full", SERVER
    DEADLINE = 504, "deadline", SERVER

    def __init__(
        self, status: int, code: str | None, type: str = INVALID, begins: str = "", anthropic_begins: str = ""
    ) -> None:
        self.status = status
        self.code = code
        self.type = type
        self.begins = begins
        self.anthropic_begins = anthropic_begins

    @property
    def anthropic_status(self) -> int:
        """Anthropic's status: 529 for an overload, which its SDK retries."""
        return 529 if self.status == 503 else self.status

    @property
    def anthropic_type(self) -> str:
        """Anthropic's type."""
        return _ANTHROPIC_TYPES.get(self.anthropic_status, "api_error" if self.status >= 500 else INVALID)

    @property
    def response_code(self) -> str | None:
        """OpenAI's code of a response that has failed in its stream, of which there are few."""
        if self is ErrorForm.CONTEXT_EXCEEDED:
            return self.code
        return "invalid_prompt" if self.status < 500 else SERVER

    @property
    def is_retried(self) -> bool:
        """True if the same request may succeed later, unless the error itself knows better."""
        return self.status in (408, 429) or self.status >= 500


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
