"""Model families: each file turns a Hugging Face config into a `ModelSpec` and says what its weights are called."""
