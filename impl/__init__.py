"""Kernels under test, the memory they run in, and the devices that run them."""
