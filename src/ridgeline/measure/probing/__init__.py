"""``ridgeline probe``: the rates of this machine."""
