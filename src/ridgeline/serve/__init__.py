"""The inference engine and its server: one packed batch, one block manager, one API.

``Engine`` is synchronous and deterministic: ``add`` requests, ``step``, read events. Everything that threads, speaks
HTTP or knows text lies around it.
"""
