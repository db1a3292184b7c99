"""CUDA graphs without a GPU: what torch.cuda offers for them, on the CPU.

A graph records every operation with the tensors it was given and gave. Replaying runs them again on those very tensors, as a
GPU would: whatever the host decided while it recorded stays as it was, and only what is in the tensors can be new.
"""

from __future__ import annotations

import contextlib
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten


class Graph(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls, self.undo = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for argument, value in zip(func._schema.arguments, args):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.undo.append((value, value.clone()))
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, out))
        return out

    def __exit__(self, *error):
        """Recording changes nothing."""
        super().__exit__(*error)
        for value, before in reversed(self.undo):
            value.copy_(before)

    def pool(self):
        return None

    def replay(self):
        for func, args, kwargs, recorded in self.calls:
            if all(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns) and func._schema.returns:
                continue  # a view, which is there already
            out = func(*args, **kwargs)
            for new, old in zip(tree_flatten(out)[0], tree_flatten(recorded)[0]):
                if isinstance(old, torch.Tensor) and new.untyped_storage().data_ptr() != old.untyped_storage().data_ptr():
                    assert old.shape == new.shape, (func, old.shape, new.shape)
                    old.copy_(new)


@contextlib.contextmanager
def on_cpu(look: int):
    """While it lasts, a Batch on the CPU is one on a GPU: memory of its own, captured steps, a look every `look` of them, and
    values that are not looked at."""
    from toolr0_core import batch

    graphs = []

    def new():
        graphs.append(Graph())
        return graphs[-1]
    fakes = dict(Stream=mock.MagicMock, current_stream=mock.MagicMock(), CUDAGraph=new,
                 stream=lambda stream: contextlib.nullcontext(), graph=lambda graph, pool=None: graph)
    with mock.patch.multiple(torch.cuda, **fakes), mock.patch.dict(batch.LOOK, cpu=look), \
            mock.patch.dict(batch.OWN_MEMORY, cpu=True), mock.patch.object(batch, "CAPTURED", {"cpu"}), \
            mock.patch.multiple("toolr0_kernels.checks", **dict.fromkeys(("pages", "places", "sample"), lambda *args: None)):
        yield graphs
