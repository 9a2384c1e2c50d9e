"""The project's own Triton kernels. They import nothing of the oracle."""
