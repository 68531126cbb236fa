"""OpenAI's and Anthropic's requests as requests of the contract, and a job's answer in their forms. Without HTTP: the
gateway and batch runs share it."""
