"""What FSDP1's hooks keep alive when reentrant checkpoints lie around units of frozen parameters.

A frozen unit has no gradient whose accumulation could say that its backward pass is over, so FSDP1 watches the unit's
inputs (`_register_post_backward_reshard_only_hook`) through `torch.autograd.graph.register_multi_grad_hook`, which
holds their autograd nodes until the whole backward pass is over. A reentrant checkpoint recomputes from inputs that are
leaves: the node of a leaf holds the leaf, and with it its gradient. So the inputs of all layers and their gradients
stay. Public runs on 2 and 4 GPUs show it to the byte: docs/decisions/0012-sharding-in-the-prediction.md.
"""

from __future__ import annotations

from collections.abc import Set

from brim.memory.events import EventStream


def storages_kept_by_hooks(stream: EventStream, layers: list[int | None], frozen: Set[int | None]) -> frozenset[int]:
    """Storages that outlive their recorded death. layers: of each event; frozen: layers with frozen parameters."""
    born: dict[int, tuple[str, int | None]] = {}
    kept = set()
    for storage, place, layer in zip(stream.storages, stream.places, layers, strict=True):
        if storage >= 0:
            born[storage] = (place.phase, layer)
        elif place.phase == "backward" and layer is not None and layer in frozen:
            phase, born_in = born.pop(~storage)
            is_input = phase == "forward" and born_in == (layer - 1 if layer else None)
            is_gradient_of_next_input = phase == "backward" and born_in == layer + 1
            if is_input or is_gradient_of_next_input:
                kept.add(~storage)
    return frozenset(kept)
