"""A pass of your own, in one file: find, judge, rewrite.

    python examples/own_pass.py

To give it to others, register the class in your package's pyproject.toml; it is then a name like any other, here and on
the command line:

    [project.entry-points."optimize_export.passes"]
    drop-dropout = "your_package.drop_dropout:DropDropout"
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx, nn

from optimizer import optimize
from passes import GraphPass, Rewriter
from passes.graph.hooks import has_hooks
from passes.graph.match import is_stock
from passes.graph.program import Program

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)


@dataclass(frozen=True)
class DropDropout(GraphPass):
    """Take out dropout, which does nothing in eval.

    Dropout(x) == x  where it isn't training.

    Does not handle: dropout as a function, dropout in a forward that can't be traced.
    """

    name: ClassVar[str] = "drop-dropout"
    modes: ClassVar[tuple[str, ...]] = ("inference",)

    def rewrite(self, graph: Rewriter) -> None:
        """Take out every dropout that can be taken out."""
        for node in dropouts(graph.program):
            if reason := why_not(graph.program, node):
                graph.skip(node, reason)
            else:
                drop(graph, node)


def dropouts(program: Program) -> Iterator[fx.Node]:
    """Find: every call of a dropout module, in every graph."""
    for node in list(program.nodes()):
        module = program.module_of(node)
        if module is not None and is_stock(module, DROPOUTS):
            yield node


def why_not(program: Program, node: fx.Node) -> str | None:
    """Judge: a reason not to, or None."""
    module = program.module_of(node)
    assert module is not None
    if module.training:
        return "it is in training mode"
    if has_hooks(module):
        return "it has hooks"
    if not program.home(node).traced:
        return f"the forward of {program.home(node).path or 'the root'} can't be traced"
    return None


def drop(graph: Rewriter, node: fx.Node) -> None:
    """Rewrite: whoever used its output uses its input. The region is what the program checks the rewrite on."""
    with graph.change(graph.program.where(node), "taken out", region=(node,)):
        graph.bypass(node)


def main() -> None:
    """Run it beside a pass of the program's own."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout2d(0.2),
        nn.Flatten(),
        nn.Linear(8 * 30 * 30, 10),
        nn.Dropout(0.5),
    )
    fast = optimize(model, passes=["fold-conv-bn", DropDropout()], example_inputs=(torch.randn(2, 3, 32, 32),))
    print(fast.report)
    for record in fast.report.passes:
        for place in record.changes:
            print(f"  {record.name}: {place.where or 'the root'}: {place.text}")


if __name__ == "__main__":
    main()
