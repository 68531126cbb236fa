"""Images, from the parts of a request to pixels."""
