"""The `shmstore` command: `main` is the command line, `commands` its subcommands, `demo` the largest of them."""
