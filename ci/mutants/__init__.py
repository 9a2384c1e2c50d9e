"""``kdafuzz mutants``: plants many small faults in kernels and counts which of them the suite finds."""
