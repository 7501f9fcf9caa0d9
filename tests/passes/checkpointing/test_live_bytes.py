"""Count the bytes alive in a step; `test_profile.py` compares those of fake tensors."""

import torch

from passes.checkpointing.live_bytes import LiveBytes

KIB = 1024


def tensor(kibibytes):
    return torch.ones(kibibytes * KIB // 4)


def test_what_is_made_counts_until_it_is_gone():
    with LiveBytes() as bytes_:
        a = tensor(4)
        b = a + 1
        assert (bytes_.live, bytes_.peak) == (8 * KIB, 8 * KIB)
        del a
        assert (bytes_.live, bytes_.peak) == (4 * KIB, 8 * KIB)
        bytes_.restart()
        assert bytes_.peak == 4 * KIB
        del b
        assert bytes_.live == 0


def test_a_view_keeps_the_whole_and_adds_nothing():
    with LiveBytes() as bytes_:
        a = tensor(4)
        part = a.view(2, -1)[0]
        assert bytes_.live == 4 * KIB
        del a
        assert bytes_.live == 4 * KIB
        del part
        assert bytes_.live == 0


def test_a_write_in_place_adds_nothing():
    with LiveBytes() as bytes_:
        a = tensor(4)
        a.add_(1).relu_()
        assert bytes_.peak == 4 * KIB


def test_what_is_left_out_isnt_counted():
    weight = tensor(4)
    with LiveBytes(without=[weight]) as bytes_:
        shifted = weight[1:].view(-1)
        assert bytes_.live == 0
        product = shifted * 2
        assert bytes_.live == product.numel() * 4


def test_products_random_and_foreign_operators_are_known():
    with LiveBytes() as bytes_:
        torch.ones(3, 4) @ torch.ones(4, 5)
        assert bytes_.flops == 2 * 3 * 4 * 5
        assert not bytes_.is_random
        torch.dropout(torch.ones(4), 0.5, True)
        assert bytes_.is_random
        assert not bytes_.is_foreign


def test_attention_on_a_cpu_has_flops():
    q = torch.ones(2, 3, 8, 4)
    with LiveBytes() as bytes_:
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
    assert bytes_.flops == 2 * (2 * 2 * 3 * 8 * 8 * 4)
