"""Chats served to real clients, by a worker and by other servers: bursts and open arrival."""
