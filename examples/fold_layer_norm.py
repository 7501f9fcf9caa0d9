"""A custom pass with new parameters: fold the scale and shift of a LayerNorm into the following linear layer.

    python examples/fold_layer_norm.py

To publish such a pass, register the class in your package's pyproject.toml. Its name then works here and on the command
line like that of any other pass:

    [project.entry-points."optimize_export.passes"]
    fold-layer-norm = "your_package.fold_layer_norm:FoldLayerNorm"
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optimize_export import optimize
from passes import Context, Example, GraphPass, GraphRewriter


@dataclass(frozen=True)
class FoldLayerNorm(GraphPass):
    """Fold the scale g and shift s of a LayerNorm into the linear layer that takes its output.

        W (g * n(x) + s) + b  ==  (W * g) n(x) + (b + W s)        n(x) = (x - mean) / sqrt(var + eps)

    Does not handle: an output with other users, or weights that aren't parameters themselves.
    """

    name: ClassVar[str] = "fold-layer-norm"
    modes: ClassVar[tuple[str, ...]] = ("inference",)

    # What the pass changes and what it refuses: its tests and its documentation.
    VALID: ClassVar[Sequence[Example]] = (
        Example("linear(norm(x))", (2, 8), {"norm": "nn.LayerNorm(8)", "linear": "nn.Linear(8, 4)"}),
    )
    REFUSED: ClassVar[Sequence[Example]] = (
        Example(
            "linear(y := norm(x)) + y",
            (2, 8),
            {"norm": "nn.LayerNorm(8)", "linear": "nn.Linear(8, 8)"},
            "something else than one linear layer takes its output",
        ),
    )

    def rewrite(self, graph: GraphRewriter, context: Context) -> None:
        """Find each LayerNorm with a scale, check its users, and rewrite both calls."""
        for norm in graph.calls("layer_norm"):
            scale, shift = (graph.argument(norm, place, name) for place, name in ((2, "weight"), (3, "bias")))
            if scale is None:
                continue
            linear = next(iter(norm.users))
            if reason := why_not(graph, norm, linear, scale, shift):
                graph.skip(norm, reason)
            else:
                fold(graph, norm, linear, scale, shift)


def why_not(graph: GraphRewriter, norm: Any, linear: Any, scale: Any, shift: Any) -> str | None:
    """Check: the reason not to fold, as a clause; None to fold."""
    if len(norm.users) != 1 or linear not in graph.calls("linear") or linear.args[0] is not norm:
        return "something else than one linear layer takes its output"
    tensors = [one for one in (scale, shift, *linear.args[1:]) if one is not None]
    if not all(map(graph.is_parameter, tensors)):
        return "its tensors, or those of the linear layer, are computed by other code"
    if graph.memory().may_be_written([norm]):
        return "its output may be written to in place"
    return None


def fold(graph: GraphRewriter, norm: Any, linear: Any, scale: Any, shift: Any) -> None:
    """Rewrite: a LayerNorm without scale and shift, and a linear layer with derived tensors."""
    source, shape, eps = norm.args[0], graph.argument(norm, 1, "normalized_shape"), graph.argument(norm, 4, "eps", 1e-5)
    weight, bias = linear.args[1], graph.argument(linear, 2, "bias")
    with graph.change(norm, f"folded into {graph.where(linear)}"):
        plain = graph.call(norm, F.layer_norm, (source, shape, None, None, eps))
        scaled = graph.derived(linear, scaled_weight, weight, scale, what="the scaled weight")
        others = [one for one in (bias, shift) if one is not None]
        shifted = graph.derived(linear, SHIFTED[bias is not None, shift is not None], weight, *others, what="the bias")
        graph.replace_call(linear, F.linear, (plain, scaled, shifted))


def scaled_weight(weight: Tensor, scale: Tensor) -> Tensor:
    """W * g, (out, in), computed in float64 and cast back once."""
    return (weight.double() * scale.double()).to(weight.dtype)


def _both(weight: Tensor, bias: Tensor, shift: Tensor) -> Tensor:
    return (bias.double() + weight.double() @ shift.double()).to(weight.dtype)


def _shift_alone(weight: Tensor, shift: Tensor) -> Tensor:
    return (weight.double() @ shift.double()).to(weight.dtype)


def _bias_alone(weight: Tensor, bias: Tensor) -> Tensor:
    return bias.clone()


def _none(weight: Tensor) -> Tensor:
    return weight.new_zeros(len(weight))


# b + W s, (out,). The key says whether there is a bias, and whether there is a shift.
SHIFTED = {(True, True): _both, (False, True): _shift_alone, (True, False): _bias_alone, (False, False): _none}


class Block(nn.Module):
    """The feed-forward block of a transformer layer; with `raw`, it returns the normalized input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor, raw: bool = False) -> Tensor:
        """Map (batch, tokens, 32) to the same shape."""
        y = self.norm(x)
        return y if raw else x + self.fc2(F.gelu(self.fc1(y)))


def main() -> None:
    """Fold a block's LayerNorm, and show that other calls and other weights give correct results too."""
    torch.manual_seed(0)
    model, x = Block().eval(), torch.randn(2, 5, 32)
    with torch.no_grad():
        model.norm.weight.uniform_(0.5, 2.0)
        model.norm.bias.uniform_(-1.0, 1.0)
    fast = optimize(model, passes=[FoldLayerNorm()], example_inputs=(x,))
    print(fast.report)
    for place in fast.report.passes[0].changes:
        print(f"  {place.where}: {place.text}")
    print(f"with raw=True the two differ by {(fast(x, raw=True) - model(x, raw=True)).abs().max().item():.1e}")
    other = Block().eval()
    fast.load_state_dict(other.state_dict())
    print(f"with the weights of another model they differ by {(fast(x) - other(x)).abs().max().item():.1e}")


if __name__ == "__main__":
    main()
