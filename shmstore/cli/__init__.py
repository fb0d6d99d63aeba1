"""The `shmstore` command: `main` is the command line, `commands` and `demo` are its subcommands."""
