"""Bytes to values and back: the KServe v2 protocol as Triton speaks it. No I/O, no trio, no HTTP library."""
