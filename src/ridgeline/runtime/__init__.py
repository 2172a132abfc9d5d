"""What a running step is made of, driven by techniques: the builder, meshes, reducers, stages, host and flat states.

Stands above the torch twin and below the techniques; engines (``train``) stand above both.
"""
