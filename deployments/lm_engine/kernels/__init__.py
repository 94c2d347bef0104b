"""Triton kernels of the LM engine. Imported only where Triton is installed."""
