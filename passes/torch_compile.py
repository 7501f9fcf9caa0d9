"""Compile a module's call with torch.compile: the whole model, or its repeated blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from passes.base import Context, Pass, PassResult
from passes.compiling.blocks import (
    Blocks,
    BlocksTrial,
    CompiledCall,
    FusibleWork,
    WholeTrial,
    bound_forwards,
    repeated_blocks,
)
from passes.compiling.compiler import CompileRecord, RecordingBackend, import_inductor, missing_compiler
from passes.compiling.frozen import Compile, FrozenCall
from passes.errors import RequirementNotMet
from passes.graph.backend import GraphCall, compiled, entry_of, without_graph_call
from passes.module_interface import ModelTree, ModuleRewriter
from passes.torch_private import COMPILED_CALL, compiler_named, options_of_mode

# With "auto", blocks are compiled if they do this share of the work that compiling can save: the rest isn't compiled.
_LEAST_SHARE = 0.9
# These modes capture CUDA graphs, whose memory the next call of the same code reuses.
_CAPTURING = ("reduce-overhead", "max-autotune")


@dataclass(frozen=True)
class TorchCompile(Pass):
    """Compile the whole model, or its repeated blocks once for all, with torch.compile.

        module(x)              ->  compiled code of the whole call            regions="whole"
        block0, ... blockN(x)  ->  one compiled code for all equal blocks     regions="blocks"

    Equal blocks, such as the layers of a transformer, are compiled once, so the first call takes a fraction of the
    time. The code around them isn't compiled. A run of torch.compile's front end alone shows whether blocks can share
    code. If graph passes changed the model before, the whole is compiled, with their changes.

    The module stays the same object with the same state_dict keys. The compiled call is set on the instance, as
    `Module.compile()` does. Copies and exported files don't contain it: they have the module as it was before this
    pass. As with all code of torch.compile, hooks that are added later to inner modules aren't called.

    With `freezing`, the weights and all other tensors that modules hold become constants of the code, in the layout
    that its kernels prefer. If one of them is written to, moved or replaced, the next call notices, and the code is
    compiled again; torch doesn't count writes through `.data`. After the fourth such change, or if a tensor can't be
    watched (one in a list of the module, for example), the code reads all tensors at each call. Calls
    with gradients enabled use other code.

    Attributes:
        mode: as for torch.compile.
        fullgraph: raise at a graph break instead of compiling in parts.
        dynamic: true for one kernel for all sizes, false for one kernel per size, none to decide at the second size.
        backend: a torch.compile backend.
        freezing: compile the weights into the code as constants; for inference.
        regions: "whole"; "blocks", which needs three or more equal modules with the same parent; or "auto": blocks if
            runs of the example inputs show that they share code and do at least nine tenths of the work that compiling
            can save, otherwise the whole.
    """

    name: ClassVar[str] = "torch-compile"
    needs_graph: ClassVar[bool] = False
    is_barrier: ClassVar[bool] = True

    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    fullgraph: bool = False
    dynamic: bool | None = None
    backend: str = "inductor"
    freezing: bool = False
    regions: Literal["auto", "whole", "blocks"] = "auto"

    def check(self, context: Context) -> None:
        """Check that there is a compiler for the device, and that the options are compatible.

        Raises:
            RequirementNotMet: there is no compiler or no backend of that name, or two options contradict each other.
        """
        super().check(context)
        known = torch.compiler.list_backends(exclude_tags=())
        if self.backend not in known:
            raise RequirementNotMet(f"torch-compile has no backend {self.backend!r}: use one of {', '.join(known)}.")
        if self.backend != "inductor" and (self.mode != "default" or self.freezing):
            option = f"mode={self.mode}" if self.mode != "default" else "freezing=true"
            raise RequirementNotMet(
                f"torch-compile:{option} is only for inductor: leave it out with backend={self.backend}."
            )
        if self.freezing and context.mode != "inference":
            raise RequirementNotMet(
                "torch-compile:freezing=true turns the weights into constants, but they are trained here: leave it out."
            )
        if self.regions == "blocks" and (reason := self._why_whole()):
            raise RequirementNotMet(
                f"torch-compile:regions=blocks can't be combined with {reason}: leave one of them out."
            )
        if self.backend == "inductor" and (missing := missing_compiler(context.device)):
            raise RequirementNotMet(f"torch-compile isn't available here: {missing}.")

    def _why_whole(self) -> str:
        """The option that rules out blocks, with the reason; "" for none."""
        if self.freezing:
            return "freezing=true, which compiles each block's own weights into the code"
        if self.mode in _CAPTURING:
            return f"mode={self.mode}, which keeps outputs only until the code is called again"
        return ""

    def run(self, tree: ModelTree, context: Context) -> PassResult:
        """Install the compiled calls; the code is compiled at the first call.

        Raises:
            RequirementNotMet: `fullgraph` or `regions="blocks"` isn't possible for this module.
        """
        rewriter = ModuleRewriter(tree)
        root = tree.root
        with without_graph_call(root) as call:
            compiled = [path for path, module in root.named_modules() if module.__dict__.get(COMPILED_CALL) is not None]
            if compiled:
                rewriter.skip(compiled[0], "its call is already compiled")
                return PassResult((), tuple(rewriter.skips), rewriter)
            groups = self._blocks(root, context, is_rewritten=call is not None)
            if self.fullgraph and not groups and context.run_compiled is not None:
                self._refuse_break(WholeTrial(root), context)
        record = CompileRecord(tuple(tuple(path for path, _ in group) for group in groups))
        if groups:
            for group in groups:
                self._compile_blocks(rewriter, group, record)
        else:
            with rewriter.change("", f"compiled by {self.backend}"):
                rewriter.set_attribute(root, COMPILED_CALL, self._whole(root, record, call))
        return PassResult(tuple(rewriter.changes), (), rewriter, detail=record)

    def _blocks(self, root: nn.Module, context: Context, *, is_rewritten: bool) -> Sequence[Blocks]:
        """The groups of blocks to compile; empty if the whole model is compiled.

        Args:
            is_rewritten: whether graph passes rewrite the call of the whole model; blocks would drop their changes.
        """
        if self.regions == "whole":
            return ()
        if self.regions == "auto" and (self._why_whole() or is_rewritten or context.run_compiled is None):
            return ()
        if is_rewritten:
            raise RequirementNotMet(
                "torch-compile:regions=blocks would drop the changes of the graph passes before it, which rewrite the "
                "whole model: use regions=whole, or leave those passes out."
            )
        groups = repeated_blocks(root)
        if groups and context.run_compiled is not None:
            trial = BlocksTrial(groups)
            failed = context.run_compiled(trial.watch())
            groups = [] if failed else trial.shared(len(context.example_calls))
        if self.regions == "auto":
            return groups if _share(groups, context) >= _LEAST_SHARE else ()
        if not groups:
            raise RequirementNotMet(
                "torch-compile:regions=blocks finds no three equal modules with the same parent that could share their "
                "code: leave it out."
            )
        return groups

    def _refuse_break(self, trial: WholeTrial, context: Context) -> None:
        assert context.run_compiled is not None
        context.run_compiled(trial.watch())
        if trial.found is not None:
            raise RequirementNotMet(
                f"torch-compile:fullgraph=true isn't possible: the graph breaks at {trial.found.where} "
                f"({trial.found.reason}): change that line, or leave fullgraph out."
            )

    def _compile_blocks(self, rewriter: ModuleRewriter, group: Blocks, record: CompileRecord) -> None:
        (first, block), *_, (last, _) = group
        compiled = self._compiled(record)(entry_of(type(block)))
        with rewriter.change(first, f"compiled by {self.backend}, for {len(group)} blocks up to {last}"):
            for _, block in group:
                rewriter.set_attribute(block, COMPILED_CALL, CompiledCall(compiled, block))
            for module, bound in bound_forwards(block for _, block in group):
                rewriter.set_attribute(module, "forward", bound)

    def _whole(self, root: nn.Module, record: CompileRecord, call: GraphCall | None) -> Callable[..., Any]:
        compile = self._compiled(record, call)
        if self.freezing:
            return FrozenCall(root, compile)
        return CompiledCall(compile(entry_of(type(root))), root)

    def _compiled(self, record: CompileRecord, call: GraphCall | None = None) -> Compile:
        """torch.compile with the options of the pass. It applies the passes of `call`, and records its programs."""
        name, compiler = self.backend, self._compiler()
        if call is not None:
            compiler = _of_rewritten(call, compiler)

        def compile(function: Callable[..., Any], see: Callable[[Any], None] | None = None) -> Callable[..., Any]:
            compiled: Callable[..., Any] = torch.compile(
                function,
                fullgraph=self.fullgraph,
                dynamic=self.dynamic,
                backend=RecordingBackend(name, compiler, record, see),
            )
            return compiled

        return compile

    def _compiler(self) -> Callable[..., Any]:
        if self.backend == "inductor":
            import_inductor()
        found: Callable[..., Any] = compiler_named(self.backend)
        if self.backend != "inductor" or self.mode == "default":
            return found
        options = options_of_mode(self.mode, dynamic=self.dynamic)
        return lambda graph, inputs: found(graph, inputs, config_patches=options)


def _of_rewritten(call: GraphCall, compiler: Callable[..., Any]) -> Callable[..., Any]:
    return lambda graph, inputs: compiled(call, compiler, graph, inputs)


def _share(groups: Sequence[Blocks], context: Context) -> float:
    """The blocks' share of the work that compiling can save, 0 to 1; 0 if no run shows it."""
    if not groups or context.run_inside is None:
        return 0.0
    work = FusibleWork(groups)
    return 0.0 if context.run_inside(work) else work.share
