"""Trains the bundled tiny-chat model anew: python -m scripts.tiny_chat --help"""
