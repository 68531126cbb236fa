"""Grammar state of one row: its answer, the thought before it, and drafts after it."""
