"""Trains the bundled tiny-chat model from scratch: python -m models.training --help"""
