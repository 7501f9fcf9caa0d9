"""A custom pass that approximates on purpose: it computes GELU by the tanh formula, and declares the maximum error.

    python examples/gelu_by_tanh.py

Without `max_error` the pass would be rolled back, because only rounding errors are allowed then. With it, each change
and the whole result may have this error. The report gives the measured error.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from optimize_export import optimize
from passes import Context, Example, GraphPass, GraphRewriter


@dataclass(frozen=True)
class GeluByTanh(GraphPass):
    """Approximate GELU by tanh.

        x * Phi(x)  is about  0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))

    (Hendrycks and Gimpel, Gaussian Error Linear Units, 2016.) The two differ by at most 5e-4.
    """

    name: ClassVar[str] = "gelu-by-tanh"
    max_error: ClassVar[float | None] = 2e-3

    # What the pass changes and what it refuses: its tests and its documentation.
    VALID: ClassVar[Sequence[Example]] = (Example("F.gelu(x)", (2, 8)),)
    REFUSED: ClassVar[Sequence[Example]] = (
        Example("F.gelu(x, approximate='tanh')", (2, 8), reason="it is computed by tanh already"),
    )

    def rewrite(self, graph: GraphRewriter, context: Context) -> None:
        """Use the formula in each call that doesn't use it yet."""
        for node in graph.calls("gelu"):
            if graph.argument(node, 1, "approximate", "none") != "none":
                graph.skip(node, "it is computed by tanh already")
                continue
            with graph.change(node, "GELU by tanh"):
                graph.replace_call(node, F.gelu, (node.args[0],), {"approximate": "tanh"})


def main() -> None:
    """Optimize a small network with the pass, and show the error that was measured."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4)).eval()
    fast = optimize(model, passes=[GeluByTanh()], example_inputs=(torch.randn(8, 16),))
    print(fast.report)
    for record in fast.report.passes:
        print(f"{record.name}: largest error {record.error:.1e} of {record.max_error:.0e} that are declared")
        for place in record.changes:
            print(f"  {place.where}: {place.text}")


if __name__ == "__main__":
    main()
