import pytest
import torch

from brim.memory.cuda import cuda_temporaries

pytestmark = pytest.mark.usefixtures("fake")


def ids(*shape):
    return torch.empty(shape, dtype=torch.int64)


def test_the_gradient_of_an_embedding_is_summed_in_parts_in_fp32():
    grad = torch.empty(2, 2048, 64, dtype=torch.bfloat16)
    parts = 409 + 1000  # 4,096 tokens by tens, and one for each of the 1,000 rows of the table
    expected = 8 * (3 * 4096 + 2 * 1000 + parts) + 4 * parts * 64
    assert cuda_temporaries("aten::embedding_dense_backward", (grad, ids(2, 2048), 1000, -1, False), {}) == expected


def test_few_tokens_are_added_without_a_sort():
    grad = torch.empty(1, 3072, 64)
    assert cuda_temporaries("aten::embedding_dense_backward", (grad, ids(1, 3072), 1000, -1, False), {}) == 0


def test_logits_of_one_and_of_several_rows_are_sorted():
    assert cuda_temporaries("aten::sort", (torch.empty(4096),), {}) == 0
    assert cuda_temporaries("aten::sort", (torch.empty(1, 50_000),), {}) == 50_000 * 20
    assert cuda_temporaries("aten::sort", (torch.empty(4, 50_000),), {}) == 200_000 * 32


def test_topk_of_a_few_large_rows_sorts_them_whole():
    assert cuda_temporaries("aten::topk", (torch.empty(4, 50_000), 50), {}) == 0
    assert cuda_temporaries("aten::topk", (torch.empty(11, 128_000), 50), {}) == 0
    assert cuda_temporaries("aten::topk", (torch.empty(4, 128_000), 50), {}) == 512_000 * (12 + 32)


def test_a_draw_needs_noise_of_the_shape_of_the_probabilities():
    assert cuda_temporaries("aten::multinomial", (torch.empty(4, 1000), 1), {}) == 16_000


def test_indices_are_sorted_only_to_accumulate():
    table = torch.empty(100, 8)
    assert cuda_temporaries("aten::index_put_", (table, [ids(40)], torch.empty(40, 8)), {}) == 0
    assert cuda_temporaries("aten::index_put_", (table, [ids(40)], torch.empty(40, 8), True), {}) == 48 * 40


def test_norms_have_one_part_for_each_chunk_of_the_longest_tensor():
    tensors = [torch.empty(65_537, dtype=torch.bfloat16), torch.empty(3, dtype=torch.bfloat16)]
    assert cuda_temporaries("aten::_foreach_norm", (tensors, 2), {}) == 4 * 2 * 2


def test_a_matrix_product_takes_nothing_beside_its_workspace():
    assert cuda_temporaries("aten::mm", (torch.empty(4, 4), torch.empty(4, 4)), {}) == 0


def test_an_8bit_weight_is_multiplied_by_its_scales_before_the_constant():
    weight = torch.empty(64, 128, dtype=torch.int8)
    assert cuda_temporaries("bitsandbytes::int8_vectorwise_dequant", (weight, torch.empty(64)), {}) == 4 * 64 * 128
