"""Everything that knows Redis and arq."""
