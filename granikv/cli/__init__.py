"""The command line: one file per command; what a command does is in the layers below."""
