"""Webhooks after the Standard Webhooks specification: who gets which events, and their delivery."""
