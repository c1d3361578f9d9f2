"""What `dflash-tui` does without its screens: one file a command, each with `add_arguments(parser)` and `run(args, settings)`."""
