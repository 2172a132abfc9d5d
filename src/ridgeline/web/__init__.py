"""The local web app: the command line's second face. It asks the library and shows what it answers."""
