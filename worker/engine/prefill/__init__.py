"""Computing prompts: dense, sparse after SpecPrefill, and with images."""
