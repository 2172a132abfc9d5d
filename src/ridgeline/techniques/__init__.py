"""Every technique in one place: its card, checks and analytic rewrite; its torch half beside it (``NAME_torch.py``)."""
