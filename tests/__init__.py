"""The suite's tests: properties of kernels, and of the suite itself in ``meta``."""
