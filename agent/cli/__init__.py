"""The command line: the parser, and one verb a file. Nothing heavy is imported at the top."""
