from .dispatch import as_on_cuda as as_on_cuda, rows_not_packed as rows_not_packed
from .flash_attn import FlashAttnPackage as FlashAttnPackage
from .operators import (
    cuda_temporaries as cuda_temporaries,
    foreach_as_on_cuda as foreach_as_on_cuda,
    grouped_mm as grouped_mm,
)
from .target import CudaTarget as CudaTarget
