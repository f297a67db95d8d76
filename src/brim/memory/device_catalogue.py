"""The catalogue of common GPUs: memory as PyTorch shows it, compute capability, memory outside PyTorch."""

from __future__ import annotations

# Name, title, GiB of memory, compute capability.
#
# The memory is what cudaMemGetInfo and torch.cuda.get_device_properties(0).total_memory give, which is less than the
# nominal figure: ECC and the driver take a part, newer drivers more than older ones. The figures are the lowest that
# was found, on Linux, in public output: out-of-memory messages of PyTorch ("GPU 0 has a total capacity of 14.56 GiB")
# and printed _CudaDeviceProperties(…, total_memory=…). Marked "as …": none was found; the figure of a card whose
# memory nvidia-smi gives alike.
ROWS: tuple[tuple[str, str, float, tuple[int, int]], ...] = (
    ("t4", "NVIDIA T4", 14.56, (7, 5)),  # older drivers: 14.74
    ("v100-16gb", "NVIDIA V100 16GB", 15.75, (7, 0)),  # 16130 MiB
    ("v100-32gb", "NVIDIA V100 32GB", 31.73, (7, 0)),
    ("a10", "NVIDIA A10", 22.05, (8, 6)),  # as the A10G: nvidia-smi gives 23028 MiB for both
    ("a10g", "NVIDIA A10G", 22.05, (8, 6)),  # 22587 MiB
    ("a30", "NVIDIA A30", 23.62, (8, 0)),  # nominal 24 GiB less the 1.6% that the A100 40GB, alike, has less
    ("a40", "NVIDIA A40", 44.35, (8, 6)),  # 45416 MiB
    ("a100-40gb", "NVIDIA A100 40GB", 39.38, (8, 0)),
    ("a100-80gb", "NVIDIA A100 80GB", 79.14, (8, 0)),  # also 79.15, 79.25
    ("l4", "NVIDIA L4", 22.03, (8, 9)),  # the message does not name the card
    ("l40", "NVIDIA L40", 44.40, (8, 9)),
    ("l40s", "NVIDIA L40S", 44.39, (8, 9)),
    ("rtx-2080ti", "NVIDIA GeForce RTX 2080 Ti", 10.76, (7, 5)),
    ("rtx-3060", "NVIDIA GeForce RTX 3060 12GB", 11.62, (8, 6)),
    ("rtx-3070", "NVIDIA GeForce RTX 3070", 7.78, (8, 6)),
    ("rtx-3080", "NVIDIA GeForce RTX 3080 10GB", 9.78, (8, 6)),
    ("rtx-3090", "NVIDIA GeForce RTX 3090", 23.56, (8, 6)),  # older drivers: 23.69
    ("rtx-4060ti-16gb", "NVIDIA GeForce RTX 4060 Ti 16GB", 15.57, (8, 9)),  # as the RTX 4070 Ti SUPER
    ("rtx-4070", "NVIDIA GeForce RTX 4070", 11.56, (8, 9)),
    ("rtx-4070ti-super", "NVIDIA GeForce RTX 4070 Ti SUPER", 15.57, (8, 9)),
    ("rtx-4080", "NVIDIA GeForce RTX 4080", 15.57, (8, 9)),  # as the RTX 4070 Ti SUPER
    ("rtx-4090", "NVIDIA GeForce RTX 4090", 23.52, (8, 9)),  # older drivers: 23.64
    ("rtx-5060ti-16gb", "NVIDIA GeForce RTX 5060 Ti 16GB", 15.47, (12, 0)),  # 15841 MiB
    ("rtx-5080", "NVIDIA GeForce RTX 5080", 15.47, (12, 0)),  # as the RTX 5060 Ti 16GB
    ("rtx-5090", "NVIDIA GeForce RTX 5090", 31.36, (12, 0)),
    ("rtx-a4000", "NVIDIA RTX A4000", 15.57, (8, 6)),  # as the RTX 4070 Ti SUPER
    ("rtx-a5000", "NVIDIA RTX A5000", 23.55, (8, 6)),  # 24114 MiB
    ("rtx-a6000", "NVIDIA RTX A6000", 47.40, (8, 6)),  # older drivers: 47.54
    ("rtx-6000-ada", "NVIDIA RTX 6000 Ada Generation", 47.40, (8, 9)),  # older driver: 48622 MiB
    ("rtx-pro-6000", "NVIDIA RTX PRO 6000 Blackwell", 94.97, (12, 0)),
    ("h100-80gb", "NVIDIA H100 80GB", 79.18, (9, 0)),  # 81082 MiB, SXM
    ("h100-pcie", "NVIDIA H100 PCIe", 79.11, (9, 0)),  # 81008 MiB
    ("h100-nvl", "NVIDIA H100 NVL", 92.63, (9, 0)),  # 99456909312 bytes
    ("gh200-96gb", "NVIDIA GH200 96GB", 94.50, (9, 0)),  # the message does not name the card
    ("h200", "NVIDIA H200", 139.72, (9, 0)),
    ("b200", "NVIDIA B200", 178.35, (10, 0)),
)

