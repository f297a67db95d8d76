"""The old name of tests/hand_made_proof.py."""

from tests.hand_made_proof import DIFFERENCE, PROOF, differing

__all__ = ["DIFFERENCE", "PROOF", "differing"]
