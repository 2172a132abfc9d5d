"""The inference engine and its server: one packed batch, one block manager, one API.

``Engine`` is synchronous and deterministic: ``add`` requests, ``step``, read events. Threads, HTTP and text are handled
around it.
"""
