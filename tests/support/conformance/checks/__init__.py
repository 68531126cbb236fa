"""The checks of each client. They run in the client's environment, with the standard library and the client alone."""
