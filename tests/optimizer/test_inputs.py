from dataclasses import dataclass

import pytest
import torch
from laid_out import laid_out

from optimize_export.errors import LoadError, UsageError
from optimizer.model.inputs import Call, Samples


def test_draw_0_of_the_given_batch_size_is_the_users_own_call():
    x, mask = torch.randn(2, 3), torch.ones(2, 4, dtype=torch.bool)
    samples = Samples((x,), {"mask": mask})
    assert samples.batch_size == 2
    assert samples.dynamic
    assert samples.at(2).args[0] is x
    assert samples.at().kwargs["mask"] is mask


@pytest.mark.parametrize("batch_size", [1, 2, 3, 8])
def test_every_tensor_with_the_first_ones_rows_gets_the_batch_size(batch_size):
    samples = Samples((torch.randn(2, 3), [torch.randn(2, 5)], torch.randn(7)), {"ids": torch.arange(2)})
    call = samples.at(batch_size, 1)
    assert call.args[0].shape == (batch_size, 3)
    assert call.args[1][0].shape == (batch_size, 5)
    assert call.kwargs["ids"].shape == (batch_size,)
    assert call.args[2] is samples.given.args[2]


def test_draws_are_deterministic_and_differ():
    x = torch.randn(2, 3)
    first, again = Samples((x,)).at(3, 1), Samples((x,)).at(3, 1)
    assert torch.equal(first.args[0], again.args[0])
    assert not torch.equal(first.args[0], Samples((x,)).at(3, 2).args[0])
    assert not torch.equal(first.args[0], Samples((x,), seed=1).at(3, 1).args[0])


def test_the_global_random_state_is_not_used():
    state = torch.get_rng_state()
    Samples((torch.ones(2, 3).cumsum(1),)).at(5, 1)
    Samples(lambda batch, generator: (torch.randn(batch, 3),)).at(4)
    assert torch.equal(torch.get_rng_state(), state)


def test_floats_keep_moments_sign_and_range():
    x = torch.rand(4, 1000) ** 2
    drawn = Samples((x,)).at(8, 1).args[0]
    assert drawn.dtype is torch.float32
    assert abs(drawn.mean() - x.mean()) < 0.02
    assert abs(drawn.std() - x.std()) < 0.02
    assert drawn.min() >= x.min()
    assert drawn.max() <= x.max()
    assert drawn.unique().numel() > 0.9 * drawn.numel()


def test_complex_numbers_are_drawn_by_part():
    x = torch.complex(torch.rand(2, 500), -torch.rand(2, 500))
    drawn = Samples((x,)).at(3, 1).args[0]
    assert drawn.dtype is torch.complex64
    assert (drawn.real >= 0).all()
    assert (drawn.imag <= 0).all()


@pytest.mark.parametrize(
    "mask",
    [
        torch.tensor([[0.0, -float("inf")], [0.0, 0.0]]),
        torch.tensor([[0.0, 1.0, 1.0], [1.0, 1.0, 1.0]]),
        torch.tensor([[0.0, torch.finfo(torch.float32).min, -1.0], [1.0, 0.5, 0.0]]),
        torch.full((2, 3), 7.0),
    ],
)
def test_float_masks_and_constants_keep_their_rows(mask):
    drawn = Samples((torch.randn(2, 3), mask)).at(5, 1).args[1]
    rows = {tuple(row) for row in mask.tolist()}
    assert all(tuple(row) in rows for row in drawn.tolist())


def test_rows_that_belong_together_stay_together():
    ids = torch.arange(6).view(3, 2)
    samples = Samples((ids,), {"mask": ids > 2, "more": [ids * 10]})
    for batch_size in (1, 2, 4, 8):
        call = samples.at(batch_size, 1)
        assert torch.equal(call.kwargs["mask"], call.args[0] > 2)
        assert torch.equal(call.kwargs["more"][0], call.args[0] * 10)


def test_each_row_stands_once_before_any_stands_twice():
    drawn = Samples((torch.arange(3),)).at(5, 1).args[0]
    assert sorted(drawn[:3].tolist()) == [0, 1, 2]


def test_one_tensor_that_stands_twice_stays_one():
    x = torch.randn(2, 3)
    call = Samples((x, {"again": x})).at(4)
    assert call.args[0] is call.args[1]["again"]


def test_unregistered_containers_are_opened():
    @dataclass
    class Batch:
        x: torch.Tensor
        size: int

    class Cache:
        def __init__(self):
            self.layers = [torch.randn(2, 3)]
            self.seen = [3]

    cache = Cache()
    call = Samples((Batch(torch.randn(2, 3), 9), cache)).at(4)
    assert call.args[0].x.shape == (4, 3)
    assert call.args[0].size == 9
    assert call.args[1].layers[0].shape == (4, 3)
    # Other state of such an object must not carry over from one run to the next.
    assert call.args[1].seen == [3]
    assert call.args[1].seen is not cache.seen
    assert cache.layers[0].shape == (2, 3)


