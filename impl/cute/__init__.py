"""CuTe kernels: ours, and the emulator that runs CuTe kernels' PTX on a CPU."""
