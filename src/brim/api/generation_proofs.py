"""How much has run of what was predicted for a model, so that it need not be tried again before each job."""

from __future__ import annotations

from brim.api.generation_request import GenerationRequest
from brim.planning.cache import Cache, cache_folder, digest

_KIND = "generation-proofs"


class GenerationProofs:
    """Of the model, settings and device that a request is for, with the same versions."""

    def __init__(self, request: GenerationRequest) -> None:
        self._cache = Cache(cache_folder(), _KIND)
        self._name = digest(request.facts)

    @property
    def proven_bytes(self) -> int:
        """The largest uncorrected prediction, of bytes allocated, that was tried and fitted; 0: none was."""
        saved = self._cache.read(self._name)
        return saved if isinstance(saved, int) else 0

    def add(self, predicted_bytes: int) -> None:
        """A try that fitted."""
        if predicted_bytes > self.proven_bytes:
            self._cache.write(self._name, predicted_bytes)
