"""Kernels that sleep on disk: kept by a small program, written by CRIU, checked before they are woken."""
