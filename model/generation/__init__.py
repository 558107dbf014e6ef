"""Text generation with a KV cache, and everything else that reads a trained model."""
