"""Adapter onto the KDA kernels that vLLM ships."""
