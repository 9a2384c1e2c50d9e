"""``kdafuzz bench``: how fast kernels are, against the bytes that they must move."""
