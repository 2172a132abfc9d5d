"""Compiles the CPU kernels into the wheel where RIDGELINE_COMPILE_KERNELS=1 asks for it; otherwise the wheel is pure
Python, and the kernels are compiled at first use."""

import importlib.util
import os
import sysconfig
import tempfile
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

KERNELS = Path("src/ridgeline/nn/kernels")


class CustomBuildHook(BuildHookInterface):
    """One library for each level of instruction set."""

    def initialize(self, version, build_data):
        """Compile, and name the platform in the wheel's tag: nothing depends on the version of Python."""
        if version == "editable" or os.environ.get("RIDGELINE_COMPILE_KERNELS") != "1":
            return
        root = Path(self.root)
        spec = importlib.util.spec_from_file_location("compiling", root / KERNELS / "compiling.py")
        compiling = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(compiling)
        self.libraries = tempfile.TemporaryDirectory()  # not in the checkout, which would go on using them
        for name, level in compiling.LEVELS.items():
            place = Path(self.libraries.name) / f"{name}.so"
            compiling.compile_kernels(os.environ.get("CXX", "g++"), place, level.options)
            build_data["force_include"][str(place)] = f"ridgeline/nn/kernels/compiled/{name}.so"
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
