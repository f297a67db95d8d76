from .activations import (
    LayerName as LayerName,
    Pooling as Pooling,
    VectorStore as VectorStore,
    collect_activations as collect_activations,
    first_vectors as first_vectors,
    named_layers as named_layers,
)
from .actors import Actors as Actors, num_actors as num_actors
from .journal import (
    DoneRows as DoneRows,
    HeldRecords as HeldRecords,
    Journal as Journal,
    Records as Records,
    prompt_hash as prompt_hash,
    score_bytes as score_bytes,
    score_of as score_of,
)
from .leases import Leases as Leases, Members as Members, Team as Team, Work as Work
from .stream import GrowingText as GrowingText, KeptCache as KeptCache, stream_tokens as stream_tokens
