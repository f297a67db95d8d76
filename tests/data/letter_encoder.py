"""A sentence encoder for tests: a text's embedding counts its letters."""

import string

import numpy as np


class LetterEncoder:
    """Alike is what is written with the same letters. Remembers what it was asked."""

    def __init__(self, identity="letters"):
        self.identity = identity
        self.asked = []

    def encode(self, texts):
        self.asked += texts
        counts = np.array([[1 + text.lower().count(letter) for letter in string.ascii_lowercase] for text in texts])
        return (counts / np.linalg.norm(counts, axis=1, keepdims=True)).astype(np.float32)
