"""Find and call C++ and CUDA compilers, and cache what they build."""
