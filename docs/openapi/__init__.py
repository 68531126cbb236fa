"""The description of the HTTP gateway's routes, made from the models that check its requests."""
