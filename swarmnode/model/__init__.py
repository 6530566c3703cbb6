"""Model files: GGUF, the manifest, slices of experts and where they are kept."""
