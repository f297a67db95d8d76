"""What a CUDA GPU does otherwise than the CPU, as its caching allocator sees it."""
