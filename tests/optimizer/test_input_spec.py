"""The syntax of `--input`, and the inputs that are drawn for it."""

import pytest
import torch

from optimize_export.errors import LoadError, UsageError
from optimizer.command.inputs import InputSpec, draw_inputs, parse_input


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("2x3x224x224", InputSpec(None, torch.float32, (2, 3, 224, 224))),
        ("7", InputSpec(None, torch.float32, (7,))),
        ("float32[2,3,224,224]", InputSpec(None, torch.float32, (2, 3, 224, 224))),
        ("ids=int64[2,128]:0..30000", InputSpec("ids", torch.int64, (2, 128), 0, 30000)),
        ("mask = bool[2, 128]", InputSpec("mask", torch.bool, (2, 128))),
        ("x=f32[2,3]:-1..1", InputSpec("x", torch.float32, (2, 3), -1, 1)),
        ("bf16[2]:-.5..1e3", InputSpec(None, torch.bfloat16, (2,), -0.5, 1000)),
        ("i64[]", InputSpec(None, torch.int64, ())),
        ("2x3:0..1", InputSpec(None, torch.float32, (2, 3), 0, 1)),
        ("complex64[3]", InputSpec(None, torch.complex64, (3,))),
    ],
)
def test_input_options_are_read(text, spec):
    assert parse_input(text) == spec


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "syntax is invalid"),
        ("2x", "syntax is invalid"),
        ("2,3", "syntax is invalid"),
        ("0x3", "'0' is not a size; every size must be 1 or more"),
        ("float32[-1,3]", "'-1' is not a size"),
        ("float32[2,,3]", "'' is not a size"),
        ("flaot32[2]", "'flaot32' is not a dtype (did you mean float32?)"),
        ("Tensor[2]", "'Tensor' is not a dtype"),
        ("qint8[2]", "'qint8' is not a dtype"),
        ("2 3=2x3", "'2 3' is not the name"),
        ("=2x3", "'' is not the name"),
        ("int64[2]:5", "'5' is not a range"),
        ("int64[2]:5..5", "the range is empty"),
        ("int64[2]:0..1.5", "integer ends"),
        ("uint8[2]:0..300", "doesn't fit uint8"),
        ("bool[2]:0..3", "doesn't fit bool"),
        ("complex64[2]:0..3", "complex numbers can't have a range"),
        ("99999999999999999999999x3", "is not a size"),
        ("٣x3", "syntax is invalid"),
        ("f16[2]:0..1e6", "doesn't fit float16"),
        ("2x3:-1e39..1", "doesn't fit float32"),
    ],
)
def test_input_options_that_make_no_sense_are_quoted_with_a_right_one(text, part):
    with pytest.raises(UsageError) as caught:
        parse_input(text)
    assert repr(text) in str(caught.value)
    assert part in str(caught.value)
    assert "float32[2,3,224,224]" in str(caught.value)


def test_input_values():
    texts = ["1000", "i64[1000]", "mask=bool[1000]", "a=uint8[1000]:200..256", "b=f16[1000]:2..3", "c=bool[9]:1..2"]
    specs = [parse_input(text) for text in [*texts, "d=c64[4]", "e=float8_e4m3fn[4]", "s=f64[]"]]
    (normal, digits), named = draw_inputs(specs, 3)
    assert abs(normal.std().item() - 1) < 0.1
    assert set(digits.tolist()) == set(range(10))
    assert set(named["mask"].tolist()) == {True, False}
    assert set(named["a"].tolist()) == set(range(200, 256))
    assert 2 <= named["b"].min() < named["b"].max() <= 3
    assert named["c"].all()
    assert [tensor.dtype for tensor in named.values()] == [spec.dtype for spec in specs[2:]]
    assert named["s"].shape == ()
    assert torch.equal(normal, draw_inputs(specs, 3)[0][0])
    assert not torch.equal(normal, draw_inputs(specs, 4)[0][0])


def test_inputs_beyond_the_memory_are_a_sentence():
    with pytest.raises(
        LoadError, match=r"float32\[1048576,1048576\] couldn't be created: out of memory while allocating 4,096.0 GiB"
    ):
        draw_inputs([parse_input("1048576x1048576")], 0)
