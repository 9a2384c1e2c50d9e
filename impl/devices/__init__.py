"""Execution devices: where a case's memory lies and what runs the kernels."""
