"""Trains the bundled tiny-chat model from scratch: python -m scripts.tiny_chat --help"""
