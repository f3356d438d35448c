"""What is on disk: finding a model by name, reading its configuration, the GGUF container. No torch."""
