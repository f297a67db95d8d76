from .choice import (
    execution_choices as execution_choices,
    kernels_choice as kernels_choice,
    layer_kernels as layer_kernels,
)
from .forms import Kernels as Kernels, LayerKernels as LayerKernels, forms_of as forms_of
