"""Every technique in one place: its card, checks and analytic rewrite, with its torch implementation in
``NAME_torch.py``."""
