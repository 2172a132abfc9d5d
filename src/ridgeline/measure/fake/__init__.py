"""Steps traced on a GPU that is not there: what is launched, what the host waits for, and where."""
