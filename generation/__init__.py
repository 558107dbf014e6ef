"""Text generation with a KV cache, loss of documents, and attention maps of a trained model."""
