"""`python -m worker` whose chat template does not end."""

import time
from typing import Any

from worker.__main__ import main
from worker.engine.tokenizer import MLXTokenizer
from worker.text.prompt import prompt


def render(tokenizer: MLXTokenizer, conversation: list[dict[str, Any]], **how: Any) -> str:
    time.sleep(3600)
    return ""


if __name__ == "__main__":
    MLXTokenizer.render = render  # type: ignore[method-assign]
    prompt._TRIAL_S = 0.5
    main()
