"""Building blocks of a running step that techniques use: the builder, meshes, reducers, stages, host and flat states.

Depends on the torch model and is used by the techniques; the engines (``train``) use both.
"""
