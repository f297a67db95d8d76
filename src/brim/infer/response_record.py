"""A response, or its score, as the bytes of a journal's record; and what a prompt is known by."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from brim.infer.response import FinishReason, Response

_REASONS: tuple[FinishReason, ...] = get_args(FinishReason)
_HEAD = struct.Struct("<Bi")  # number of the reason, the token that ended it or _NO_END
_NO_END = -1
_SCORE = struct.Struct("<d")


def response_bytes(response: Response) -> bytes:
    """See response_of."""
    end_id = _NO_END if response.end_id is None else response.end_id
    head = _HEAD.pack(_REASONS.index(response.finish_reason), end_id)
    return head + np.asarray(response.token_ids, dtype="<i4").tobytes()


def response_of(body: bytes) -> Response:
    """What `response_bytes` was given."""
    reason, end_id = _HEAD.unpack_from(body)
    return Response(
        token_ids=np.frombuffer(body, dtype="<i4", offset=_HEAD.size).tolist(),
        finish_reason=_REASONS[reason],
        end_id=None if end_id == _NO_END else end_id,
    )


def score_bytes(log_probability: float) -> bytes:
    """See score_of."""
    return _SCORE.pack(log_probability)


def score_of(body: bytes) -> float:
    """What `score_bytes` was given."""
    return float(_SCORE.unpack(body)[0])


def prompt_hash(token_ids: NDArray[np.int32] | Sequence[int]) -> int:
    """64 bits that tell a prompt's tokens from all others'."""
    tokens = np.asarray(token_ids, dtype="<i4").tobytes()
    return int.from_bytes(hashlib.blake2b(tokens, digest_size=8).digest(), "little")
