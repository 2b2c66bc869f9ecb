"""Custom operators: opaque to torch.compile, with a fake form and a gradient, at little cost a call.

`torch.library.custom_op` defines the same operators, and looks at each call whether a result shares memory with an
argument; the host then takes longer over the call than the card over a small kernel. Here opcheck looks, in the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # torch.compiler.disable would import the compiler here and now

NAMESPACE = "fat5"

_PRE_DISPATCH = torch._C.DispatchKey.PreDispatch

# An operator lives as long as its library; a module that is loaded again replaces both.
_libraries: dict[str, torch.library.Library] = {}
_formulas: dict[str, _Formula] = {}
_functions: dict[Any, Callable[..., Any]] = {}  # what each operator runs


def plain_calls() -> bool:
    """Whether calls run now, unseen: nothing is traced, no gradients are recorded, and no dispatch mode looks on.

    Modes of `__torch_function__` are not asked: a default device is one, and changes nothing here.
    """
    return not (
        torch.compiler.is_compiling()
        or torch.is_grad_enabled()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or torch._C._dispatch_tls_is_dispatch_key_included(_PRE_DISPATCH)
    )


def call(overload: Any, x: Tensor, *arguments: Any) -> Any:
    """Call an operator with plain tensors, or its function where the way through the dispatcher changes nothing.

    That way takes the host several microseconds, as long as a small kernel.

    Args:
        overload: What `operator` returned.
        x: Its first argument.
        *arguments: The others.
    """
    if type(x) is Tensor and plain_calls():
        return _functions[overload](x, *arguments)
    return overload(x, *arguments)


class _Formula:
    """How an operator is differentiated, if it is."""

    backward: Callable[..., Any] | None = None
    setup_context: Callable[..., None] | None = None


def operator(
    name: str, *, fake: Callable[..., Any], mutates: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], Any]:
    """Define `fat5::{name}` by the decorated function, and put the operator, a `torch._ops.OpOverload`, in its place.

    The function's annotations are its schema. It has no default values, changes no arguments but those named, and
    returns new tensors. It runs below autograd: never in a torch.compile trace, and without recording.

    Args:
        name: Its name in the namespace.
        fake: Maps the arguments to empty tensors of the shapes, types, strides and devices of the results.
        mutates: Arguments that it writes to. Autograd is not told: they are nobody's saved tensors.
    """

    def define(function: Callable[..., Any]) -> Any:
        _libraries.pop(name, None)
        library = _libraries[name] = torch.library.Library(NAMESPACE, "FRAGMENT")
        schema = name + torch.library.infer_schema(function, mutates_args=tuple(mutates))
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        opaque = _disable_dynamo(function)
        library.impl(name, opaque, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
        overload = getattr(getattr(torch.ops, NAMESPACE), name).default
        formula = _formulas[overload.name()] = _Formula()
        _functions[overload] = opaque
        library.impl(name, _with_autograd(name, overload, formula), "Autograd")
        return overload

    return define


def register_autograd(
    overload: Any, backward: Callable[..., Any], *, setup_context: Callable[[Any, tuple[Any, ...], Any], None]
) -> None:
    """Give an operator its gradient; one that has none raises in a backward pass.

    Args:
        overload: What `operator` returned.
        backward: Maps the context and the gradients of the results to the gradients of all arguments.
        setup_context: Keeps in the context what `backward` needs of the arguments and the results.
    """
    formula = _formulas[overload.name()]
    formula.backward, formula.setup_context = backward, setup_context


def _with_autograd(name: str, overload: Any, formula: _Formula) -> Callable[..., Any]:
    def forward(ctx: Any, *arguments: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            result = overload(*arguments)
        if formula.setup_context is not None:
            formula.setup_context(ctx, arguments, result)
        return result

    def backward(ctx: Any, *gradients: Any) -> Any:
        if formula.backward is None:
            raise RuntimeError(
                f"{NAMESPACE}::{name} has no autograd formula: expected first derivatives alone, got a second"
            )
        return formula.backward(ctx, *gradients)

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    record = type(name, (torch.autograd.Function,), methods)

    def call(*arguments: Any) -> Any:
        if torch.is_grad_enabled():
            return record.apply(*arguments)  # type: ignore[attr-defined]
        with torch._C._AutoDispatchBelowAutograd():
            return overload(*arguments)

    return call
