"""The contract, version 1, that clients, gateways, feeders and workers share: names in Redis, events, batch objects,
the Lua libraries, and the check of a server's URL. It needs redis-py at most. `docs/contract.md` explains it.

`schemas` makes pydantic models and the JSON Schema of it.
"""
