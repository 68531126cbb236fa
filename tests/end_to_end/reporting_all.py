"""`python -m worker` that emits a progress event for each step of an image, a score or a prompt, not four a second."""

from worker.__main__ import main
from worker.chat import recorder

if __name__ == "__main__":
    recorder._PROGRESS_EVERY_S = 0.0
    main()
