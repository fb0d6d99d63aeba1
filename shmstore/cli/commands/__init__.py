"""The subcommands of `shmstore` that look at stores; each module has one `COMMAND`."""
