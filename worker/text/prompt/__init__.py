"""From messages to prompt tokens: templates, escaping, size limits, boundaries."""
