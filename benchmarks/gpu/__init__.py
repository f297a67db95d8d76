"""Check brim on the GPU at hand: is it right, does it take the memory that is predicted, how fast is it."""
