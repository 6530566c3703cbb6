"""Computes experts: llama.cpp's own ggml kernels on the slices this node holds, driven through ctypes."""
