"""Jobs: processes on this machine, under torchrun or Ray; what a rank does, how failures are reported, restarts."""
