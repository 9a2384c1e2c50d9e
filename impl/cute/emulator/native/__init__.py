"""The emulator's engine in C++, built on first use: the same results and errors as ``reference``, fast."""
