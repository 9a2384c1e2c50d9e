"""Tests of the emulator of CuTe kernels."""