def test_requires_grad_stays():
    x = torch.randn(2, 3, requires_grad=True)
    assert Samples((x,)).at(5).args[0].requires_grad
    assert not Samples((x.detach(),)).at(5).args[0].requires_grad


def test_a_function_gets_batch_size_and_generator():
    samples = Samples(lambda batch, generator: (torch.randn(batch, 3, generator=generator),))
    assert samples.batch_size == 2
    assert samples.at(7).args[0].shape == (7, 3)
    assert torch.equal(samples.at(7, 1).args[0], samples.at(7, 1).args[0])
    assert not torch.equal(samples.at(7, 1).args[0], samples.at(7, 0).args[0])


def test_a_function_may_give_a_call_and_keywords_follow_its_batch_size():
    samples = Samples(lambda batch, _: Call((torch.zeros(batch, 2),), {"y": torch.ones(batch)}))
    assert samples.at(3).kwargs["y"].shape == (3,)
    samples = Samples(lambda batch, _: (torch.zeros(batch, 2),), {"mask": torch.ones(2, 5)})
    assert samples.at(3).kwargs["mask"].shape == (3, 5)


@pytest.mark.parametrize("args", [(), (torch.tensor(3.0),), (3, "text")])
def test_without_rows_there_is_one_batch_size(args):
    samples = Samples(args)
    assert samples.batch_size is None
    assert not samples.dynamic
    assert samples.at(None, 1).args == args
    with pytest.raises(UsageError, match="of their tensors has a batch dimension"):
        samples.at(2)


@pytest.mark.parametrize("bad", [[torch.ones(2)], {"x": torch.ones(2)}, "x", 3])
def test_anything_else_is_refused_in_one_sentence(bad):
    with pytest.raises(UsageError, match="tuple"):
        Samples(bad)


def test_keywords_are_a_dict_and_a_batch_size_is_positive():
    assert Samples(torch.ones(2, 3)).given.args[0].shape == (2, 3), "a single tensor is one argument"
    with pytest.raises(UsageError, match="dict"):
        Samples((torch.ones(2),), [1])
    with pytest.raises(UsageError, match="at least 1"):
        Samples((torch.ones(2),)).at(0)
    with pytest.raises(UsageError, match="a batch of no rows"):
        Samples((torch.randn(0, 3),))


def test_moving_keeps_the_values():
    samples = Samples((torch.randn(2, 3, requires_grad=True),), {"n": 3})
    moved = samples.to("cpu")
    assert torch.equal(moved.at(4, 1).args[0], samples.at(4, 1).args[0])
    assert moved.given.args[0].requires_grad
    assert moved.to("meta").given.args[0].device.type == "meta"


def meta(size):
    return torch.empty(size, 3, device="meta")


@pytest.mark.parametrize(
    ("inputs", "kwargs", "part"),
    [
        ((torch.ones(2), meta(2)), {}, "a tensor without values (device meta), argument_1"),
        ((), {"x": meta(2)}, "a tensor without values (device meta), x"),
        (lambda size, generator: (meta(size),), {}, "a tensor without values (device meta), argument_0"),
        ((torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),), {}, "a nested tensor, argument_0"),
        (lambda size, generator: (torch.eye(2).to_sparse_csc(),), {}, "a tensor in the layout sparse_csc, argument_0"),
        ((laid_out("quantized per channel", torch.eye(2)),), {}, "a tensor that is quantized per channel, argument_0"),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse CSC tensor support:UserWarning")
def test_tensors_that_no_call_can_be_made_of_are_named(inputs, kwargs, part):
    with pytest.raises(UsageError) as caught:
        Samples(inputs, kwargs, device="cpu")
    assert str(caught.value).startswith(f"The example inputs contain {part}")


def test_a_function_that_raises_is_one_sentence():
    def draw(batch_size, generator):
        if batch_size == 3:
            raise ValueError("three\nrows")
        return (torch.ones(batch_size),)

    with pytest.raises(LoadError) as caught:
        Samples(draw).at(3)
    assert str(caught.value) == "The function given as example_inputs raises at batch size 3: ValueError: three rows."


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_sparse_tensors_keep_their_layout_and_their_rows(layout):
    dense = torch.tensor([[1.0, 0, 0], [0, 2, 0], [0, 0, 3]])
    (drawn,) = Samples((dense.to_sparse(layout=layout),)).at(5, 1).args
    assert drawn.layout is layout
    rows = {tuple(row) for row in drawn.to_dense().tolist()}
    assert drawn.shape == (5, 3)
    assert rows == {tuple(row) for row in dense.tolist()}
