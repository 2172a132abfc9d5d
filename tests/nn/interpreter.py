"""Triton as tests have it: in its interpreter, or on a GPU where that is asked for (``tests/conftest.py``).

Modules that import this are skipped where there is neither.
"""

import dataclasses
import functools
import importlib.util
from importlib.metadata import version

import pytest
import torch
from packaging.version import Version

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter takes int() of one-element arrays, which NumPy 2.4 refuses (triton-lang/triton#9171, fixed in 3.7).
_refused = Version(version("triton")) < Version("3.7") and Version(version("numpy")) >= Version("2.4")
if DEVICE == "cpu" and _refused:
    pytest.skip("this Triton's interpreter needs NumPy before 2.4", allow_module_level=True)


def _faster() -> None:
    """A kernel that calls another function patches the whole language again for every call: much of the interpreter's
    time. Here the language is patched once a launch."""
    from triton.runtime import interpreter

    if not (hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "_get_np_dtype")):
        return  # another version of Triton: as slow as it is
    patch, languages = interpreter._patch_lang, (interpreter.tl, interpreter.tl.core)
    launch, patched = None, set()

    @functools.cache
    def named(fn):
        """Those of the languages that the module of ``fn`` names."""
        return {id(value) for value in fn.__globals__.values() if any(value is each for each in languages)}

    def once(fn):
        nonlocal launch
        seen = named(fn)
        if launch is None or not launch._changes:  # restored behind the last launch
            launch = patch(fn)
            patched.clear()
            patched.update(seen)
        elif not seen <= patched:
            patched.update(seen)
            patch(fn)
        return launch  # who calls a function does not restore what it patched

    interpreter._patch_lang = once
    find, found = interpreter._get_np_dtype, {}

    def numpy_type(of):
        """Whose table of all types is made for each operand otherwise. Blocks have that of their numbers."""
        name = of.scalar.name
        if name not in found:
            found[name] = find(of)
        return found[name]

    interpreter._get_np_dtype = numpy_type
    # It computes for every sum whether it overflows, and tells nobody: its assertions are off. A third of the time.
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    _same_shapes(interpreter.tl.core)


def _same_shapes(core) -> None:
    """Types of blocks are the same few over and over: they are checked and named once, and their sizes wrapped once."""
    block, tensor, types, shapes = core.block_type.__init__, core.tensor.__init__, {}, {}

    def block_type(self, element_ty, shape):
        key = element_ty.name, *(getattr(size, "value", size) for size in shape)
        if key not in types:
            block(self, element_ty, shape)
            types[key] = dict(vars(self))
        vars(self).update(types[key], element_ty=element_ty)

    def value(self, handle, type):
        key = type.name if type.is_block() else ""
        if key not in shapes:
            tensor(self, handle, type)
            shapes[key] = {"shape": self.shape, "numel": self.numel}
        vars(self).update(shapes[key], handle=handle, type=type, dtype=type.scalar)

    core.block_type.__init__, core.tensor.__init__ = block_type, value


if DEVICE == "cpu":
    _faster()
