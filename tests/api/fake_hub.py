"""The old name of tests/fake_hub.py."""

from tests.fake_hub import Hub, fake_hub

__all__ = ["Hub", "fake_hub"]
