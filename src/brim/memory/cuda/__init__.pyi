from .attention import CudaTarget as CudaTarget
from .dispatch import FlashAttnPackage as FlashAttnPackage, as_on_cuda as as_on_cuda
from .liger import liger_stand_ins as liger_stand_ins
from .operators import (
    cuda_temporaries as cuda_temporaries,
    foreach_as_on_cuda as foreach_as_on_cuda,
    grouped_mm as grouped_mm,
)
