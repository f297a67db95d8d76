"""The Python front: brim.Model and what it returns."""
