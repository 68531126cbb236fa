"""Multi-token-prediction (MTP) heads: their tensors in checkpoints, their keys and values, and their drafts."""
