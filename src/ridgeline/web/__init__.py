"""The local web app: a browser interface to the same library functions as the command line."""
