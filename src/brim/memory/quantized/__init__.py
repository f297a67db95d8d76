"""What bitsandbytes allocates on CUDA, on fake tensors: linear layers in 4 and 8 bits, their loading, its optimizers.

bitsandbytes' parameter classes cannot be built on fake tensors, and its operators say nothing of the buffers inside
them. The modules here stand in for them; `brim.memory.quantized.replace` puts them into a model.
"""
