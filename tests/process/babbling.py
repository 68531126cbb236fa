"""A child process that answers each request with text."""

import sys

if __name__ == "__main__":
    while sys.stdin.buffer.read(1):
        print("Hello! How may I help you?", flush=True)