# Where a name leaves the memory open, the card that is rented most; the prediction names the one that it took.
ALIASES: dict[str, str] = {
    "v100": "v100-16gb",
    "v100-sxm2-16gb": "v100-16gb",
    "v100-pcie-16gb": "v100-16gb",
    "v100-sxm2-32gb": "v100-32gb",
    "v100-pcie-32gb": "v100-32gb",
    "a100": "a100-80gb",
    "a100-80": "a100-80gb",
    "a100-sxm4-80gb": "a100-80gb",
    "a100-80gb-pcie": "a100-80gb",
    "a100-40": "a100-40gb",
    "a100-sxm4-40gb": "a100-40gb",
    "a100-pcie-40gb": "a100-40gb",
    "2080ti": "rtx-2080ti",
    "rtx-3060-12gb": "rtx-3060",
    "rtx-4060ti": "rtx-4060ti-16gb",
    "rtx-5060ti": "rtx-5060ti-16gb",
    "a4000": "rtx-a4000",
    "a5000": "rtx-a5000",
    "a6000": "rtx-a6000",
    "6000-ada": "rtx-6000-ada",
    "rtx-pro-6000-blackwell-server-edition": "rtx-pro-6000",
    "rtx-pro-6000-blackwell-workstation-edition": "rtx-pro-6000",
    "h100": "h100-80gb",
    "h100-80gb-hbm3": "h100-80gb",
    "h100-sxm": "h100-80gb",
    "h100-sxm5": "h100-80gb",
    "gh200": "gh200-96gb",
    "gh200-480gb": "gh200-96gb",
    "h200-141gb": "h200",
}

# GiB that a process of PyTorch holds besides what the caching allocator reserved: the CUDA context, the modules and
# kernels loaded, cuBLAS's and cuDNN's own. Typical figures of public out-of-memory messages, which give the process's
# memory, the allocated and the reserved bytes (CUDA 12, where kernels are loaded when first used). A card that is at
# hand is measured instead; other libraries (NCCL, bitsandbytes) and a display add to it.
OUTSIDE_GIB: dict[tuple[int, int], float] = {
    (7, 0): 0.38,  # V100: 0.38
    (7, 5): 0.16,  # T4: 0.11, 0.11, 0.12, 0.15, 0.16
    (8, 0): 0.53,  # A100: 0.48, 0.51, 0.51, 0.53, and 0.80 and 1.00 with more libraries
    (8, 6): 0.34,  # RTX 3060, 3090, A6000: 0.24, 0.31, 0.32; 48 GB cards: 0.30, 0.34
    (8, 9): 0.50,  # RTX 4090, L40: 0.43, 0.46, 0.46, 0.50, 0.57
    (9, 0): 0.65,  # H100, H200: 0.51, 0.59, 0.59, 0.65, 0.73
    (10, 0): 0.70,  # B200: 0.70
    (12, 0): 0.50,  # RTX 5090: 0.49
}
OUTSIDE_GIB_ELSEWHERE = 0.65  # a card that is not known: the most of the above but the B200's
