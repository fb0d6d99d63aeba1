"""The `shmstore` command: `main` is the command line, `commands` are its subcommands."""
