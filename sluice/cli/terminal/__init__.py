"""Reading from and writing to a terminal: inputs, tables, streams, the chat prompt."""
