"""Offline runs: files of OpenAI's Batch form, through the batch lane, to their last line whatever dies."""
