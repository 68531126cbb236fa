"""The description of the HTTP front's routes, made from the models that check its requests."""
