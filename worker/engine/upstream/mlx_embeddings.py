"""Every name borrowed from mlx-embeddings: an optional extra, imported only for embedding models.
`tests/engine/upstream/test_mlx_embeddings.py` checks each. Written against mlx-embeddings 0.1.0."""

from mlx_embeddings.tokenizer_utils import load_tokenizer
from mlx_embeddings.utils import load_model

__all__ = ["load_model", "load_tokenizer"]
